"""What clients get when the engine's process dies, hangs or does not start, and how the server recovers."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import engines
import httpx
import pytest
from serving import Running, serving

from soothsay import LLM, Grammar, SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.errors import SoothsayError
from soothsay.server.engines import engine_process as process
from soothsay.server.engines import idle_work, worker
from soothsay.server.engines.engine_messages import (
    Admitted,
    Cancel,
    CatchUp,
    EmittedTokens,
    EngineUpdate,
    RequestOptions,
    Submit,
    answer_update,
    has_news,
)
from soothsay.server.engines.engine_process import EngineProcess
from soothsay.server.engines.worker import Prepared, Worker
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.http.api_errors import ApiError

ENDLESS = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 5000, "ignore_eos": True}
SEEDED = {"model": "sibyl", "prompt": "A man", "seed": 7, "max_tokens": 20}


@pytest.fixture
def mortal() -> Iterator[Running]:
    """A server with one engine. With another one, it would stay ready when the first one is killed."""
    with serving(engines.sibyl, replicas=1) as one:
        yield one


def health(running: Running) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(f"{running.url}/health")
    return reply.status_code, reply.json()


def ask(running: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)


def kill(running: Running) -> None:
    os.kill(health(running)[1]["engine_pid"], signal.SIGKILL)


LONG = {"model": "sibyl", "prompt": "A man", "max_tokens": 200, "ignore_eos": True, "logprobs": 2, "n": 2}


def asked(running: Running, body: dict[str, Any]) -> list[Any]:
    """The answers to a request: index, text, log-probabilities and finish reason."""
    reply = ask(running, body)
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        events = [event for event in reply.text.split("\n\n") if event.startswith("data: {")]
        assert not any("error" in event for event in events)
        parts = [one for event in events for one in json.loads(event.removeprefix("data: "))["choices"]]
    else:
        parts = reply.json()["choices"]
    answers: list[Any] = []
    for index in range(body.get("n", 1)):
        own = [part for part in parts if part["index"] == index]
        text = "".join(part["text"] for part in own)
        logprobs = [one for part in own for one in (part["logprobs"] or {}).get("token_logprobs", [])]
        answers.append((text, logprobs, own[-1]["finish_reason"]))
    return answers


def test_answers_go_on_when_their_engine_was_killed(mortal: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same character, with the next engine. There is only one at a time here."""
    monkeypatch.setattr("soothsay.server.fleet.engine_loop.PATIENCE", 60.0)  # on a busy machine
    bodies = [{**LONG, "seed": seed, "temperature": seed % 3 / 2} for seed in range(4)]
    meant = [asked(mortal, body) for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        replies = [
            pool.submit(asked, mortal, {**body, "stream": i % 2 == 0}) for i, body in enumerate(bodies)
        ]
        jobs = mortal.server.loop._jobs
        mortal.wait_until(lambda: len(jobs) == 4 and all(job.num_output for job in [*jobs.values()]))
        kill(mortal)
        mortal.wait_until(lambda: health(mortal)[0] == 503)
        status, body = health(mortal)
        assert (status, body["status"], body["seconds_since_answer"]) == (503, "engine starting", None)
        ready = httpx.get(f"{mortal.url}/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "engine starting")
        assert ask(mortal, SEEDED).status_code == 200  # it waits too
        assert [reply.result() for reply in replies] == meant
    assert health(mortal)[1]["engine_restarts"] == 1
    mortal.wait_until(lambda: mortal.free)


def test_new_requests_wait_for_the_next_engine_only_so_long(
    mortal: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soothsay.server.fleet.engine_loop.PATIENCE", 0.0)
    kill(mortal)
    mortal.wait_until(lambda: health(mortal)[0] == 503)
    refused = ask(mortal, SEEDED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
    assert refused.headers["retry-after"] == "1"
    mortal.wait_until(lambda: health(mortal)[0] == 200, 60)
    mortal.wait_until(lambda: mortal.free)
    assert ask(mortal, SEEDED).status_code == 200


@pytest.mark.slow
def test_a_killed_engine_comes_back_again_and_again(mortal: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.server.fleet.engine_loop.PATIENCE", 0.0)
    for restarts in (1, 2, 3):
        kill(mortal)
        mortal.wait_until(lambda: health(mortal)[0] == 503)
        wait = 2 ** (restarts - 2) if restarts > 1 else 0
        if wait:
            assert health(mortal)[1]["engine_pid"] is None
            assert 0 < int(ask(mortal, SEEDED).headers["retry-after"]) <= wait
        mortal.wait_until(lambda: health(mortal)[0] == 200, 60)
        assert health(mortal)[1]["engine_restarts"] == restarts
        assert ask(mortal, SEEDED).status_code == 200


@pytest.mark.slow
def test_a_request_that_kills_engines_kills_three_at_most() -> None:
    with serving(engines.fragile, restart_delay=0.1) as running:
        failed = ask(running, {**ENDLESS, "prompt": [engines.KILL, 17]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_stopped")
        running.wait_until(lambda: health(running)[1]["engine_restarts"] == 3)
        running.wait_until(lambda: health(running)[0] == 200, 60)
        assert ask(running, SEEDED).status_code == 200


def test_an_engine_that_was_sound_for_a_while_is_restarted_again() -> None:
    """A request that kills engines has three. Another answer goes on at the fourth."""
    with serving(engines.fragile, settling=0) as running, ThreadPoolExecutor(1) as pool:
        meant = asked(running, {**LONG, "seed": 1})
        other = pool.submit(asked, running, {**LONG, "seed": 1, "stream": True})
        jobs = running.server.loop._jobs
        running.wait_until(lambda: any(job.num_output for job in [*jobs.values()]))
        failed = ask(running, {**ENDLESS, "prompt": [engines.EXIT, 17]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_stopped")
        running.wait_until(lambda: health(running)[1]["engine_restarts"] == 3)
        running.wait_until(lambda: health(running)[0] == 200, 60)
        text = httpx.get(f"{running.url}/metrics").text
        assert 'soothsay:engine_restarts_total{model_name="sibyl"} 3.0' in text
        assert other.result() == meant


def test_an_engine_that_hangs_is_ended_by_force() -> None:
    with Fleet(partial(EngineProcess, engines.sibyl)) as fleet:
        process = fleet._engines[0]
        assert isinstance(process, EngineProcess)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":  # on a busy machine, stopping takes time
            time.sleep(0.01)
        process.end(grace=0.1)
        assert process.exit_code == -signal.SIGKILL


def test_a_process_that_dies_while_it_loads() -> None:
    with (
        pytest.raises(SoothsayError, match=r"while it was loading, .* -9; memory"),
        Fleet(partial(EngineProcess, engines.killed)),
    ):
        pass


def test_a_process_that_cannot_start_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Connection] = []

    def pipe() -> list[Connection]:
        ends.extend(process.multiprocessing.Pipe())
        return ends

    def refuse(theirs: Connection) -> Any:
        raise OSError("no room")

    monkeypatch.setattr(process, "SPAWN", SimpleNamespace(Pipe=pipe))
    engine = EngineProcess(engines.sibyl)
    monkeypatch.setattr(engine, "_launch", refuse)
    with pytest.raises(OSError, match="no room"):
        engine.start()
    assert [end.closed for end in ends] == [True, True]


def test_errors_travel() -> None:
    error = ApiError(429, "later", "queue_full", param="n", headers={"Retry-After": "1"})
    there = pickle.loads(pickle.dumps(error))
    assert vars(there) == vars(error)
    assert str(there) == "later"


class EndedError(Exception):
    pass


@pytest.mark.parametrize(("interval", "lengths"), [(0.0, [1, 2, 3, 4, 5, 6]), (1e6, [1, 6])])
def test_short_steps_share_a_report(
    sibyl: LLM, monkeypatch: pytest.MonkeyPatch, interval: float, lengths: list[int]
) -> None:
    """The first token and the end are reported at once, and nothing is lost."""
    told: list[EngineUpdate] = []

    def tell(message: Any) -> None:
        if isinstance(message, EngineUpdate):
            told.append(message)
            if 0 in message.ended:
                raise EndedError

    monkeypatch.setattr(worker, "REPORT_INTERVAL", interval)
    inbox = SimpleQueue[Any]()
    prompt = sibyl.tokenizer.encode("A man")  # type: ignore[union-attr]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    inbox.put(Submit(0, [prompt], params, RequestOptions(drafter="none")))
    with pytest.raises(EndedError):
        Worker(sibyl, tell, inbox).run()
    updates = [update for message in told for update in message.answers]
    assert [update.num_output for update in updates] == lengths
    assert "".join(update.text for update in updates) == sibyl.generate([prompt], params)[0].text


def test_freed_memory_is_returned_between_steps(sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPORT_INTERVAL", 0.0)
    returned: list[int] = []
    monkeypatch.setattr(idle_work, "return_freed_memory", lambda: returned.append(len(steps)))
    steps: list[EngineUpdate] = []

    def tell(message: Any) -> None:
        if isinstance(message, EngineUpdate):
            steps.append(message)
            if 0 in message.ended:
                raise EndedError

    for interval, expected in ((0.0, [1, 2, 3]), (1e6, [])):
        steps.clear(), returned.clear()
        monkeypatch.setattr(idle_work, "TIDY_INTERVAL", interval)
        inbox = SimpleQueue[Any]()
        prompt = sibyl.tokenizer.encode("A man")  # type: ignore[union-attr]
        inbox.put(Submit(0, [prompt], SamplingParams(max_tokens=4, ignore_eos=True), RequestOptions()))
        with pytest.raises(EndedError):
            Worker(sibyl, tell, inbox).run()
        assert returned == expected


def test_names_take_turns_at_the_preparation_of_their_grammars(sibyl: LLM) -> None:
    started, compiled, prepared = threading.Event(), threading.Event(), list[str]()

    def constraint(params: SamplingParams, tenant: Tenant) -> None:
        started.set()
        compiled.wait(20)
        prepared.append(tenant.name)

    inbox = SimpleQueue[Any]()
    worker = Worker(cast(Any, SimpleNamespace(engine=sibyl.engine, constraint=constraint)), print, inbox)
    formed = SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    for job, tenant in enumerate([*(Tenant("a", str(salt)) for salt in range(4)), Tenant("b"), Tenant("c")]):
        worker._act(Submit(job, [[1]], formed, RequestOptions(tenant=tenant)))
        started.wait(20)
    compiled.set()
    for _ in range(6):
        assert isinstance(inbox.get(timeout=20), Prepared)
    assert prepared == ["a", "a", "b", "c", "a", "a"], "the second of a stood in line before b and c came"


def test_steps_go_on_while_a_grammar_is_compiled(sibyl: LLM) -> None:
    """A job that is cancelled meanwhile is never admitted."""
    compiled, inbox, told = threading.Event(), SimpleQueue[Any](), SimpleQueue[Any]()

    def tell(message: Any) -> None:
        told.put(message)
        if isinstance(message, EngineUpdate) and 3 in message.ended:
            raise EndedError

    def constraint(params: SamplingParams, tenant: Tenant) -> Any:
        compiled.wait()
        return sibyl.constraint(params, tenant)

    llm: Any = SimpleNamespace(engine=sibyl.engine, requests=sibyl.requests, constraint=constraint)

    def run() -> None:
        with pytest.raises(EndedError):
            Worker(llm, tell, inbox).run()

    thread = threading.Thread(target=run)
    thread.start()
    prompt = sibyl.tokenizer.encode("A man")  # type: ignore[union-attr]
    formed = SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    for job, params in enumerate((formed, formed, short)):
        inbox.put(Submit(job, [prompt], params, RequestOptions()))
    inbox.put(Cancel(0))
    heard: list[Any] = []
    while not any(isinstance(message, EngineUpdate) and 2 in message.ended for message in heard):
        heard.append(told.get(timeout=20))
    compiled.set()
    while not any(isinstance(message, EngineUpdate) and 1 in message.ended for message in heard):
        heard.append(told.get(timeout=20))
    inbox.put(Submit(3, [prompt], short, RequestOptions()))
    thread.join(20)
    assert [message.job for message in heard if isinstance(message, Admitted)] == [2, 1]
    said = [update for message in heard if isinstance(message, EngineUpdate) for update in message.answers]
    assert "".join(update.text for update in said if update.job == 1) in ("yes", "no")


def test_a_job_of_an_engine_that_was_lost_goes_on_and_its_silent_end_is_told_once(sibyl: LLM) -> None:
    one = Worker(sibyl, lambda message: None, SimpleQueue())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    one._act(Submit(0, [[5]], params, RequestOptions(), [EmittedTokens([7], False)]))
    (request,) = one._jobs[0]
    assert request.num_output == 1
    request.finish_unreported = True
    answer_update(0, 0, request)
    assert not has_news(request)
    one._act(Cancel(0))


def test_an_answer_catches_up_with_what_its_other_engine_has_said(sibyl: LLM) -> None:
    one = Worker(sibyl, lambda message: None, SimpleQueue())
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    one._act(Submit(0, [[5]], params, RequestOptions(), [EmittedTokens([7], False)]))
    (request,) = one._jobs[0]
    found = []
    for said in ([7, 8], [7, 8], [7, 8, 9]):
        one._act(CatchUp(0, [EmittedTokens(said, False)]))
        found.append(request.num_output)
    assert found == [2, 2, 3]
    one._act(Cancel(0))


@pytest.mark.parametrize("saves", [False, True])
def test_a_worker_that_keeps_what_drafters_learn_has_time_to_save_it(
    saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, wanted, events = SimpleQueue[Any](), threading.Event(), list[Any]()
    if saves:
        wanted.set()
    monkeypatch.setattr(worker, "os", SimpleNamespace(_exit=lambda code: events.append(("end", code))))
    clock = SimpleNamespace(sleep=lambda seconds: events.append((seconds, inbox.get_nowait())))
    monkeypatch.setattr(worker, "time", clock)
    ours, theirs = process.multiprocessing.Pipe()
    with ours, theirs:
        ours.send(None)
        worker._listen(theirs, inbox, wanted)
    assert events == [*([(worker.LAST_SAVE, None)] if saves else []), ("end", 0)]
    assert inbox.empty()
