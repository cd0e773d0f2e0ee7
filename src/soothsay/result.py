"""What `LLM` returns: answers, whole or piece by piece."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self
from weakref import finalize

from soothsay.core.answer import FinishReason, Piece, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.core.request import Request
from soothsay.engine.engine import Engine
from soothsay.errors import RequestError, StepError, reason_of


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer.

    Attributes:
        text: the answer. Stop strings, and special tokens by default, are left out.
        token_ids: the answer's tokens, an end token included.
        finish_reason: why it ended, such as "stop", "length" or "error".
        stats: counts of steps, draft tokens and accepted tokens.
        seed: with the same prompt and parameters, this seed gives the same tokens again.
        logprobs: one entry for each token; None if the parameters did not request them.
        prompt_logprobs: one entry for each token of the prompt from the second on, since nothing comes before
            the first; None if the parameters did not request them.
        error: why the request could not be served; None if it was.

    Example:
        >>> [choice] = llm.generate("Once upon a time", SamplingParams(max_tokens=5)).choices
        >>> again = llm.generate("Once upon a time", SamplingParams(max_tokens=5, seed=choice.seed))
        >>> again.token_ids == choice.token_ids
        True
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: SpeculationStats
    seed: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    traces: list[StepTrace] | None = field(default=None, repr=False)
    """Each step's draft tree and what was accepted of it; None if the call did not have `traced=True`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What `LLM.generate` and `LLM.chat` return: the answers to one prompt.

    `choices` has `SamplingParams.n` of them. The properties are those of the first choice.

    Example:
        >>> result = llm.generate("Once upon a time", SamplingParams(max_tokens=5, n=2))
        >>> len(result.choices), result.text == result.choices[0].text
        (2, True)
    """

    prompt_token_ids: list[int]
    choices: list[Choice]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first choice's tokens, an end token included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first choice's log-probabilities; None if the parameters did not request them."""
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt's tokens; None if the parameters did not request them."""
        return self.choices[0].prompt_logprobs

    @property
    def stats(self) -> SpeculationStats:
        """Counts of draft tokens and steps of the first choice."""
        return self.choices[0].stats

    @property
    def traces(self) -> list[StepTrace] | None:
        """Each step of the first choice; None if the call did not have `traced=True`."""
        return self.choices[0].traces

    @property
    def error(self) -> str | None:
        """Why the request could not be served; None if it was."""
        return self.choices[0].error


class Stream:
    """An answer that arrives piece by piece. Iterate with `for` or `async for`; `result` is the whole answer.

    Waiting for a piece runs steps of the engine, which advance all its requests. A stream that nobody reads
    advances only while other streams are read. `cancel` frees its memory at once. A stream that is dropped,
    as a loop with `break` does, is cancelled before the engine's next step.

    If the engine fails at the request, iterating raises `StepError` after the pieces that there are. Other
    requests go on.

    Example:
        >>> stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=5))
        >>> [piece.token for piece in stream]
        [17, 266, 5524, 17, 266]
        >>> stream.result.text
        '-reaction-re'
    """

    def __init__(self, engine: Engine, request: Request):
        self._engine = engine
        self._request = request
        self._logprobs: list[TokenLogprobs] = []
        finalize(self, engine.abandon, request).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        if (piece := self._next()) is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        await asyncio.to_thread(self._engine.advance, self._request)
        if (piece := self._next()) is None:  # not in the thread, where it would be lost if this is cancelled
            raise StopAsyncIteration
        return piece

    def cancel(self) -> None:
        """End the answer with its current text. Pieces that are already computed still arrive."""
        self._engine.cancel(self._request)

    @property
    def choice(self) -> Choice:
        """The whole answer. Waits for its end. Raises `StepError` if the engine fails at the request."""
        for _ in self:
            pass
        return self._choice(None)

    @property
    def outcome(self) -> Choice:
        """As `choice`, but an answer that fails is returned, with its text so far and the `error`."""
        try:
            return self.choice
        except StepError as error:
            return self._choice(str(error))

    @property
    def result(self) -> Result:
        """The whole answer with its prompt. Waits for its end. Raises what `choice` raises."""
        choice = self.choice
        return Result(self._request.tokens[: self._request.num_prompt].tolist(), [choice])

    def _choice(self, error: str | None) -> Choice:
        request = self._request
        if request.finish_reason is None:
            raise RuntimeError("the stream has ended without its request")
        return Choice(
            text=request.answer.text,
            token_ids=request.tokens[request.num_prompt :].tolist(),
            finish_reason=request.finish_reason,
            stats=request.stats,
            seed=request.seed,
            logprobs=self._logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=None if request.params.prompt_logprobs is None else [*request.prompt_logprobs],
            error=error,
            traces=None if request.traces is None else [*request.traces],
        )

    def _next(self) -> Piece | None:
        """The next piece; None at the end. Raises `StepError`."""
        self._engine.advance(self._request)
        if self._request.pieces:
            piece = self._request.pieces.popleft()
            if piece.logprobs is not None:
                self._logprobs.append(piece.logprobs)
            return piece
        failure = self._request.failure
        if failure is not None:
            raise StepError(f"the engine failed at this request: {reason_of(failure)}") from failure
        return None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A prompt whose requests are in the engine."""

    ids: list[int]
    streams: list[Stream]

    def result(self, *, failing: bool) -> Result:
        """Wait for the answers. Raises `StepError` if one fails, and `failing` is set."""
        return Result(self.ids, [stream.choice if failing else stream.outcome for stream in self.streams])

    def cancel(self) -> None:
        """End the requests. Pieces that are already computed still arrive."""
        for stream in self.streams:
            stream.cancel()


def refusal(error: RequestError) -> Result:
    """What stands in a list of answers for a prompt that cannot be served."""
    return Result([], [Choice("", [], FinishReason.ERROR, SpeculationStats(), 0, error=str(error))])
