"""A server that speaks OpenAI's protocol as a contender of `soothsay bench spec`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from soothsay.bench.chat_client import TIMEOUT, ChatClient, TimedReply
from soothsay.bench.spec.contenders import AskedTurn, RunTimes, TurnAnswer


class Endpoint:
    """A model on a server. See `soothsay.bench.spec.contenders.Contender`.

    Tokens are counted by the server's `usage`, or else its pieces of text are counted. The server applies its
    own chat template and tokenizer, so answers are not compared with ours. Rates compare only as far as its
    tokens are like ours. The benchmark cannot control the server's prefix cache.

    Args:
        url: the server's address, up to where `/chat/completions` follows: "http://localhost:8000/v1".
        model: the server's name for the model.
        key: sent as the bearer token; empty: none.
        timeout: seconds without a byte after which a request fails.

    Raises `SoothsayError` if `url` is not an address; so does `answer` if the server cannot be reached or
    refuses a request.
    """

    def __init__(self, url: str, model: str, key: str = "", timeout: float = TIMEOUT):
        self._client = ChatClient(url, model, key, timeout)
        self.name = self._client.name

    def reset(self) -> None:
        """Do nothing: a client cannot make a server forget."""

    def answer(self, asked: Sequence[AskedTurn]) -> tuple[RunTimes, list[TurnAnswer] | None]:
        """Send all questions at once. Connections are made before the clock starts."""
        return asyncio.run(self._answer(asked)), None

    async def _answer(self, asked: Sequence[AskedTurn]) -> RunTimes:
        connected = asyncio.Barrier(len(asked))
        replies = await asyncio.gather(*(self._client.ask(_body(one), connected.wait) for one in asked))
        begin = min(reply.begin for reply in replies)
        prefilled = max(reply.pieces[0] if reply.pieces else reply.end for reply in replies)
        return RunTimes(
            answers=len(asked),
            different=None,
            tokens=sum(reply.tokens for reply in replies),
            seconds=max(reply.end for reply in replies) - begin,
            prefill=prefilled - begin,
            ahead=sum(_tokens_by(reply, prefilled) for reply in replies),
        )


def _body(asked: AskedTurn) -> dict[str, Any]:
    return {
        "messages": list(asked.messages),
        "temperature": asked.params.temperature,
        "max_tokens": asked.params.max_tokens,
        "seed": asked.params.seed,
    }


def _tokens_by(reply: TimedReply, moment: float) -> int:
    """Estimate the tokens that had come by `moment`, with equally many tokens in every piece."""
    there = sum(when <= moment for when in reply.pieces)
    return round(reply.tokens * there / len(reply.pieces)) if reply.pieces else reply.tokens
