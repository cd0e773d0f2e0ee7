"""The format of replies that have one choice for each answer, whole and in chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from itertools import chain

from soothsay import __version__
from soothsay.core.answer import StepTrace, TokenLogprobs
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import (
    ReplyFormat,
    ReplyOptions,
    TokenTexts,
    gathered,
    logprobs_of,
)
from soothsay.server.generation.reply_reports import reports, usage
from soothsay.server.http.body_types import Json


class Details:
    """Adds to replies what they have beyond OpenAI's: token ids, and log-probabilities of prompts.

    The fields are vLLM's. A chat has one prompt, so its fields are at the root of the reply. Those of
    completions are in each choice.

    Args:
        options: what the request wants.
        prompts: token ids of the prompt of each answer.
        texts: texts of tokens.
        at_root: whether there is one prompt, so that its fields are at the root of the reply.
    """

    def __init__(
        self, options: ReplyOptions, prompts: Sequence[list[int]], texts: TokenTexts, *, at_root: bool
    ):
        self._prompts, self._texts, self._at_root = prompts, texts, at_root
        self._ids, self._logprobs = options.token_ids, options.prompt_logprobs
        self._begun: set[int] = set()  # answers that have had a chunk
        self._held: defaultdict[int, list[int]] = defaultdict(list)  # by answer: ids for its next chunk

    def add(self, reply: Json, answers: Sequence[Sequence[AnswerUpdate]]) -> None:
        """Add the fields to a whole reply with these answers."""
        for choice, prompt, updates in zip(reply["choices"], self._prompts, answers, strict=True):
            root = reply if self._at_root else choice
            if self._ids:
                root["prompt_token_ids"] = prompt
                choice["token_ids"] = [token for update in updates for token in update.token_ids]
            if self._logprobs:
                scores = next((one.prompt_logprobs for one in updates if one.prompt_logprobs is not None), ())
                root["prompt_logprobs"] = chain([None], map(self._entry, scores))

    def hold(self, update: AnswerUpdate) -> None:
        """Keep the ids of an update for the next chunk of its answer. Tokens without text make no chunk."""
        if self._ids:
            self._held[update.index] += update.token_ids

    def add_to_chunk(self, chunk: Json) -> None:
        """Add the fields to a chunk of a stream. The first chunk of an answer has its prompt."""
        for choice in chunk["choices"] if self._ids else ():
            index = choice["index"]
            if index not in self._begun:
                self._begun.add(index)
                (chunk if self._at_root else choice)["prompt_token_ids"] = self._prompts[index]
            choice["token_ids"] = self._held.pop(index, [])

    def _entry(self, one: TokenLogprobs) -> Json:
        """The log-probabilities of a token of a prompt and of the likeliest ones, by token id."""
        ranks = {token: rank for rank, token in enumerate(one.top, start=1)}
        return {
            str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": self._texts(token)}
            for token, logprob in {one.token: one.logprob, **one.top}.items()
        }


class ChoiceFormat(ReplyFormat):
    """Formats replies that have one choice for each answer."""

    kind: str  # the field `object` of a whole reply
    chunk_kind: str  # the field `object` of a chunk
    prefix: str  # of the reply's id
    one_prompt: bool  # whether fields about the prompt are at the root of the reply

    def __init__(self, model: str, texts: TokenTexts):
        super().__init__(model, texts)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """The chunks of a stream. The last one has the usage, if that is wanted, and the reports."""
        details = self._details(job, options)

        def chunk(choice: Json) -> Json:
            so_far = usage(job) if options.usage_always else None
            made = self.chunk([choice], so_far, with_usage=options.usage)
            details.add_to_chunk(made)
            return made

        for choice in self.opening(job.size):
            yield chunk(choice)
        num_open = job.size
        async for update in job:
            details.hold(update)
            num_open -= update.finish_reason is not None
            choices = self.update(update)
            for place, choice in enumerate(choices, start=1):
                is_last = num_open == 0 and place == len(choices) and not options.usage
                yield {**chunk(choice), **(reports(job) if is_last else {})}
        if options.usage:
            yield {**self.chunk([], usage(job), with_usage=True), **reports(job)}

    async def collect(self, job: Job, options: ReplyOptions) -> Json:
        """Wait for all answers, and return the reply with the `n` best to each prompt."""
        updates = await gathered(job)
        chosen = _best(updates, job.params.n, options.n)
        choices = [
            self.choice(index, job.answers[number].seed, updates[number])
            for index, number in enumerate(chosen)
        ]
        if not options.logprobs:
            choices = [{**choice, "logprobs": None} for choice in choices]  # they were for choosing the best
        made = {**self._frame(self.kind, choices), "usage": usage(job), **reports(job)}
        self._details(job, options).add(made, [updates[number] for number in chosen])
        return made

    def _details(self, job: Job, options: ReplyOptions) -> Details:
        prompts = [prompt for prompt in job.prompts for _ in range(options.n)]
        return Details(options, prompts, self.texts, at_root=self.one_prompt)

    @abstractmethod
    def opening(self, count: int) -> list[Json]:
        """Choices of the chunks at the start of a stream with `count` answers."""

    @abstractmethod
    def update(self, update: AnswerUpdate) -> list[Json]:
        """Choices of the chunks for one update of an answer."""

    @abstractmethod
    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The choice for a whole answer, from all of its updates."""

    def chunk(self, choices: Sequence[Json], usage: Json | None, *, with_usage: bool) -> Json:
        """One chunk of a stream."""
        chunk = self._frame(self.chunk_kind, choices)
        return {**chunk, "usage": usage} if with_usage else chunk

    def _traced(self, part: Json, traces: Sequence[StepTrace]) -> Json:
        """Add the traces of steps to a choice of a chunk, if there are any."""
        if not traces:
            return part
        return {**part, "speculation": {"steps": [self._step(trace) for trace in traces]}}

    def _step(self, trace: StepTrace) -> Json:
        return {
            "tokens": [self.texts(token) for token in trace.tokens],
            "parents": trace.parents,
            "drafters": trace.authors,
            "accepted": trace.path,
            "bonus": self.texts(trace.bonus),
        }

    def _frame(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"soothsay-{__version__}",
            "choices": list(choices),
        }


def _best(answers: Sequence[Sequence[AnswerUpdate]], num_answers: int, n: int) -> list[int]:
    """The numbers of the `n` answers to each prompt with the largest mean log-probability, best first.

    Args:
        answers: the updates of all answers, `num_answers` to each prompt. With log-probabilities, if `n` is
            smaller.
        num_answers: at least `n`.
        n: how many to choose. If that is all of them, they keep their order.
    """
    if n == num_answers:
        return [*range(len(answers))]

    def score(number: int) -> float:
        found = [one.logprob for one in logprobs_of(answers[number]) or ()]
        found += [one.end_logprobs.logprob for one in answers[number] if one.end_logprobs is not None]
        return sum(found) / len(found) if found else float("-inf")

    groups = (range(first, first + num_answers) for first in range(0, len(answers), num_answers))
    return [number for group in groups for number in sorted(group, key=score, reverse=True)[:n]]
