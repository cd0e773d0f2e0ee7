"""What replies report about a request: its usage, and the statistics of other servers' formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import zip_longest

from soothsay.server.fleet.jobs import Job
from soothsay.server.http.body_types import Json


def _once(make: Callable[[Job], Json]) -> Callable[[Job], Json]:
    """Make a report once for each state of a job: hundreds of answers may ask for it at each step.

    The report must not be changed.
    """

    @wraps(make)
    def report(job: Job) -> Json:
        name = make.__name__
        if name not in job.reports:
            job.reports[name] = make(job)
        return job.reports[name]

    return report


def reports(job: Job) -> Json:
    """What a reply tells about speculation and time, as vLLM and llama.cpp do."""
    return {"metrics": {"speculative_decoding": speculative_decoding(job)}, "timings": timings(job)}


def speculative_decoding(job: Job) -> Json:
    """Counts of draft tokens over all answers, in vLLM's form.

    Steps without draft tokens do not count. Entry j of the histogram is the number of steps that accepted j
    draft tokens. A tree counts with all its nodes, so that the rate of trees is lower than that of chains.
    There is no `num_spec_tokens`, since drafts have no fixed length.
    """
    stats = [answer.stats for answer in job.answers]
    steps, accepted = sum(one.drafts for one in stats), sum(one.accepted for one in stats)
    drafted = sum(one.drafted for one in stats)
    counts = zip_longest(*(one.accepted_counts for one in stats), fillvalue=0)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [sum(of_all) for of_all in counts],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


@_once
def timings(job: Job) -> Json:
    """Counts and milliseconds of reading prompts and of answering, in llama.cpp's form.

    Prompts are read until the first token of any answer. That includes the time in the waiting line. The
    answers take from then to the last token of all.
    """
    answers = job.answers
    prompts = answers[:: job.params.n]  # one answer of each prompt, so that a prompt counts once
    num_cached = sum(answer.num_cached for answer in prompts)
    num_read = sum(answer.num_prompt for answer in prompts) - num_cached
    first = min(answer.first_at or answer.updated_at for answer in answers)
    last = max(answer.updated_at for answer in answers)
    drafted = sum(answer.stats.drafted for answer in answers)
    found: Json = {
        "cache_n": num_cached,
        **_rates("prompt", num_read, first - job.arrived_at),
        **_rates("predicted", sum(answer.num_output for answer in answers), last - first),
    }
    if drafted:
        found |= {"draft_n": drafted, "draft_n_accepted": sum(answer.stats.accepted for answer in answers)}
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
    answers = job.answers
    stats = [answer.stats for answer in answers]
    steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    first = answers[:: job.params.n]  # one answer of each prompt, so that a prompt counts once
    num_prompt = sum(answer.num_prompt for answer in first)
    num_cached = sum(answer.num_cached for answer in first)
    num_output = sum(answer.num_output for answer in answers)
    accepted_by: Counter[str] = Counter()
    for one in stats:
        accepted_by.update({author: sum(counts) for author, counts in one.accepted_by.items()})
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "drafted": drafted,
            "accepted": accepted,
            "accepted_by": dict(accepted_by),
            "mean_accepted": round(emitted / steps, 3) if steps else 0.0,
            "lossless": job.params.rule.lossless,
        },
    }
