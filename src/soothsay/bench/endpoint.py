"""A server that speaks OpenAI's protocol answers the same questions in streams, timed here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from soothsay.bench.client import TIMEOUT, Client, Reply
from soothsay.bench.spec.contenders import Answer, Asked, Run


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
        self._client = Client(url, model, key, timeout)
        self.name = self._client.name

    def reset(self) -> None:
        """Nothing can be done about what a server remembers."""

    def answer(self, asked: Sequence[Asked]) -> tuple[Run, list[Answer] | None]:
        """All at once, each over a connection of its own, which is there before the clock starts."""
        return asyncio.run(self._answer(asked)), None

    async def _answer(self, asked: Sequence[Asked]) -> Run:
        with ExitStack() as stack:
            connections = []
            for _ in asked:
                connections.append(await self._client.connect())
                stack.callback(connections[-1].close)
            begin = asyncio.get_running_loop().time()
            replies = await asyncio.gather(
                *(
                    self._client.ask(_body(one), connection)
                    for one, connection in zip(asked, connections, strict=True)
                )
            )
        prefilled = max(reply.pieces[0] if reply.pieces else reply.end for reply in replies)
        return Run(
            answers=len(asked),
            different=None,
            tokens=sum(reply.tokens for reply in replies),
            seconds=max(reply.end for reply in replies) - begin,
            prefill=prefilled - begin,
            ahead=sum(_tokens_by(reply, prefilled) for reply in replies),
        )


def _body(asked: Asked) -> dict[str, Any]:
    return {
        "messages": list(asked.messages),
        "temperature": asked.params.temperature,
        "max_tokens": asked.params.max_tokens,
        "seed": asked.params.seed,
    }


def _tokens_by(reply: Reply, moment: float) -> int:
    """Tokens that had come; if a piece has several, all are taken to have as many."""
    there = sum(when <= moment for when in reply.pieces)
    return round(reply.tokens * there / len(reply.pieces)) if reply.pieces else reply.tokens
