"""Another server as a contender: a small one that speaks the protocol, and what can go wrong with it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import virtual
from typer.testing import CliRunner

from soothsay import SamplingParams
from soothsay.bench.spec.contenders import AskedTurn, Endpoint
from soothsay.bench.spec.spec_results import SpecResults
from soothsay.cli.app import app
from soothsay.errors import SoothsayError

ASKED = AskedTurn(
    ({"role": "user", "content": "Hello, wörld!"},),
    [1],
    SamplingParams(temperature=0.5, max_tokens=7, seed=3),
)
FIRST, BETWEEN = 0.06, 0.02
"""Seconds to the first piece and from one to the next."""


class Server(ThreadingHTTPServer):
    """Answers with `pieces` of text, and what else `reply` wants."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.pieces = ["", "Hel", "lo", " there", "!"]  # the first says who speaks, as OpenAI's does
        self.usage: int | None = None
        self.refuses_usage = False
        self.status = 200
        self.last = "data: [DONE]\n\n"

    def handle_error(self, *_: object) -> None:
        """Clients leave when another of theirs has failed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, body, dict(self.headers)))
        if server.status != 200 or (server.refuses_usage and "stream_options" in body):
            said = b'{"error": "unknown field stream_options"}'
            self.send_response(server.status if server.status != 200 else 422)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk(": a comment\n\n")
        for number, piece in enumerate(server.pieces):
            time.sleep((0, FIRST)[number] if number < 2 else BETWEEN)
            delta = {"role": "assistant", "content": piece}
            self.chunk(f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n")
        if server.usage is not None and "stream_options" in body:
            usage = {"completion_tokens": server.usage, "prompt_tokens": 4}
            self.chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        self.chunk(server.last)
        self.chunk("")

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_is_timed_and_its_pieces_are_counted(server: Server) -> None:
    endpoint = Endpoint(f"{server.url}/", "model-1", key="secret")
    assert endpoint.name == f"model-1 at 127.0.0.1:{server.server_port}"
    run, answers = endpoint.answer([ASKED])
    assert answers is None
    assert (run.answers, run.different, run.tokens, run.ahead) == (1, None, 4, 1)
    assert run.prefill >= FIRST
    assert run.seconds - run.prefill >= 3 * BETWEEN
    (path, body, headers), *more = server.requests
    assert not more
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "model-1",
        "messages": [{"role": "user", "content": "Hello, wörld!"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert headers["Authorization"] == "Bearer secret"
    Endpoint(server.url, "m").answer([ASKED])
    assert "Authorization" not in server.requests[-1][2]


def test_the_servers_own_count_goes_first(server: Server) -> None:
    server.usage = 12
    run, _ = Endpoint(server.url, "m").answer([ASKED])
    assert (run.tokens, run.ahead) == (12, 3)  # of four pieces, one was there


def test_a_server_that_does_not_count_is_asked_without(server: Server) -> None:
    server.refuses_usage, server.usage = True, 12
    endpoint = Endpoint(server.url, "m")
    assert [endpoint.answer([ASKED])[0].tokens for _ in range(2)] == [4, 4]
    assert ["stream_options" in body for _, body, _ in server.requests] == [True, False, False]


@pytest.mark.parametrize("serial", [False, True], ids=["together", "one by one"])
def test_a_batch_is_asked_at_once(serial: bool) -> None:
    """In virtual time. A batch takes as long as one answer, if the server answers all of them together."""
    fake = virtual.Fake(serial=serial)
    with virtual.next_run(fake):
        run, _ = Endpoint(fake.url, "m").answer([ASKED] * 3)
    assert (fake.most, set(fake.arrivals)) == (3, {0.0})
    assert (run.answers, run.tokens) == (3, 12)
    one = virtual.FIRST + 3 * virtual.BETWEEN
    before = 2 * one if serial else 0.0  # the last answer begins
    assert run.prefill == before + virtual.FIRST
    assert run.seconds == before + one
    assert run.ahead == (9 if serial else 3)


def test_no_text_is_no_error(server: Server) -> None:
    server.pieces = [""]
    run, _ = Endpoint(server.url, "m").answer([ASKED])
    assert (run.tokens, run.ahead, run.prefill) == (0, 0, run.seconds)


def fail_with_status(server: Server) -> None:
    server.status = 401


def fail_in_the_stream(server: Server) -> None:
    server.last = 'data: {"error": {"message": "out of memory"}}\n\n'


def fail_with_nonsense(server: Server) -> None:
    server.last = "data: {nonsense\n\n"


@pytest.mark.parametrize(
    ("fail", "what"),
    [
        (fail_with_status, "answered 401 Unauthorized: .*stream_options"),
        (fail_in_the_stream, "broke off: .*out of memory"),
        (fail_with_nonsense, "broke off"),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_what_goes_wrong_is_named(
    server: Server, fail: Callable[[Server], None], what: str, count: int
) -> None:
    fail(server)
    with pytest.raises(SoothsayError, match=f"m at 127.0.0.1.* {what}"):
        Endpoint(server.url, "m").answer([ASKED] * count)


@pytest.mark.parametrize("count", [1, 3])
def test_a_server_that_is_not_there(server: Server, count: int) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(SoothsayError, match="cannot be reached"):
        Endpoint(url, "m", timeout=5).answer([ASKED] * count)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", ""])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(SoothsayError, match="is not the address of a server"):
        Endpoint(url, "m")


def test_the_command_asks_it_beside_the_drafters(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "sesame")
    questions, out = tmp_path / "q.jsonl", tmp_path / "r.jsonl"
    questions.write_text('{"category": "writing", "turns": ["Hello!", "Why?"]}\n')
    options = [f"--endpoint={server.url}", "--endpoint-model=m", "--api-key-env=KEY_OF_MINE", f"--json={out}"]
    base = ["bench", "spec", "sibyl", "--dtype=float32", f"--spec-bench={questions}", "-n4"]
    result = CliRunner().invoke(app, [*base, *options], env={"COLUMNS": "120"})
    assert (result.exit_code, result.exception) == (0, None)
    assert f"m at 127.0.0.1:{server.server_port}" in result.output
    assert "sesame" not in out.read_text()
    plain, other = SpecResults.read(out).rows()
    assert (other.overall.answers, other.overall.different) == (2, None)
    assert other.overall.speedup == pytest.approx(other.overall.rate / plain.overall.rate)
    _, first, second = server.requests  # after the warm-up
    assert [len(body["messages"]) for _, body, _ in (first, second)] == [1, 3]
    assert second[1]["messages"][1]["role"] == "assistant"
    assert second[1]["messages"][1]["content"]  # what plain decoding has said here
    assert {headers["Authorization"] for *_, headers in server.requests} == {"Bearer sesame"}
