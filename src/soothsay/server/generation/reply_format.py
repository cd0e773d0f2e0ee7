"""What the replies of all APIs share: their format, their usage, and statistics of speculation and time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce, wraps
from typing import Any, TypeVar

from soothsay.core.answer import FinishReason, SpeculationStats, TokenLogprobs
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import AnswerProgress, Job
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import EVENTS, Framing
from soothsay.server.tools.tool_calls import ParsedPart, ToolCall, ToolCallParser
from soothsay.tokenizer import Tokenizer

T = TypeVar("T")


def _once(make: Callable[[Job], T]) -> Callable[[Job], T]:
    """Make a report once for each state of a job: hundreds of answers may ask for it at each step.

    The report must not be changed.
    """

    @wraps(make)
    def report(job: Job) -> T:
        name = make.__name__
        if name not in job.reports:
            job.reports[name] = make(job)
        made: T = job.reports[name]
        return made

    return report


@_once
def _stats(job: Job) -> SpeculationStats:
    """The statistics of all answers together."""
    return reduce(SpeculationStats.plus, (answer.stats for answer in job.answers))


def _prompts(job: Job) -> Sequence[AnswerProgress]:
    """One answer of each prompt, so that a prompt counts once."""
    return job.answers[:: job.params.n]


def reports(job: Job) -> Json:
    """What a reply tells about speculation and time, as vLLM and llama.cpp do."""
    return {"metrics": {"speculative_decoding": speculative_decoding(job)}, "timings": timings(job)}


def speculative_decoding(job: Job) -> Json:
    """Counts of draft tokens over all answers, in vLLM's form.

    Steps without draft tokens do not count. Entry j of the histogram is the number of steps that accepted j
    draft tokens. A tree counts with all its nodes, so that the rate of trees is lower than that of chains.
    There is no `num_spec_tokens`, since drafts have no fixed length.
    """
    stats = _stats(job)
    return {
        "mean_acceptance_length": 1 + stats.accepted / stats.drafts if stats.drafts else 1.0,
        "draft_acceptance_rate": stats.accepted / stats.drafted if stats.drafted else 0.0,
        "acceptance_histogram": stats.accepted_counts,
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
    }


@_once
def timings(job: Job) -> Json:
    """Counts and milliseconds of reading prompts and of answering, in llama.cpp's form.

    Prompts are read until the first token of any answer. That includes the time in the waiting line. The
    answers take from then to the last token of all.
    """
    num_cached = sum(answer.num_cached for answer in _prompts(job))
    num_read = sum(answer.num_prompt for answer in _prompts(job)) - num_cached
    first = min(answer.first_at or answer.updated_at for answer in job.answers)
    last = max(answer.updated_at for answer in job.answers)
    found: Json = {
        "cache_n": num_cached,
        **_rates("prompt", num_read, first - job.arrived_at),
        **_rates("predicted", sum(answer.num_output for answer in job.answers), last - first),
    }
    if (stats := _stats(job)).drafted:
        found |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    return found


def _rates(name: str, count: int, seconds: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


@_once
def usage(job: Job) -> Json:
    """The tokens of a job so far: of prompts and answers, drafted and accepted."""
    stats, num_prompt = _stats(job), sum(answer.num_prompt for answer in _prompts(job))
    num_output = sum(answer.num_output for answer in job.answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached for answer in _prompts(job))},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
        "speculation": {
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accepted_by": {author: sum(counts) for author, counts in stats.accepted_by.items()},
            "mean_accepted": round(stats.mean_accepted, 3),
            "lossless": job.params.rule.lossless,
        },
    }


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
    def stream(self, job: Job) -> AsyncIterator[Json]:
        """The chunks of a stream. Call this or `collect`, once. Raises `ApiError` if the job fails."""

    @abstractmethod
    async def collect(self, job: Job) -> Json | list[Json]:
        """Wait for all answers, and return the whole reply. Raises `ApiError` if the job fails."""

    def failure(self, error: ApiError) -> Json:
        """The last chunk of a stream whose job fails."""
        return error.body


class OneAnswerFormat(ReplyFormat):
    """Formats one answer that is split into text, thoughts and calls. `parser` makes what splits it.

    Attributes:
        calls: of the answer so far.
        reason: why the answer ended; None: it has not.
        stop: the stop sequence that ended it; empty: none did.
    """

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser):
        super().__init__(model, texts)
        self._parser = parser()
        self.calls: list[ToolCall] = []
        self.reason: FinishReason | None = None
        self.stop = ""

    async def parts(self, job: Job) -> AsyncIterator[tuple[ParsedPart, AnswerUpdate]]:
        """Each update, split."""
        async for update in job:
            self.reason, self.stop = update.finish_reason, update.stop
            part = self._parser.parse(update.text, final=self.reason is not None)
            self.calls += part.calls
            yield part, update


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


async def gathered(job: Job) -> list[AnswerUpdate]:
    """Each answer as one update. Waits for the end of the job."""
    answers: list[list[AnswerUpdate]] = [[] for _ in job.answers]
    async for update in job:
        answers[update.index].append(update)
    return [*map(as_one, answers)]


def as_one(updates: Sequence[AnswerUpdate]) -> AnswerUpdate:
    """All updates of an answer as one."""
    last = updates[-1]
    return replace(
        last,
        text="".join(update.text for update in updates),
        token_ids=[token for update in updates for token in update.token_ids],
        logprobs=None
        if last.logprobs is None
        else [one for update in updates for one in update.logprobs or ()],
        prompt_logprobs=updates[0].prompt_logprobs,
    )
