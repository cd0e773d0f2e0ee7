"""Makes tables of results, and notes for their readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from soothsay.bench.result_table import ResultTable
from soothsay.bench.serve.serve_results import (
    MEASURES,
    PERCENTILES,
    LoadResults,
    LoadRow,
    Slo,
    Trial,
    median_of,
)

LATE = 0.01
"""Delay in seconds above which a note says that the benchmark sent requests late."""

BUSY = 0.5
"""Share of one core above which a note says that the benchmark itself was busy."""


def tables(results: LoadResults, slo: Slo) -> list[ResultTable]:
    """Return tables of throughput, of latencies in milliseconds, and of what else the servers report."""
    return [_throughput(results, slo), _latency(results), _steps(results)]


Cell = Callable[[LoadRow, LoadRow], str]
"""Writes a cell about a row, beside the first target's row under the same load."""

_request_rate, _token_rate = attrgetter("request_rate"), attrgetter("token_rate")


def _table(results: LoadResults, title: str, columns: Mapping[str, Cell]) -> ResultTable:
    """A table with a row for each load and target."""
    rows = [
        [load, row.target, *(cell(row, own[0]) for cell in columns.values())]
        for load, own in results.by_load()
        for row in own
    ]
    return ResultTable(["load", "target", *columns], rows, 2, title)


def _throughput(results: LoadResults, slo: Slo) -> ResultTable:
    columns: dict[str, Cell] = {
        "answered": lambda row, first: f"{len(row.answered)}/{len(row.samples)}",
        "req/s": lambda row, first: f"{row.median(_request_rate):.2f}",
        "tokens/s": lambda row, first: f"{row.median(_token_rate):.1f}",
    }
    if len(results.journal.conditions["targets"]) > 1:
        columns["ratio"] = lambda row, first: _times(row, first, _token_rate)
    if slo:
        columns["goodput"] = lambda row, first: f"{row.median(lambda trial: trial.goodput(slo)):.2f}"
    return _table(results, "throughput", columns)


def _latency(results: LoadResults) -> ResultTable:
    several = len(results.journal.conditions["targets"]) > 1
    rows = []
    for load, own in results.by_load():
        for measure in MEASURES:
            for row in own:
                values = [_ms(value) for value in row.percentiles(measure)] or [""] * len(PERCENTILES)
                ratio = [_times(row, own[0], median_of(measure))] if several else []
                rows.append([load, measure.name, row.target, *values, *ratio])
    headings = [f"p{percentile}" for percentile in PERCENTILES] + (["ratio"] if several else [])
    return ResultTable(["load", "", "target", *headings], rows, 3, "latency, ms")


def _steps(results: LoadResults) -> ResultTable:
    def tokens_a_chunk(row: LoadRow, first: LoadRow) -> str:
        return f"{row.tokens_a_chunk:.2f}" if all(sample.counted for sample in row.answered) else ""

    columns: dict[str, Cell] = {
        "in flight": lambda row, first: f"{row.mean_in_flight:.1f}",
        "tokens/chunk": tokens_a_chunk,
        "tokens/step": lambda row, first: "" if row.accepted is None else f"{row.accepted:.2f}",
        "prompts cached": lambda row, first: "" if row.cached is None else f"{row.cached:.0%}",
    }
    return _table(results, "means, as far as the servers report them", columns)


def _times(row: LoadRow, first: LoadRow, rate: Callable[[Trial], float]) -> str:
    """Format the ratio to the first row, such as "2.10x"; empty for the first row and where there is none."""
    ratio = None if row is first else row.ratio(first, rate)
    return "" if ratio is None else f"{ratio:.2f}x"


def _ms(seconds: float) -> str:
    """Format a time in milliseconds with its significant digits."""
    return f"{1e3 * seconds:.0f}" if seconds >= 1 else f"{1e3 * seconds:.1f}"


def notes(results: LoadResults, slo: Slo) -> list[str]:
    """Return what a reader of the tables must know."""
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


def _of(results: LoadResults, target: str) -> Iterator[str]:
    """Yield notes about one target."""
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
    """Describe limits, such as "TTFT of at most 500 ms"."""
    pairs = (("TTFT", slo.first), ("ITL by token", slo.per_token), ("E2E", slo.end))
    return ", ".join(f"{name} of at most {1e3 * limit:g} ms" for name, limit in pairs if limit is not None)
