"""The server under stress: disconnecting clients, full queues, failing steps and shutdown."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from all_routes import BODIES
from openai import APIError, APIStatusError, InternalServerError, OpenAI, RateLimitError
from serving import Running, serving
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams, SpeculationStats
from soothsay.server.fleet.server_metrics import Metrics
from soothsay.server.http.json_log import JsonLines

ENDLESS: dict[str, Any] = {
    "model": "sibyl",
    "prompt": "A man",
    "temperature": 0,
    "max_tokens": 2000,
    "extra_body": {"ignore_eos": True},
}
SHORT: dict[str, Any] = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 4}


def lives(pid: int | None) -> bool:
    """Whether a process is running. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def numbers(running: Running) -> dict[str, float]:
    """The metrics, by name and labels without the model's label."""
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = re.compile(r'\{model_name="sibyl"\}|model_name="sibyl",|,model_name="sibyl"')
    return {model.sub("", name): float(value) for name, value in pairs}


@pytest.fixture(scope="module")
def fragile() -> Iterator[Running]:
    with serving(partial(engines.fragile, max_requests=1)) as one:
        yield one


def doomed(token: int, **changes: Any) -> dict[str, Any]:
    return {**ENDLESS, "prompt": [token, 17], **changes}


def test_an_answer_that_nobody_waits_for_ends_at_once(fragile: Running) -> None:
    with fragile.client() as client:
        with client.completions.create(**doomed(engines.SLOW), stream=True) as stream:
            next(iter(stream))
            assert not fragile.free
        fragile.wait_until(lambda: fragile.free)


WAITING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A man", "metadata": {"a": ["b"]}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi", "unknown": {"a": ["b"]}}]},
    "/v1/responses": {"model": "sibyl", "input": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"model": "sibyl", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/api/chat": {"model": "sibyl", "messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"model": "sibyl", "prompt": "Hi"},
    "/completion": {"prompt": "Hi", "response_fields": ["content"]},
}


def test_bodies_are_not_kept_while_their_answers_are_made(fragile: Running) -> None:
    def post(path: str, body: dict[str, Any]) -> int:
        return httpx.post(f"{fragile.url}{path}", json=body, timeout=60).status_code

    bodies = tuple(set(BODIES.values()))
    gc.collect()
    others = sum(isinstance(one, bodies) for one in gc.get_objects())  # of tests
    with fragile.client() as client, ThreadPoolExecutor(2 * len(WAITING)) as pool:
        with client.completions.create(**doomed(engines.SLOW), stream=True) as stream:
            next(iter(stream))
            replies = [
                pool.submit(post, path, {**body, "stream": streamed, "unknown": {"a": ["b"]}})
                for path, body in WAITING.items()
                for streamed in (False, True)
            ]
            fragile.wait_until(lambda: fragile.server.loop.num_jobs == 1 + len(replies))
            gc.collect()
            assert sum(isinstance(one, bodies) for one in gc.get_objects()) == others
        assert {reply.result() for reply in replies} == {200}


def test_a_client_that_hangs_up_while_it_waits_frees_its_blocks(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="soothsay.server")
    asked = {"model": "sibyl", "prompt": "A man", "max_tokens": 2000, "ignore_eos": True, "n": 3}
    body = json.dumps(asked).encode()
    address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        running.wait_until(lambda: running.in_engine == (3, 0))
    running.wait_until(lambda: running.free)
    found: dict[int, str] = {}

    def is_logged() -> bool:  # beside requests of tests before this one
        found.update({vars(record)["status"]: record.levelname for record in caplog.records})
        return 499 in found

    running.wait_until(is_logged)
    assert found[499] == "INFO"


def test_a_full_queue_refuses() -> None:
    with (
        serving(partial(engines.sibyl, max_requests=1), max_queue=1) as running,
        running.client() as client,
        ExitStack() as streams,
    ):
        places = running.server.fleet.capacity
        for _ in range(places):
            stream = streams.enter_context(client.completions.create(**ENDLESS, stream=True))
            next(iter(stream))
        streams.enter_context(client.completions.create(**ENDLESS, stream=True))
        running.wait_until(lambda: running.in_engine == (places, 1))
        with pytest.raises(RateLimitError) as full:
            client.completions.create(**SHORT)
        assert full.value.code == "queue_full"
        assert full.value.response.headers["retry-after"] == "1"
        assert httpx.get(f"{running.url}/ready").status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert numbers(running)["soothsay:num_requests_running"] == places
        assert numbers(running)["soothsay:num_requests_waiting"] == 1
        with pytest.raises(APIStatusError, match="ask for fewer"):
            client.completions.create(**{**SHORT, "n": places + 2})
        streams.close()
        running.wait_until(lambda: running.free)
        assert client.completions.create(**SHORT).choices[0].text
        assert httpx.get(f"{running.url}/ready").status_code == 200


def test_better_priorities_go_first(caplog: pytest.LogCaptureFixture) -> None:
    """Each engine has a waiting line of its own, so there is only one engine here."""
    caplog.set_level(logging.INFO, logger="soothsay.server")
    with (
        serving(partial(engines.sibyl, max_requests=1), replicas=1, min_priority=-5) as running,
        running.client() as client,
        ThreadPoolExecutor(3) as pool,
    ):

        def told() -> list[str]:
            ids = [str(vars(record).get("id")) for record in caplog.records]
            return [one for one in ids if one.startswith("of.")]

        def ask(priority: int) -> None:
            headers = {"X-Request-Id": f"of.{priority}"}
            client.completions.create(**SHORT, extra_body={"priority": priority}, extra_headers=headers)

        with client.completions.create(**ENDLESS, stream=True) as stream:
            next(iter(stream))
            asked = []
            for count, priority in enumerate((5, 0, -5), start=1):
                asked.append(pool.submit(ask, priority))
                running.wait_until(lambda count=count: running.in_engine == (1, count))  # type: ignore[misc]
        for one in asked:
            one.result()
        running.wait_until(lambda: len(told()) == 3)
    assert told() == ["of.-5", "of.0", "of.5"]


def test_deadline() -> None:
    with serving(engines.sibyl, timeout=0.1) as running, running.client() as client:
        with pytest.raises(InternalServerError) as late:
            client.completions.create(**ENDLESS)
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        with pytest.raises(APIError, match="longer than this server allows"):
            list(client.completions.create(**ENDLESS, stream=True))
        running.wait_until(lambda: running.free)


def test_the_end_does_not_wait_for_ever_and_tells_clients_so(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(engines.sibyl, drain=0) as running,
        running.client() as client,
        ThreadPoolExecutor() as threads,
        client.completions.create(**ENDLESS, stream=True) as stream,
    ):
        parts = iter(stream)
        next(parts)
        whole = threads.submit(client.completions.create, **ENDLESS)
        running.wait_until(lambda: running.server.loop.in_flight == 2)
        pid = running.server.fleet.replicas[0].pid
        running.stop()
        with pytest.raises(APIError, match="shutting down"):
            list(parts)
        with pytest.raises(InternalServerError) as ended:
            whole.result()
        assert (ended.value.status_code, ended.value.code) == (503, "shutting_down")
        running.wait_until(lambda: not lives(pid))
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_failing_step_fails_what_runs_and_not_the_server(fragile: Running, sibyl: LLM) -> None:
    meant = sibyl.generate("A man", SamplingParams(temperature=0, max_tokens=4)).text
    before = numbers(fragile)["soothsay:failed_steps_total"]
    with fragile.client() as client, ExitStack() as streams:
        first = streams.enter_context(client.completions.create(**doomed(engines.STEP), stream=True))
        waiting = streams.enter_context(client.completions.create(**SHORT, stream=True))
        with pytest.raises(APIError) as failed:
            list(first)
        assert "secret" not in str(failed.value)
        assert "".join(chunk.choices[0].text for chunk in waiting) == meant
        with pytest.raises(InternalServerError) as whole:
            client.completions.create(**doomed(engines.STEP))
        assert (whole.value.status_code, whole.value.code) == (500, "internal_error")
        assert "secret" not in whole.value.response.text
        assert client.completions.create(**SHORT).choices[0].text == meant
        assert fragile.free
        failed_steps = numbers(fragile)["soothsay:failed_steps_total"] - before
        assert failed_steps == 4, "each failed, and then failed alone"
        assert httpx.get(f"{fragile.url}/health").status_code == 200


@pytest.mark.parametrize("token", [engines.DRAFTER, engines.SCHEDULE])
def test_failures_before_and_after_a_step(fragile: Running, token: int) -> None:
    with fragile.client() as client:
        with pytest.raises(InternalServerError) as failed:
            client.completions.create(**doomed(token))
        assert failed.value.status_code == 500
        assert client.completions.create(**SHORT).choices[0].text
        assert fragile.free
    assert httpx.get(f"{fragile.url}/health").json()["engine_restarts"] == 0


def test_metrics_count_the_prompts_of_answers_that_their_clients_left(sibyl: LLM) -> None:
    """Their tokens count, so that those of their prompts must."""
    assert sibyl.tokenizer is not None
    with serving(engines.sibyl) as running:
        asked = {"prompt": "A man in a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/completions", json=asked) as reply:
            next(reply.iter_text())
        running.wait_until(lambda: running.free)
        told = numbers(running)
        assert told["soothsay:time_to_first_token_seconds_count"] == 1
        assert told["soothsay:e2e_request_latency_seconds_count"] == 0
        assert 0 < told["soothsay:generation_tokens_total"] < 1500
        size = len(sibyl.tokenizer.encode("A man in a"))
        assert told["soothsay:prompt_tokens_total"] == told["soothsay:prefix_cache_queries_total"] == size


@pytest.mark.parametrize("drafter", ["suffix + ngram", "suffix | ngram"])
def test_metrics_count_what_happened(sibyl: LLM, drafter: str) -> None:
    with serving(partial(engines.sibyl, drafter=drafter)) as running, running.client() as client:
        prompt = "one two three " * 12
        asked = {**SHORT, "prompt": prompt, "max_tokens": 20, "n": 2}
        asked["extra_body"] = {"ignore_eos": True}
        usages = [client.completions.create(**asked).usage for _ in range(2)]
        told = numbers(running)
        assert told["soothsay:num_requests_running"] == told["soothsay:num_requests_waiting"] == 0
        assert told["soothsay:kv_cache_usage_perc"] == 0
        assert told["soothsay:generation_tokens_total"] == 80
        size = len(sibyl.tokenizer.encode(prompt))
        assert told["soothsay:prompt_tokens_total"] == 4 * size
        assert told["soothsay:time_to_first_token_seconds_count"] == 4
        assert told["soothsay:e2e_request_latency_seconds_count"] == 4
        assert told['soothsay:request_success_total{finished_reason="length"}'] == 4
        cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
        assert told["soothsay:prefix_cache_hits_total"] >= cached > 0
        speculation = [usage.model_extra["speculation"] for usage in usages]
        label = f'{{drafter="{drafter}"}}'
        drafted = sum(part["drafted"] for part in speculation)
        accepted = sum(part["accepted"] for part in speculation)
        assert told[f"soothsay:spec_decode_num_draft_tokens_total{label}"] == drafted
        assert told[f"soothsay:spec_decode_num_accepted_tokens_total{label}"] == accepted
        per_position = "soothsay:spec_decode_num_accepted_tokens_per_pos_total"
        for author in ("suffix", "ngram"):
            by_author = re.compile(rf'{per_position}{{drafter="{author}",position="\d+"}}')
            counted = sum(value for name, value in told.items() if by_author.fullmatch(name))
            assert counted == sum(part["accepted_by"].get(author, 0) for part in speculation)
        counted = sum(value for name, value in told.items() if name.startswith(per_position))
        assert counted == accepted
        assert accepted > 0 or "|" in drafter  # a controller asks where the times of passes make it pay
        decisions = [value for name, value in told.items() if "controller_decisions_total" in name]
        steps = told[f"soothsay:decode_steps_total{label}"]
        most = 2 * steps if "|" in drafter else 0  # a step chooses one drafter or both
        assert min(steps, most) <= sum(decisions) <= most
        assert told['soothsay:http_requests_total{path="/v1/completions",status="200"}'] == 2


def test_metrics_have_twins_under_the_names_of_vllm(running: Running, client: OpenAI) -> None:
    for drafter in ("suffix", "suffix", "prompt-lookup", "none"):  # suffix knows the answer the second time
        body = {"ignore_eos": True, "speculation": {"drafter": drafter}}
        client.completions.create(**{**SHORT, "prompt": "one two " * 12, "max_tokens": 20}, extra_body=body)
    told = numbers(running)
    twins = {name.removeprefix("vllm:"): value for name, value in told.items() if name.startswith("vllm:")}
    assert {name.partition("{")[0].removesuffix("_total") for name in twins if "_created" in name} == set()
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count", "num_requests_running"):
        assert twins[f'{name}{{engine="0"}}'] == told[f"soothsay:{name}"]
    for name in ("drafts", "draft_tokens", "accepted_tokens"):  # one sum over all drafters
        by_drafter = [value for key, value in told.items() if f"soothsay:spec_decode_num_{name}_total" in key]
        assert len(by_drafter) >= 3
        assert twins[f'spec_decode_num_{name}_total{{engine="0"}}'] == sum(by_drafter)
    at_first = twins['spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"}']
    assert 0 < at_first <= twins['spec_decode_num_drafts_total{engine="0"}']
    model = running.server.model
    sizes = f'block_size="{model.block_size}",engine="0",num_gpu_blocks="{model.num_blocks}"'
    assert twins[f"cache_config_info{{{sizes}}}"] == 1
    assert sum(name.startswith("lora_requests_info{") for name in twins) == 1
    own = ("controller_decisions", "spec_decode_num_draft_tokens_per_pos", "http_requests", "decode_steps")
    assert not any(name.startswith(own) for name in twins)


def test_counts_of_drafts_are_told_before_the_first_draft() -> None:
    """`vllm bench serve` takes the difference of two readings; the first one must have the counters."""
    told = Metrics("m").text().decode()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="m"}} 0.0\n' in told


def test_drafts_are_counted_by_what_they_brought() -> None:
    stats = SpeculationStats()
    for drafted, depth, accepted in ((3, 3, 0), (5, 2, 2), (0, 0, 0), (4, 4, 3), (1, 1, 0)):
        stats.record(drafted, depth, ["suffix"] * accepted, accepted + 1)
    assert (stats.steps, stats.drafts) == (5, 4)
    assert stats.accepted_counts == [2, 0, 1, 1, 0]
    assert SpeculationStats().accepted_counts == [0]


def test_every_request_is_a_line_in_the_log(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str] = []

    def lines() -> list[dict[str, Any]]:  # without those of earlier tests, whose requests may end now
        told = [json.loads(JsonLines().format(record)) for record in caplog.records]
        return [line for line in told if line.get("id") in ids]

    with caplog.at_level(logging.INFO, logger="soothsay.server"):
        body = {"model": "sibyl", "prompt": "A man", "max_tokens": 3, "ignore_eos": True}
        for given, kept in (("my-id.1", True), ('"x": 1', False), ("x" * 65, False)):
            headers = {"X-Request-Id": given}
            reply = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers)
            assert (reply.headers["x-request-id"] == given) is kept
            ids.append(reply.headers["x-request-id"])
        running.wait_until(lambda: len(lines()) == 3)
    told = lines()[0]
    assert (told["event"], told["level"], told["id"]) == ("request", "info", "my-id.1")
    assert (told["method"], told["path"], told["status"]) == ("POST", "/v1/completions", 200)
    assert (told["completion_tokens"], told["drafter"]) == (3, "suffix")
    assert "A man" not in str(told)


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, Iterator[dict[str, Any]]]]:
    """Run `soothsay serve sibyl` as a process group. Yields it, its address, and its later log lines."""
    with subprocess.Popen(
        [sys.executable, "-m", "soothsay", "serve", "sibyl", "--port", "0", "--dtype", "int8", *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # other tests use the processor too
    ) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr)
            url = next(line["address"] for line in lines if line["event"] == "listening")
            yield process, url, lines
        finally:
            process.kill()


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, sibyl: LLM) -> None:
    keys = tmp_path / "keys.json"
    add = ["keys", "add", "me", "--operator", "--file", str(keys)]
    key = CliRunner().invoke(_app(), add).stdout.strip()
    meant = sibyl.generate("A man", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)).text
    with command("--api-keys", str(keys), "--served-model-name", "it") as (process, url, lines):
        engine = httpx.get(f"{url}/health", headers={"X-Api-Key": key}).json()["engine_pid"]
        with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            asked = {**ENDLESS, "model": "it", "max_tokens": 60}
            with client.completions.create(**asked, stream=True) as stream:
                parts = iter(stream)
                text = next(parts).choices[0].text
                os.killpg(process.pid, signal.SIGTERM)  # signals the engine's process too, as supervisors do
                text += "".join(chunk.choices[0].text for chunk in parts)
        assert text == meant
        assert [line["key"] for line in lines if line["event"] == "request" and "key" in line] == ["me"]
        process.wait(30)
        assert not lives(engine)
    assert process.returncode in (0, -signal.SIGTERM)


def test_a_second_signal_ends_it_at_once() -> None:
    with (
        command() as (process, url, lines),
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.completions.create(**ENDLESS, stream=True) as stream,
    ):
        parts = iter(stream)
        next(parts)
        process.send_signal(signal.SIGINT)
        assert any(line["event"] == "ending" for line in lines)
        process.send_signal(signal.SIGINT)
        with pytest.raises(APIError, match="shutting down"):
            list(parts)
        assert [line for line in lines if line["level"] == "error"] == []
        process.wait(10)


def test_the_engine_ends_with_the_server(running: Running) -> None:
    with command() as (process, url, _):
        engine = httpx.get(f"{url}/health").json()["engine_pid"]
        os.kill(engine, signal.SIGINT)
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/health").json()["engine_pid"] == engine
        assert lives(engine)
        process.kill()
        running.wait_until(lambda: not lives(engine))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smolm2"], "Did you mean smollm2? 'soothsay models' lists names that work"),
        (["sibyl", "--drafter", "no-such-drafter"], "no-such-drafter"),
    ],
)
def test_a_server_without_a_model_says_why(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(_app(), ["serve", *arguments])
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_commands_for_keys(tmp_path: Path) -> None:
    file = ["--file", str(tmp_path / "keys.json")]
    options = ["--tokens-per-minute", "1000", "--running", "3", "--priority", "-7", "--trace", "--operator"]
    added = CliRunner().invoke(_app(), ["keys", "add", "me", *options, *file])
    assert added.stdout.startswith("sk-")
    CliRunner().invoke(_app(), ["keys", "add", "you", *file])
    listed = CliRunner().invoke(_app(), ["keys", "list", *file]).stdout
    assert re.search(r"me +any +1,000 +3 +-7 +trace, operator", listed)
    assert re.search(r"you +any +any +any +0 +-", listed)
    assert CliRunner().invoke(_app(), ["keys", "add", "it", "--priority", str(2**40), *file]).exit_code == 2
    assert CliRunner().invoke(_app(), ["keys", "remove", "me", *file]).exit_code == 0
    assert CliRunner().invoke(_app(), ["keys", "remove", "me", *file]).exit_code == 2


def _app() -> Any:
    from soothsay.cli.app import app

    return app
