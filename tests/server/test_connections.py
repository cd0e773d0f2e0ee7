"""Connections: what makes requests ambiguous, how many there are, and how long they may wait for clients."""

from __future__ import annotations

import json
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import httpx
import pytest
from serving import Running, command, serving

from soothsay.server.http import json_streams as events
from soothsay.server.http.connections import RESERVED, Connections
from soothsay.server.server_config import ServerConfig

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BODY: dict[str, Any] = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 4}
SLOW: dict[str, Any] = {**BODY, "prompt": [engines.SLOW, 17], "max_tokens": 2000, "ignore_eos": True}


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)


def request(**changes: Any) -> bytes:
    body = json.dumps({**BODY, **changes}).encode()
    return POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def all_of(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    told = b""
    try:
        while part := connection.recv(65536):
            told += part
    except ConnectionResetError:
        pass
    return told


def status(connection: socket.socket) -> int:
    """Read one whole response."""
    with HTTPResponse(connection) as response:
        response.begin()
        response.read()
        return response.status


CHUNKED = b"Transfer-Encoding: chunked\r\n"
VALID = json.dumps(BODY).encode()
SMUGGLED = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n" + SMUGGLED,
        POST + CHUNKED + b"Content-Length: 5\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 5, 6\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: +5\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: 5 5\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length : 5\r\n\r\n" + SMUGGLED,
        POST + b"Content-Length: " + b"9" * 99 + b"\r\n\r\n",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED,
        POST + CHUNKED + CHUNKED + b"\r\n" + SMUGGLED,
        POST + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n%x\r\n%s\r\n" % (len(VALID), VALID) + SMUGGLED,
        POST + CHUNKED + b"\r\n-1\r\n{}\r\n" + SMUGGLED,
        POST + CHUNKED + b"\r\n0x2\r\n{}\r\n" + SMUGGLED,
        POST + CHUNKED + b"\r\n2 2\r\n{}\r\n" + SMUGGLED,
        POST + CHUNKED + b"\r\n" + b"f" * 30 + b"\r\n{}\r\n" + SMUGGLED,
        POST + CHUNKED + b"\r\n2\r\n{}XX" + SMUGGLED,
        b" folded: x\r\n".join([b"GET / HTTP/1.1\r\n", b"Host: x\r\n\r\n"]),
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA\x00: y\r\n\r\n",
        b"GET /he\xffalth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000,
    ],
    ids=range(25),
)
def test_ambiguous_requests_end_the_connection(running: Running, sent: bytes) -> None:
    with connected(running.url) as connection:
        connection.sendall(sent)
        told = all_of(connection)
    assert told.startswith(b"HTTP/1.1 400"), told
    assert told.count(b"HTTP/1.1") == 1  # what follows is not taken for a request
    assert running.free


def test_one_request_after_another_is_served(running: Running) -> None:
    body = json.dumps(BODY).encode()
    chunks = POST + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with connected(running.url) as connection:
        for sent in (HEALTH, request(), chunks, HEALTH):
            connection.sendall(sent)
            assert status(connection) == 200


@pytest.fixture(scope="module")
def fragile() -> Iterator[Running]:
    with serving(partial(engines.fragile, max_requests=4)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["whole", "slow"])
def test_a_client_that_only_stops_sending_gets_its_answer(fragile: Running, stream: bool, path: str) -> None:
    changes = {"prompt": [engines.SLOW, 17], "max_tokens": 5} if path == "slow" else {}
    with connected(fragile.url) as connection:
        connection.sendall(request(stream=stream, **changes))
        connection.shutdown(socket.SHUT_WR)
        told = all_of(connection)
    final = re.sub(rb"(HTTP/1\.1 100 Continue\r\n\r\n)+", b"", told)
    assert final.startswith(b"HTTP/1.1 200"), told
    assert (b"[DONE]" if stream else b'"finish_reason":"length"') in final
    if path == "slow" and not stream:  # half a second without a word
        assert final != told
    fragile.wait_until(lambda: fragile.free)


def test_a_client_that_stops_sending_within_a_stream_gets_all_of_it(fragile: Running) -> None:
    with connected(fragile.url) as connection:
        connection.sendall(request(stream=True, prompt=[engines.SLOW, 17], max_tokens=5))
        told = connection.recv(65536)
        while b"data: " not in told:
            told += connection.recv(65536)
        assert b"[DONE]" not in told
        connection.shutdown(socket.SHUT_WR)
        told += all_of(connection)
    assert b"[DONE]" in told
    fragile.wait_until(lambda: fragile.free)


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "prompt"), ("/v1/responses", "input"), ("/api/generate", "prompt")],
)
def test_a_stream_without_news_shows_that_it_is_there(
    fragile: Running, path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SILENCE", 0.05)
    body = {"model": "sibyl", field: "A man", "stream": True}
    places = fragile.server.fleet.capacity
    with ExitStack() as stack:
        for _ in range(places):
            stack.enter_context(connected(fragile.url)).sendall(request(**SLOW))
        fragile.wait_until(lambda: fragile.in_engine == (places, 0))
        sent = json.dumps(body).encode()
        with connected(fragile.url) as connection:
            connection.sendall(POST.replace(b"/v1/completions", path.encode()))
            connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent))
            told = connection.recv(65536)
            while told.count(b":\n\n") + told.count(b"\r\n \r\n") < 3:
                told += connection.recv(65536)
            assert fragile.in_engine == (places, 1)
        # the writes show that the client is gone
        fragile.wait_until(lambda: fragile.in_engine == (places, 0))
    fragile.wait_until(lambda: fragile.free)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_is_gone_frees_its_place(fragile: Running, stream: bool, reset: bool) -> None:
    with connected(fragile.url) as connection:
        connection.sendall(request(**{**SLOW, "stream": stream}))
        fragile.wait_until(lambda: fragile.in_engine == (1, 0))
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fragile.wait_until(lambda: fragile.free, 10)  # the answer would take minutes


def test_a_client_that_stops_sending_and_leaves_later_frees_its_place(fragile: Running) -> None:
    with connected(fragile.url) as connection:
        connection.sendall(request(**SLOW))
        connection.shutdown(socket.SHUT_WR)
        fragile.wait_until(lambda: fragile.in_engine == (1, 0))
        time.sleep(0.3)
        assert fragile.in_engine == (1, 0)
    fragile.wait_until(lambda: fragile.free, 10)


def test_a_client_that_leaves_within_its_body_is_no_error(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="soothsay.server")
    with connected(running.url) as connection:
        connection.sendall(request()[:-5])
    running.wait_until(lambda: bool(caplog.records))
    assert [(vars(record)["status"], record.levelname) for record in caplog.records] == [(499, "INFO")]


def test_a_body_must_come_in_time_as_a_whole() -> None:
    with serving(engines.sibyl, client_timeout=0.4, min_body_rate=1 << 20) as running:
        with connected(running.url) as connection:
            connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")
            connection.settimeout(0.1)
            told = b""
            for _ in range(100):  # each part comes in time, and all would take ten seconds
                try:
                    connection.sendall(b" ")
                    told = connection.recv(4096)
                    break
                except TimeoutError:
                    continue
        assert told.startswith(b"HTTP/1.1 408"), told
        with connected(running.url) as connection:  # a second for each MiB
            sent = json.dumps({**BODY, "prompt": "x"}).encode() + b" " * (2 << 20)
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(sent) + sent[: 1 << 20])
            time.sleep(0.3)
            connection.sendall(sent[1 << 20 : -1])
            time.sleep(0.3)
            connection.sendall(sent[-1:])
            assert status(connection) == 200


def test_idle_connections_make_room_the_oldest_first() -> None:
    with serving(engines.sibyl, max_connections=5) as running, ExitStack() as stack:
        idle = [stack.enter_context(connected(running.url)) for _ in range(2)]
        active = stack.enter_context(connected(running.url))
        for connection in [*idle, active]:
            connection.sendall(HEALTH)
            assert status(connection) == 200
        answers = [httpx.get(f"{running.url}/health").status_code for _ in range(20)]
        assert answers == [200] * 20
        late = [stack.enter_context(connected(running.url)) for _ in range(3)]
        for connection in late:
            connection.sendall(HEALTH)
            assert status(connection) == 200
        assert all_of(idle[0]) == b""  # closed
        active.sendall(HEALTH)
        assert status(active) == 200


def test_new_connections_are_refused_if_all_others_are_served(fragile: Running) -> None:
    with serving(engines.fragile, max_connections=2) as running, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(running.url)).sendall(request(**SLOW))
        running.wait_until(lambda: running.in_engine == (2, 0))
        with connected(running.url) as connection:
            told = all_of(connection)
        assert told.startswith(b"HTTP/1.1 503")
        head, _, body = told.partition(b"\r\n\r\n")
        assert b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert running.in_engine == (2, 0)
        stack.close()
        running.wait_until(lambda: running.free)
        assert httpx.get(f"{running.url}/health").status_code == 200


def test_an_address_has_a_limit_of_connections() -> None:
    with serving(engines.sibyl, max_connections_per_address=2) as running, ExitStack() as stack:
        first, second = (stack.enter_context(connected(running.url)) for _ in range(2))
        for connection in (first, second):
            connection.sendall(HEALTH)
            assert status(connection) == 200
        with connected(running.url) as third:
            assert all_of(third).startswith(b"HTTP/1.1 503")
        first.close()

        def served() -> bool:
            with connected(running.url) as again:
                again.sendall(HEALTH)
                return status(again) == 200

        running.wait_until(served)


class Client:
    """A connection of which only the time and the end matter."""

    def __init__(self) -> None:
        self.address, self.now, self.is_open = "192.0.2.1", 0.0, True
        self.loop = SimpleNamespace(time=lambda: self.now)

    def abort(self) -> None:
        self.is_open = False


def test_a_client_that_waits_keeps_its_place_and_leaves_nothing() -> None:
    connections: Any = Connections(ServerConfig("x", max_unread=10))
    slow, other = Client(), Client()
    for client in (slow, other):
        connections.add(client)
    for now in (5.0, 5.5):
        slow.now = other.now = now
        connections.mark(slow, waiting=True)  # again: it has waited since the begin
    connections.mark(other, waiting=False)
    connections.mark(other, waiting=True)
    with connections.sending(slow, 6), connections.sending(other, 6):
        assert (slow.is_open, other.is_open) == (False, True)
    connections.remove(other)
    connections.remove(slow)
    held = connections._open, connections._waiting, connections._unread
    assert not any(held)


def test_a_reply_that_was_sent_counts_no_more() -> None:
    connections: Any = Connections(ServerConfig("x", max_unread=10))
    served, other = Client(), Client()
    for client in (served, other):
        connections.add(client)
    with connections.sending(served, 8):
        pass
    served.now = other.now = 5.0
    with connections.sending(other, 8):
        assert served.is_open


def test_the_limit_of_files_limits_connections(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/dev/fd").iterdir()))
    assert Connections(ServerConfig("x", max_connections=10)).limit == 10
    assert not caplog.records
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + RESERVED + 20, hard))
        assert 10 <= Connections(ServerConfig("x")).limit <= 20
        assert "limited by the number of files" in caplog.text
        for room in (10, 0):  # with 0, no file is left to list the open ones with
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
            assert Connections(ServerConfig("x")).limit == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_files_do_not_lock_honest_clients_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with command(log, "--drafter", "none", files=100) as url, ExitStack() as stack:
        for count in range(200):
            idle = stack.enter_context(connected(url))
            if count % 3 == 0:
                idle.sendall(POST + b"Content-Length: 100\r\n\r\n")  # begins a body and never ends it
            if count % 20 == 0:
                assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        for _ in range(5):
            reply = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
            assert reply.status_code == 200, reply.text
    told = log.read_text()
    assert "Traceback" not in told
    assert "out of system resource" not in told
    assert all(json.loads(line)["level"] != "error" for line in told.splitlines())
