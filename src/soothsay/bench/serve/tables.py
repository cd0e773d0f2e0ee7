"""Tables of results, and what a reader of them has to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from soothsay.bench.serve.results import MEASURES, PERCENTILES, Results, Row, Slo, Trial, median_of

LATE = 0.01
"""Seconds from which it has to be said that the benchmark sent requests too late."""

BUSY = 0.5
"""A share of one core from which it has to be said that the benchmark itself was busy."""


@dataclass(frozen=True, slots=True)
class Table:
    """Headings, and the cells of each row; the first `names` columns say what it is about."""

    title: str
    names: int
    headings: list[str]
    rows: list[list[str]]


def tables(results: Results, slo: Slo) -> list[Table]:
    """Throughput, latencies in milliseconds, and what else the servers tell."""
    return [_throughput(results, slo), _latency(results), _steps(results)]


def _throughput(results: Results, slo: Slo) -> Table:
    several = len(results.journal.conditions["targets"]) > 1
    rows = [
        [
            load,
            row.target,
            f"{len(row.answered)}/{len(row.samples)}",
            f"{row.median(_request_rate):.2f}",
            f"{row.median(_token_rate):.1f}",
            *([_times(row, own[0], _token_rate)] if several else []),
            *([f"{row.median(lambda trial: trial.goodput(slo)):.2f}"] if slo else []),
        ]
        for load, own in results.by_load()
        for row in own
    ]
    headings = ["load", "target", "answered", "req/s", "tokens/s"]
    headings += [*(["ratio"] if several else []), *(["goodput"] if slo else [])]
    return Table("throughput", 2, headings, rows)


def _latency(results: Results) -> Table:
    several = len(results.journal.conditions["targets"]) > 1
    rows = []
    for load, own in results.by_load():
        for measure in MEASURES:
            for row in own:
                values = [_ms(value) for value in row.percentiles(measure)] or [""] * len(PERCENTILES)
                ratio = [_times(row, own[0], median_of(measure))] if several else []
                rows.append([load, measure.name, row.target, *values, *ratio])
    headings = [f"p{percentile}" for percentile in PERCENTILES] + (["ratio"] if several else [])
    return Table("latency, ms", 3, ["load", "", "target", *headings], rows)


def _steps(results: Results) -> Table:
    rows = [
        [
            load,
            row.target,
            f"{row.mean_in_flight:.1f}",
            f"{row.tokens_a_chunk:.2f}" if all(sample.counted for sample in row.answered) else "",
            "" if row.accepted is None else f"{row.accepted:.2f}",
            "" if row.cached is None else f"{row.cached:.0%}",
        ]
        for load, own in results.by_load()
        for row in own
    ]
    headings = ["load", "target", "in flight", "tokens/chunk", "tokens/step", "prompts cached"]
    return Table("means, as far as the servers tell", 2, headings, rows)


def _request_rate(trial: Trial) -> float:
    return trial.request_rate


def _token_rate(trial: Trial) -> float:
    return trial.token_rate


def _times(row: Row, first: Row, rate: Callable[[Trial], float]) -> str:
    """One over the other, such as "2.10x"; empty for the first itself, and where there is none."""
    ratio = None if row is first else row.ratio(first, rate)
    return "" if ratio is None else f"{ratio:.2f}x"


def _ms(seconds: float) -> str:
    """In milliseconds, with what digits mean something."""
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.1f}"


def notes(results: Results, slo: Slo) -> list[str]:
    """What was not as one might think."""
    found = [
        f"{name}: {said}" for name in results.journal.conditions["targets"] for said in _of(results, name)
    ]
    trials, conversations = results.trials, results.journal.conditions["conversations"]
    asked = max((trial.begin + trial.begun for trial in trials), default=0)
    if asked > conversations:
        found.append(
            f"There are {conversations} conversations for {asked}: some were asked again, and may have been "
            "found in a prefix cache."
        )
    urls = results.journal.conditions["urls"]
    if len({*urls}) < len(urls):
        found.append("Targets share a server: what one has asked, the next finds in its prefix cache.")
    late = max((sample.late for trial in trials for sample in trial.samples), default=0.0)
    if late > LATE:
        found.append(f"The benchmark sent requests up to {1e3 * late:.0f} ms too late.")
    shares = [trial.cpu / trial.seconds for trial in trials if trial.seconds]
    if shares and max(shares) > BUSY:
        found.append(f"The benchmark itself took up to {max(shares):.0%} of a core.")
    if not all(trial.whole for trial in trials):
        found.append("A trial was interrupted; it is among the figures, as far as it went.")
    if slo:
        found.append(f"Goodput counts answers with {_promised(slo)}.")
    return found


def _of(results: Results, target: str) -> Iterator[str]:
    """What has to be said of one target."""
    trials = [trial for trial in results.trials if trial.target == target]
    answered = [sample for trial in trials for sample in trial.answered]
    failed = [sample for trial in trials for sample in trial.samples if sample.error]
    for kind, count in Counter(sample.error for sample in failed).most_common():
        message = next(sample.message for sample in failed if sample.error == kind)
        yield f"{count} requests failed ({kind}), such as: {message}"
    if answered and not all(sample.counted for sample in answered):
        yield "does not count its tokens, so its chunks are counted."
    if any("ignore_eos" in trial.refused for trial in trials):
        yield "refuses ignore_eos, so answers may end early."
    most = results.journal.conditions["max_tokens"]
    short = sum(sample.finish_reason != "length" and sample.tokens < most for sample in answered)
    if short and "ignore_eos" in str(results.journal.conditions["bodies"]):
        yield f"{short} of {len(answered)} answers ended before their {most} tokens, in spite of ignore_eos."


def _promised(slo: Slo) -> str:
    """Such as "TTFT of at most 500 ms"."""
    pairs = (("TTFT", slo.first), ("ITL by token", slo.per_token), ("E2E", slo.end))
    return ", ".join(f"{name} of at most {1e3 * limit:g} ms" for name, limit in pairs if limit is not None)
