"""The server under what happens to servers: clients that go, too many of them, failures, the end."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, InternalServerError, OpenAI, RateLimitError
from serving import Running, serving
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams
from soothsay.server.run import JsonLines

ENDLESS: dict[str, Any] = {
    "model": "sibyl",
    "prompt": "A man",
    "temperature": 0,
    "max_tokens": 2000,
    "extra_body": {"ignore_eos": True},
}
SHORT: dict[str, Any] = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 4}


def numbers(running: Running) -> dict[str, float]:
    """The metrics, by name and labels but the model's."""
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = re.compile(r'\{model_name="sibyl"\}|model_name="sibyl",|,model_name="sibyl"')
    return {model.sub("", name): float(value) for name, value in pairs}


def test_a_stream_that_is_left_frees_its_blocks(running: Running, client: OpenAI) -> None:
    with client.completions.create(**ENDLESS, stream=True) as stream:
        next(iter(stream))
        assert not running.free
    running.wait_until(lambda: running.free)
    running.wait_until(lambda: running.server.loop.in_flight == 0)


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
        running.wait_until(lambda: len(running.llm.engine.scheduler.running) == 3)
    running.wait_until(lambda: running.free)
    running.wait_until(lambda: running.server.loop.in_flight == 0)
    running.wait_until(lambda: bool(caplog.records))
    assert [(vars(record)["status"], record.levelname) for record in caplog.records] == [(499, "INFO")]


def test_a_full_queue_refuses(fresh_llm: Callable[..., LLM]) -> None:
    with (
        serving(fresh_llm(max_requests=1), max_queue=1) as running,
        running.client() as client,
        ExitStack() as streams,
    ):
        first = streams.enter_context(client.completions.create(**ENDLESS, stream=True))
        next(iter(first))
        streams.enter_context(client.completions.create(**ENDLESS, stream=True))
        with pytest.raises(RateLimitError) as full:
            client.completions.create(**SHORT)
        assert full.value.code == "queue_full"
        assert full.value.response.headers["retry-after"] == "1"
        assert httpx.get(f"{running.url}/ready").status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert numbers(running)["soothsay:num_requests_running"] == 1
        assert numbers(running)["soothsay:num_requests_waiting"] == 1
        with pytest.raises(APIStatusError, match="ask for fewer"):
            client.completions.create(**{**SHORT, "n": 3})
        streams.close()
        running.wait_until(lambda: running.server.loop.in_flight == 0)
        assert client.completions.create(**SHORT).choices[0].text
        assert httpx.get(f"{running.url}/ready").status_code == 200


def test_deadline(fresh_llm: Callable[..., LLM]) -> None:
    with serving(fresh_llm(), timeout=0.1) as running, running.client() as client:
        with pytest.raises(InternalServerError) as late:
            client.completions.create(**ENDLESS)
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        with pytest.raises(APIError, match="longer than this server allows"):
            list(client.completions.create(**ENDLESS, stream=True))
        running.wait_until(lambda: running.free)


def test_the_end_waits_for_answers(fresh_llm: Callable[..., LLM], sibyl: LLM) -> None:
    meant = sibyl.generate("A man", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)).text
    with serving(fresh_llm()) as running, running.client() as client:
        asked = {**ENDLESS, "max_tokens": 60}
        with client.completions.create(**asked, stream=True) as stream:
            parts = iter(stream)
            text = next(parts).choices[0].text
            running.stop()
            text += "".join(chunk.choices[0].text for chunk in parts)
        assert text == meant
        running.wait_until(lambda: not running.server.loop.alive)


def test_the_end_does_not_wait_for_ever(fresh_llm: Callable[..., LLM]) -> None:
    with (
        serving(fresh_llm(), drain=0) as running,
        running.client() as client,
        client.completions.create(**ENDLESS, stream=True) as stream,
    ):
        next(iter(stream))
        running.stop()
        running.wait_until(lambda: not running.server.loop.alive)


def failing(running: Running, error: BaseException, times: int) -> None:
    """Let the engine's next steps raise in their middle, when blocks are taken and shared."""
    engine = running.llm.engine
    forward = engine._forward
    left = iter([error] * times)

    def fail(*args: Any) -> Any:
        if (problem := next(left, None)) is not None:
            raise problem
        return forward(*args)

    engine._forward = fail  # type: ignore[method-assign]


def test_a_failing_step_fails_what_runs_and_not_the_server(
    fresh_llm: Callable[..., LLM], sibyl: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    meant = sibyl.generate("A man", SamplingParams(temperature=0, max_tokens=4)).text
    with serving(fresh_llm(max_requests=1)) as running, running.client() as client, ExitStack() as streams:
        first = streams.enter_context(client.completions.create(**ENDLESS, stream=True))
        next(iter(first))
        waiting = streams.enter_context(client.completions.create(**SHORT, stream=True))
        failing(running, ValueError("/secret/path"), 1)
        with pytest.raises(APIError) as failed:
            list(first)
        assert "secret" not in str(failed.value)
        assert "".join(chunk.choices[0].text for chunk in waiting) == meant
        assert running.free
        failing(running, ValueError("/secret/path"), 1)
        with pytest.raises(InternalServerError) as whole:
            client.completions.create(**SHORT)
        assert (whole.value.status_code, whole.value.code) == (500, "internal_error")
        assert "secret" not in whole.value.response.text
        assert client.completions.create(**SHORT).choices[0].text == meant
        assert running.free
        assert numbers(running)["soothsay:failed_steps_total"] == 2
        assert httpx.get(f"{running.url}/health").status_code == 200
    assert any("secret" in str(record.exc_info) for record in caplog.records if record.exc_info)


def test_a_drafter_that_fails_everywhere(fresh_llm: Callable[..., LLM]) -> None:
    with serving(fresh_llm()) as running, running.client() as client:

        def fail(*_: object) -> Any:
            raise RuntimeError("broken")

        asked = {**SHORT, "extra_body": {"speculation": {"drafter": "ngram"}}}
        client.completions.create(**asked)
        drafter = running.server.drafters._built["ngram"]
        drafter.propose = drafter.release = fail  # type: ignore[method-assign]
        with pytest.raises(InternalServerError):
            client.completions.create(**asked)
        assert client.completions.create(**SHORT).choices[0].text
        assert running.free


def test_a_failure_before_anything_runs_ends(
    fresh_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(fresh_llm()) as running, running.client() as client:

        def fail() -> Any:
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(running.llm.engine.scheduler, "next", fail)
            with pytest.raises(InternalServerError):
                client.completions.create(**SHORT)
        assert client.completions.create(**SHORT).choices[0].text
        assert running.free


def test_a_dead_engine_is_restarted_once(fresh_llm: Callable[..., LLM]) -> None:
    with serving(fresh_llm()) as running, running.client() as client:
        failing(running, SystemExit(3), 1)
        with pytest.raises(InternalServerError):
            client.completions.create(**SHORT)
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok", "engine_restarts": 1}
        assert client.completions.create(**SHORT).choices[0].text
        assert running.free
        failing(running, SystemExit(3), 1)
        with pytest.raises(APIError):
            list(client.completions.create(**ENDLESS, stream=True))
        running.wait_until(lambda: not running.server.loop.alive)
        health = httpx.get(f"{running.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "engine stopped")
        assert httpx.get(f"{running.url}/ready").status_code == 503
        with pytest.raises(InternalServerError) as stopped:
            client.completions.create(**SHORT)
        assert (stopped.value.status_code, stopped.value.code) == (503, "engine_stopped")


def test_metrics_count_what_happened(fresh_llm: Callable[..., LLM], sibyl: LLM) -> None:
    with serving(fresh_llm()) as running, running.client() as client:
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
        label = '{drafter="suffix"}'
        drafted = sum(part["drafted"] for part in speculation)
        accepted = sum(part["accepted"] for part in speculation)
        assert told[f"soothsay:spec_decode_num_draft_tokens_total{label}"] == drafted
        assert told[f"soothsay:spec_decode_num_accepted_tokens_total{label}"] == accepted
        per_position = "soothsay:spec_decode_num_accepted_tokens_per_pos_total"
        assert sum(value for name, value in told.items() if name.startswith(per_position)) == accepted
        assert told['soothsay:http_requests_total{path="/v1/completions",status="200"}'] == 2


def test_every_request_is_a_line_in_the_log(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="soothsay.server"):
        body = {"model": "sibyl", "prompt": "A man", "max_tokens": 3, "ignore_eos": True}
        for given, kept in (("my-id.1", True), ('"x": 1', False), ("x" * 65, False)):
            headers = {"X-Request-Id": given}
            reply = httpx.post(f"{running.url}/v1/completions", json=body, headers=headers)
            assert (reply.headers["x-request-id"] == given) is kept
        running.wait_until(lambda: len(caplog.records) == 3)
    told = json.loads(JsonLines().format(caplog.records[0]))
    assert (told["event"], told["level"], told["id"]) == ("request", "info", "my-id.1")
    assert (told["method"], told["path"], told["status"]) == ("POST", "/v1/completions", 200)
    assert (told["completion_tokens"], told["drafter"]) == (3, "suffix")
    assert "A man" not in str(told)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path, sibyl: LLM) -> None:
    command = "from soothsay.cli import main; main()"
    keys = tmp_path / "keys.json"
    key = CliRunner().invoke(_app(), ["keys", "add", "me", "--file", str(keys)]).stdout.strip()
    options = ["--port", "0", "--dtype", "float32", "--api-keys", str(keys), "--served-model-name", "it"]
    meant = sibyl.generate("A man", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)).text
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", "sibyl", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = (json.loads(line) for line in process.stderr)
        found = next(m[0] for line in lines if (m := re.search(r"http://\S+", line["event"])))
        with OpenAI(base_url=f"{found}/v1", api_key=key, max_retries=0) as client:
            asked = {**ENDLESS, "model": "it", "max_tokens": 40}
            with client.completions.create(**asked, stream=True) as stream:
                parts = iter(stream)
                text = next(parts).choices[0].text
                process.send_signal(signal.SIGTERM)
                text += "".join(chunk.choices[0].text for chunk in parts)
        assert text == meant
        assert [line["key"] for line in lines if line["event"] == "request"] == ["me"]
        process.wait(30)
    assert process.returncode in (0, -signal.SIGTERM)


def test_commands_for_keys(tmp_path: Path) -> None:
    file = ["--file", str(tmp_path / "keys.json")]
    added = CliRunner().invoke(_app(), ["keys", "add", "me", "--tokens-per-minute", "1000", *file])
    assert added.stdout.startswith("sk-")
    listed = CliRunner().invoke(_app(), ["keys", "list", *file]).stdout
    assert re.search(r"me +no limit +1,000", listed)
    assert CliRunner().invoke(_app(), ["keys", "remove", "me", *file]).exit_code == 0
    assert CliRunner().invoke(_app(), ["keys", "remove", "me", *file]).exit_code == 2


def _app() -> Any:
    from soothsay.cli import app

    return app
