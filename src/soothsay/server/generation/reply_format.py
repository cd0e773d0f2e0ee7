"""What the formats of replies of all APIs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from soothsay.core.answer import FinishReason, TokenLogprobs
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.request_bodies import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.body_types import Json
from soothsay.server.http.json_streams import EVENTS, Framing
from soothsay.server.tools.tool_calls import ParsedPart, ToolCallParser
from soothsay.tokenizer import Tokenizer

MakeParser = Callable[[], ToolCallParser]
"""Makes the parser of tool calls for one answer."""


class TokenTexts:
    """The texts of single tokens, with the space that a token may begin with. Caches them."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text of a token. A part of a character becomes U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:
            # decoders drop the space of the first token, so decode the token after itself
            first = self._tokenizer.decode([token], skip_special=False)
            both = self._tokenizer.decode([token, token], skip_special=False)
            self._texts[token] = both[len(first) :]
        return self._texts[token]


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What a chat or a completion asks of its reply, besides the answers. The body itself is not kept."""

    stream: bool = False
    n: int = 1  # answers to each prompt in the reply
    usage: bool = False  # whether the last chunk of a stream has the usage
    usage_always: bool = False  # whether every chunk has the usage so far
    logprobs: bool = True  # whether the reply has the log-probabilities that the answers have
    prompt_logprobs: bool = False
    token_ids: bool = False

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest) -> Self:
        """The options of a body."""
        stream = body.stream_options or StreamOptions()
        return cls(
            stream=bool(body.stream),
            n=body.n or 1,
            usage=bool(stream.include_usage),
            usage_always=bool(stream.include_usage and stream.continuous_usage_stats),
            logprobs=body.num_logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
        )


class ReplyFormat(ABC):
    """Formats the answers to one HTTP request as JSON, whole or in chunks of a stream.

    Args:
        model: the model's name in the reply.
        texts: texts of tokens, for log-probabilities and traces.
    """

    framing: Framing = EVENTS
    """How the chunks of a stream are written."""

    def __init__(self, model: str, texts: TokenTexts):
        self.model, self.texts = model, texts

    @abstractmethod
    def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """The chunks of a stream. Call this or `collect`, once.

        Args:
            job: the answers. This iterates over it.
            options: what the request wants besides the answers.

        Raises `ApiError` if the job fails.
        """

    @abstractmethod
    async def collect(self, job: Job, options: ReplyOptions) -> Json | list[Json]:
        """Wait for all answers, and return the whole reply. Raises `ApiError` if the job fails."""

    def failure(self, error: ApiError) -> Json:
        """The last chunk of a stream whose job fails."""
        return error.body


class OneAnswerFormat(ReplyFormat):
    """Formats one answer that is split into text, thoughts and calls. `parser` makes what splits it."""

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser):
        super().__init__(model, texts)
        self._parser = parser()
        self.reason: FinishReason | None = None  # why the answer ended

    async def parts(self, job: Job) -> AsyncIterator[tuple[ParsedPart, AnswerUpdate]]:
        """Each update, split."""
        async for update in job:
            self.reason = update.finish_reason
            yield self._parser.parse(update.text, final=self.reason is not None), update


def list_logprobs(
    texts: TokenTexts, logprobs: Iterable[TokenLogprobs], *, no_bytes: Any = None, with_ids: bool = False
) -> Iterator[Json]:
    """The log-probabilities of tokens, as chats list them.

    Args:
        texts: of tokens.
        logprobs: of the tokens.
        no_bytes: what a part of a character has as `bytes`.
        with_ids: whether the ids of tokens are listed too.
    """

    def entry(token: int, logprob: float) -> Json:
        text = texts(token)
        spelling = no_bytes if "\ufffd" in text else list(text.encode())
        made = {"token": text, "logprob": logprob, "bytes": spelling}
        return {"id": token, **made} if with_ids else made

    for one in logprobs:
        yield {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top.items()]}


async def gathered(job: Job) -> list[list[AnswerUpdate]]:
    """All updates of each answer. Waits for the end of the job."""
    answers: list[list[AnswerUpdate]] = [[] for _ in job.answers]
    async for update in job:
        answers[update.index].append(update)
    return answers


def text_of(updates: Sequence[AnswerUpdate]) -> str:
    """The text of all updates."""
    return "".join(update.text for update in updates)


def logprobs_of(updates: Sequence[AnswerUpdate]) -> list[TokenLogprobs] | None:
    """The log-probabilities of all updates; None: not requested."""
    parts = [update.logprobs for update in updates if update.logprobs is not None]
    return [one for part in parts for one in part] if parts else None
