"""A server that speaks OpenAI's protocol answers the same questions in streams, timed here."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from soothsay.bench.spec.contenders import Answer, Asked, Run
from soothsay.errors import SoothsayError

TIMEOUT = 600.0
"""Seconds of silence after which a server is given up."""

REFUSED = (400, 422)
"""What servers answer that do not know an option."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """One streamed answer; times of `time.perf_counter`, of the pieces of text as they came."""

    end: float
    pieces: list[float]
    counted: int | None  # tokens, as the server counts them

    @property
    def tokens(self) -> int:
        return len(self.pieces) if self.counted is None else self.counted

    @property
    def first(self) -> float:
        return self.pieces[0] if self.pieces else self.end

    def tokens_by(self, moment: float) -> int:
        """Tokens that had come; if a piece has several, all are taken to have as many."""
        there = sum(when <= moment for when in self.pieces)
        return round(self.tokens * there / len(self.pieces)) if self.pieces else self.tokens


class Endpoint:
    """A model on a server. See `soothsay.bench.spec.contenders.Contender`.

    Tokens are those of the server's `usage`, or else its pieces of text are counted. It lays conversations
    out by itself and may have another tokenizer, so answers are not compared with ours, and rates only as far
    as its tokens are like ours. Whether it caches prefixes is its own affair.

    Args:
        url: up to where `/chat/completions` follows, such as "http://localhost:8000/v1".
        model: as the server calls it.
        key: sent as the bearer's token; empty: none.
        timeout: in seconds.

    Raises `SoothsayError` if `url` is none; `answer` does if the server cannot be reached or refuses.
    """

    def __init__(self, url: str, model: str, key: str = "", timeout: float = TIMEOUT):
        self._url, self._timeout = urlsplit(url), timeout
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise SoothsayError(f"{url!r} is no address of a server, such as http://localhost:8000/v1")
        self.name = f"{model} at {self._url.netloc.rpartition('@')[2]}"
        self._model = model
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._asks_usage = True

    def reset(self) -> None:
        """Nothing can be done about what a server remembers."""

    def answer(self, asked: Sequence[Asked]) -> tuple[Run, list[Answer] | None]:
        """All at once, each over a connection of its own, which is there before the clock starts."""
        ready = threading.Barrier(len(asked) + 1)
        with ThreadPoolExecutor(len(asked)) as pool:
            waiting = [pool.submit(self._stream, one, ready) for one in asked]
            with suppress(threading.BrokenBarrierError):  # someone has no connection, and says so
                ready.wait(self._timeout)
            begin = time.perf_counter()
            streams = [future.result() for future in waiting]
        prefilled = max(stream.first for stream in streams)
        run = Run(
            answers=len(asked),
            different=None,
            tokens=sum(stream.tokens for stream in streams),
            seconds=max(stream.end for stream in streams) - begin,
            prefill=prefilled - begin,
            ahead=sum(stream.tokens_by(prefilled) for stream in streams),
        )
        return run, None

    def _stream(self, asked: Asked, ready: threading.Barrier) -> _Timed:
        try:
            connection = self._connect()
        except OSError as error:
            ready.abort()
            raise SoothsayError(f"{self._url.geturl()} cannot be reached ({error})") from None
        try:
            ready.wait(self._timeout)
            response = self._post(connection, asked)
            if response.status in REFUSED and self._asks_usage:
                response.read()
                self._asks_usage = False
                response = self._post(connection, asked)
            if response.status != 200:
                said = response.read(500).decode(errors="replace")
                raise SoothsayError(f"{self.name} answered {response.status} {response.reason}: {said}")
            return _read(response, self.name)
        except threading.BrokenBarrierError:
            raise SoothsayError(f"{self._url.geturl()} cannot be reached by all requests at once") from None
        except (OSError, HTTPException, ValueError) as error:
            raise SoothsayError(f"{self.name} broke off ({error!r})") from None
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout)
        connection.connect()
        return connection

    def _post(self, connection: HTTPConnection, asked: Asked) -> HTTPResponse:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(asked.messages),
            "temperature": asked.params.temperature,
            "max_tokens": asked.params.max_tokens,
            "seed": asked.params.seed,
            "stream": True,
        }
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        path = f"{self._url.path.rstrip('/')}/chat/completions"
        connection.request("POST", path, json.dumps(body), self._headers)
        return connection.getresponse()


def _read(response: HTTPResponse, name: str) -> _Timed:
    pieces: list[float] = []
    counted = None
    for event in _events(response):
        if "error" in event:
            raise SoothsayError(f"{name} broke off: {event['error']}")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content"):
                pieces.append(time.perf_counter())
        if usage := event.get("usage"):
            counted = int(usage["completion_tokens"])
    return _Timed(time.perf_counter(), pieces, counted)


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of server-sent events, up to `[DONE]`."""
    for line in response:
        field, _, value = line.partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            return
        yield json.loads(value)
