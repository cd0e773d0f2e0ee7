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
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import engines
import httpx
import pytest
from openai import APIError
from serving import Running, serving

from soothsay import LLM, Grammar, SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.errors import SoothsayError
from soothsay.server import worker
from soothsay.server.api_errors import ApiError
from soothsay.server.messages import Admitted, Cancel, EngineUpdate, Submit
from soothsay.server.parameters import RequestOptions
from soothsay.server.process import EngineProcess
from soothsay.server.worker import Worker

ENDLESS = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 5000, "ignore_eos": True}
TYPED = {key: value for key, value in ENDLESS.items() if key != "ignore_eos"}
TYPED["extra_body"] = {"ignore_eos": True}
SEEDED = {"model": "sibyl", "prompt": "A man", "seed": 7, "max_tokens": 20}


@pytest.fixture
def mortal() -> Iterator[Running]:
    with serving(engines.sibyl) as one:
        yield one


def health(running: Running) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(f"{running.url}/health")
    return reply.status_code, reply.json()


def ask(running: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)


def kill(running: Running) -> None:
    os.kill(health(running)[1]["engine_pid"], signal.SIGKILL)


def test_a_killed_engine_is_restarted(mortal: Running) -> None:
    before = ask(mortal, SEEDED).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, mortal, {**ENDLESS, "stream": stream}) for stream in (False, True) * 4]
        jobs = mortal.server.loop._jobs
        mortal.wait_until(lambda: len(jobs) == 8 and all(job.num_output for job in [*jobs.values()]))
        kill(mortal)
        for stream, reply in zip((False, True) * 4, (one.result() for one in asked), strict=True):
            if stream:
                *_, error, done, end = reply.text.split("\n\n")
                assert (done, end) == ("data: [DONE]", "")
                told = json.loads(error.removeprefix("data: "))
            else:
                assert reply.status_code == 503
                assert reply.headers["retry-after"]
                told = reply.json()
            assert told["error"]["code"] == "engine_stopped"
            assert told["error"]["type"] == "server_error"
    status, body = health(mortal)
    assert (status, body["status"], body["seconds_since_answer"]) == (503, "engine starting", None)
    ready = httpx.get(f"{mortal.url}/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "engine starting")
    assert mortal.free
    refused = ask(mortal, SEEDED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")
    assert refused.headers["retry-after"] == "1"

    mortal.wait_until(lambda: health(mortal)[0] == 200, 60)
    assert health(mortal)[1]["engine_restarts"] == 1
    assert ask(mortal, SEEDED).json()["choices"] == before
    assert mortal.free


@pytest.mark.slow
def test_a_killed_engine_comes_back_again_and_again(mortal: Running) -> None:
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


def test_what_waited_when_the_engine_died_is_answered_by_the_next_one() -> None:
    with (
        serving(partial(engines.sibyl, max_requests=1)) as running,
        ThreadPoolExecutor(2) as pool,
        running.client() as client,
    ):
        meant = ask(running, SEEDED).json()["choices"]
        with client.completions.create(**TYPED, stream=True) as stream:
            next(iter(stream))
            waiting = [pool.submit(ask, running, SEEDED) for _ in range(2)]
            running.wait_until(lambda: running.in_engine == (1, 2))
            kill(running)
            with pytest.raises(APIError, match="starting again"):
                list(stream)
        for one in waiting:
            assert one.result().json()["choices"] == meant
        assert health(running)[1]["engine_restarts"] == 1
        assert running.free


@pytest.mark.slow
def test_a_request_that_kills_engines_kills_two_at_most() -> None:
    with serving(engines.fragile, restart_delay=0.1) as running:
        failed = ask(running, {**ENDLESS, "prompt": [engines.KILL, 17]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_stopped")
        running.wait_until(lambda: health(running)[0] == 200, 60)
        assert health(running)[1]["engine_restarts"] == 2
        assert ask(running, SEEDED).status_code == 200


def test_an_engine_that_was_sound_for_a_while_is_restarted_again() -> None:
    with serving(engines.fragile, settling=0) as running:
        for restarts in (1, 2):
            failed = ask(running, {**ENDLESS, "prompt": [engines.EXIT, 17]})
            assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_stopped")
            running.wait_until(lambda: health(running)[0] == 200, 60)
            assert health(running)[1]["engine_restarts"] == restarts
        text = httpx.get(f"{running.url}/metrics").text
        assert 'soothsay:engine_restarts_total{model_name="sibyl"} 2.0' in text


def test_an_engine_that_hangs_is_ended_by_force() -> None:
    with EngineProcess(engines.sibyl) as process:
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
        EngineProcess(engines.killed),
    ):
        pass


def test_errors_travel() -> None:
    error = ApiError(429, "later", "queue_full", param="n", headers={"Retry-After": "1"})
    there = pickle.loads(pickle.dumps(error))
    assert vars(there) == vars(error)
    assert str(there) == "later"


class EndedError(Exception):
    pass


def test_freed_memory_is_returned_between_steps(sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(worker, "return_freed_memory", lambda: returned.append(len(steps)))
    steps: list[EngineUpdate] = []

    def tell(message: Any) -> None:
        if isinstance(message, EngineUpdate):
            steps.append(message)
            if 0 in message.ended:
                raise EndedError

    for interval, expected in ((0.0, [1, 2, 3]), (1e6, [])):
        steps.clear(), returned.clear()
        monkeypatch.setattr(worker, "TIDY_INTERVAL", interval)
        inbox = SimpleQueue[Any]()
        prompt = sibyl.tokenizer.encode("A man")  # type: ignore[union-attr]
        inbox.put(Submit(0, [prompt], SamplingParams(max_tokens=4, ignore_eos=True), RequestOptions()))
        with pytest.raises(EndedError):
            Worker(sibyl, tell, inbox).run()
        assert returned == expected


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
