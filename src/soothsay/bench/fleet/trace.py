"""The requests to a simulated fleet: a recorded trace, or made-up conversations."""

from __future__ import annotations

import hashlib
import json
import math
import random
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from soothsay.core.arrays import IntArray
from soothsay.errors import RequestError

MAX_TOKENS = 1 << 20
"""Limit of the tokens of one request."""

MAX_REQUESTS = 1 << 20
"""Limit of requests in a trace."""

MAX_LINE = 1 << 20
"""Limit of characters in a line of a trace."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. Pieces with the same name begin with the same tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    It is sent at `arrival`, but not before the session's previous answer has ended and `pause` has passed.
    """

    session: str
    arrival: float  # seconds since the begin
    prompt: tuple[Piece, ...]
    answer: Piece
    pause: float = 0.0  # seconds

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.tokens for piece in self.prompt)


def token_ids(pieces: Sequence[Piece]) -> IntArray:
    """Made-up token ids of a text."""
    return np.concatenate([_ids(piece.name, piece.tokens) for piece in pieces])


@lru_cache(maxsize=1 << 14)
def _ids(name: str, count: int) -> IntArray:
    seed = int.from_bytes(
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )
    return np.random.default_rng(seed).integers(1 << 31, size=count, dtype=np.int64)


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace: JSON lines with `session`, `arrival`, `prompt`, `answer` and, optionally, `pause`.

    `prompt` is a list of pieces `[name, tokens]`, and `answer` is one piece. A later prompt has the piece of
    an earlier answer under the same name.

    Raises `RequestError` if the file cannot be read, or for the first line of another form.
    """
    requests: list[TracedRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), 1):
                if len(line) > MAX_LINE:
                    raise RequestError(f"{path}, line {number} has more than {MAX_LINE:,} characters")
                if len(requests) == MAX_REQUESTS:
                    raise RequestError(f"{path} has more than {MAX_REQUESTS:,} requests")
                if line.strip():
                    requests.append(_parsed(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from None
    if not requests:
        raise RequestError(f"{path} has no requests")
    return requests


def _parsed(line: str, place: str) -> TracedRequest:
    try:
        entry = json.loads(line)
        request = TracedRequest(
            session=str(entry["session"]),
            arrival=_seconds(entry["arrival"]),
            prompt=tuple(map(_piece, entry["prompt"])),
            answer=_piece(entry["answer"]),
            pause=_seconds(entry.get("pause", 0)),
        )
        if not request.prompt or request.num_prompt + request.answer.tokens > MAX_TOKENS:
            raise ValueError(f"a request has 1 to {MAX_TOKENS:,} tokens")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RequestError(
            f"{place}: {error!r}. A request is "
            '{"session": "a", "arrival": 0.5, "prompt": [["system", 500], ["q1", 30]], "answer": ["a1", 64]}'
        ) from None
    return request


def _seconds(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{reprlib.repr(value)} is not a number of seconds")
    return float(value)


def _piece(value: Any) -> Piece:
    name, tokens = value
    if not isinstance(name, str) or not isinstance(tokens, int) or not 0 < tokens <= MAX_TOKENS:
        raise ValueError(f"{reprlib.repr(value)} is not a name and a number of tokens from 1 on")
    return Piece(name, tokens)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Sessions of several turns. Each turn's prompt is the whole conversation so far.

    Sessions begin at times of a Poisson process. Lengths of questions and answers and the pauses between
    turns follow exponential distributions with these means, cut to whole tokens from 1 on.
    """

    sessions: int = 50
    turns: int = 8
    rate: float = math.inf  # sessions that begin in a second, on average; infinite: all at once
    system: int = 500  # tokens of a system prompt
    systems: int = 1  # different system prompts; a session has one of them
    question: float = 30.0  # tokens
    answer: float = 32.0  # tokens
    pause: float = 0.0  # seconds from an answer's end to the next question
    fixed: bool = False  # all lengths and pauses are their means
    seed: int = 0

    def __iter__(self) -> Iterator[TracedRequest]:
        rng = random.Random(self.seed)

        def drawn(mean: float) -> float:
            return mean if self.fixed or not mean else rng.expovariate(1 / mean)

        arrival = 0.0
        for number in range(self.sessions):
            session = f"{self.seed}-{number}"
            said = [Piece(f"system {rng.randrange(self.systems)}", self.system)] if self.system else []
            for turn in range(self.turns):
                said.append(Piece(f"question {session}-{turn}", max(round(drawn(self.question)), 1)))
                answer = Piece(f"answer {session}-{turn}", max(round(drawn(self.answer)), 1))
                pause = drawn(self.pause) if turn else 0.0
                yield TracedRequest(session, arrival, tuple(said), answer, pause)
                said.append(answer)
            arrival += 0.0 if math.isinf(self.rate) else rng.expovariate(self.rate)

    def times(self, factor: int) -> Conversations:
        """The same load for `factor` times as many engines."""
        return replace(self, sessions=self.sessions * factor, rate=self.rate * factor)
