"""What replies report about a request: its usage, and the statistics of other servers' formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import zip_longest
from typing import TypeVar

from soothsay.core.answer import SpeculationStats
from soothsay.server.fleet.jobs import AnswerProgress, Job
from soothsay.server.http.body_types import Json

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
    """The statistics of all answers together. Those by drafter are totals: lists of one number."""
    stats = [answer.stats for answer in job.answers]
    counts = ("steps", "emitted", "first", "drafted", "accepted")
    total = SpeculationStats(*(sum(getattr(one, name) for one in stats) for name in counts))
    total.drafted_at = [*map(sum, zip_longest(*(one.drafted_at for one in stats), fillvalue=0))]
    total.accepted_at = [*map(sum, zip_longest(*(one.accepted_at for one in stats), fillvalue=0))]
    for one in stats:
        for author, numbers in one.accepted_by.items():
            total.accepted_by[author] = [sum(total.accepted_by.get(author, ()), sum(numbers))]
    return total


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
