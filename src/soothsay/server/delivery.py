"""Waits for the answers of a job, and delivers them whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from soothsay.server.details import Details
from soothsay.server.jobs import Job
from soothsay.server.messages import AnswerUpdate
from soothsay.server.protocol import ChatRequest, CompletionRequest
from soothsay.server.replies import ReplyFormat, logprobs_of, usage
from soothsay.server.reports import reports

Json = dict[str, Any]


async def chunks(
    job: Job, body: ChatRequest | CompletionRequest, reply: ReplyFormat, details: Details
) -> AsyncIterator[Json]:
    """The chunks of a stream. The last one has the usage, if that is wanted, and the reports."""

    def chunk(choice: Json) -> Json:
        so_far = usage(job) if body.wants_usage_always else None
        made = reply.chunk([choice], so_far, with_usage=body.wants_usage)
        details.add_to_chunk(made)
        return made

    for choice in reply.opening(job.size):
        yield chunk(choice)
    num_open = job.size
    async for update in job:
        details.hold(update)
        num_open -= update.finish_reason is not None
        choices = reply.update(update)
        for place, choice in enumerate(choices, start=1):
            is_last = num_open == 0 and place == len(choices) and not body.wants_usage
            yield {**chunk(choice), **(reports(job) if is_last else {})}
    if body.wants_usage:
        yield {**reply.chunk([], usage(job), with_usage=True), **reports(job)}


async def whole(
    job: Job, body: ChatRequest | CompletionRequest, reply: ReplyFormat, details: Details
) -> Json:
    """Wait for all answers, and format the `n` best to each prompt."""
    updates: list[list[AnswerUpdate]] = [[] for _ in job.answers]
    async for update in job:
        updates[update.index].append(update)
    chosen = _best(updates, job.params.n, body.n or 1)
    choices = [
        reply.choice(index, job.answers[number].seed, updates[number]) for index, number in enumerate(chosen)
    ]
    if isinstance(body, CompletionRequest) and body.logprobs is None:
        choices = [{**choice, "logprobs": None} for choice in choices]  # they were for choosing the best
    made = {**reply.whole(choices, usage(job)), **reports(job)}
    details.add(made, [updates[number] for number in chosen])
    return made


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
