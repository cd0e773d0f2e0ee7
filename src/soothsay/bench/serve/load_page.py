"""The results of `soothsay bench serve` as tables, notes, one figure, and an HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from soothsay.bench.html_pages import drawn, html_page
from soothsay.bench.serve.serve_results import (
    MEASURES,
    PERCENTILES,
    LoadResults,
    LoadRow,
    Measure,
    Slo,
    Trial,
    median_of,
)
from soothsay.bench.tables import ResultTable
from soothsay.plotting import new_figure, tidy

LATE = 0.01
"""Delay in seconds above which a note says that the benchmark sent requests late."""

BUSY = 0.5
"""Share of one core above which a note says that the benchmark itself was busy."""


Cell = Callable[[LoadRow, LoadRow], str]
"""Writes a cell about a row, beside the first target's row under the same load."""


def _table(results: LoadResults, title: str, columns: Mapping[str, Cell]) -> ResultTable:
    """A table with a row for each load and target."""
    rows = [
        [load, row.target, *(cell(row, own[0]) for cell in columns.values())]
        for load, own in results.by_load()
        for row in own
    ]
    return ResultTable(["load", "target", *columns], rows, 2, title)


def tables(results: LoadResults, slo: Slo) -> list[ResultTable]:
    """Return tables of throughput, of latencies in milliseconds, and of what else the servers report."""
    several = len(results.conditions["targets"]) > 1
    rates: dict[str, Cell] = {
        "answered": lambda row, _: f"{len(row.answered)}/{len(row.samples)}",
        "req/s": lambda row, _: f"{row.median(lambda trial: trial.request_rate):.2f}",
        "tokens/s": lambda row, _: f"{row.median(lambda trial: trial.token_rate):.1f}",
    }
    if several:
        rates["ratio"] = lambda row, first: _times(row, first, lambda trial: trial.token_rate)
    if slo:
        rates["goodput"] = lambda row, _: f"{row.median(lambda trial: trial.goodput(slo)):.2f}"
    means: dict[str, Cell] = {
        "in flight": lambda row, _: f"{row.mean_in_flight:.1f}",
        "tokens/chunk": lambda r, _: f"{r.tokens_a_chunk:.2f}" if all(s.counted for s in r.answered) else "",
        "tokens/step": lambda row, _: "" if row.accepted is None else f"{row.accepted:.2f}",
        "prompts cached": lambda row, _: "" if row.cached is None else f"{row.cached:.0%}",
    }
    latencies = []
    for (load, own), measure in product(results.by_load(), MEASURES):
        for row in own:
            values = [f"{1e3 * v:.{0 if v >= 1 else 1}f}" for v in row.percentiles(measure)]
            ratio = [_times(row, own[0], median_of(measure))] if several else []
            latencies.append([load, measure.name, row.target, *(values or [""] * len(PERCENTILES)), *ratio])
    headings = [f"p{percentile}" for percentile in PERCENTILES] + ["ratio"] * several
    return [
        _table(results, "throughput", rates),
        ResultTable(["load", "", "target", *headings], latencies, 3, "latency, ms"),
        _table(results, "means, as far as the servers report them", means),
    ]


def _times(row: LoadRow, first: LoadRow, rate: Callable[[Trial], float]) -> str:
    """Format the ratio to the first row, such as "2.10x"; empty for the first row and where there is none."""
    ratio = None if row is first else row.ratio(first, rate)
    return "" if ratio is None else f"{ratio:.2f}x"


def notes(results: LoadResults, slo: Slo) -> list[str]:
    """Return what a reader of the tables must know."""
    found = [f"{name}: {said}" for name in results.conditions["targets"] for said in _of(results, name)]
    trials, conversations = results.trials, results.conditions["conversations"]
    asked = max((trial.begin + trial.begun for trial in trials), default=0)
    if asked > conversations:
        found.append(
            f"There are {conversations} conversations for {asked}: some were asked again, and may have been "
            "found in a prefix cache."
        )
    urls = results.conditions["urls"]
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
        limits = zip(("TTFT", "ITL by token", "E2E"), (slo.first, slo.per_token, slo.end), strict=True)
        kept = [f"{name} of at most {1e3 * limit:g} ms" for name, limit in limits if limit is not None]
        found.append(f"Goodput counts answers with {', '.join(kept)}.")
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
    most = results.conditions["max_tokens"]
    short = sum(sample.finish_reason != "length" and sample.tokens < most for sample in answered)
    if short and "ignore_eos" in str(results.conditions["bodies"]):
        yield f"{short} of {len(answered)} answers ended before their {most} tokens, in spite of ignore_eos."


WIDTH, HEIGHT = 3.6, 2.7
"""Size of a panel in inches."""

COLUMNS = 3
"""Panels side by side."""


def load_chart(results: LoadResults) -> Any:
    """Draw panels for each load: the distributions of latencies, and what happened over time.

    Several levels of load have panels of their own at the end: rates and latencies by level. Returns a
    matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    loads = list(results.by_load())
    colours = {name: f"C{number}" for number, name in enumerate(results.conditions["targets"])}
    groups, size = len(loads) + (len(loads) > 1), len(MEASURES) + 2
    rows = groups * size // COLUMNS
    figure = new_figure(figsize=(WIDTH * COLUMNS, HEIGHT * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).reshape(groups, size)
    for group, (load, own) in zip(panels, loads, strict=False):
        for panel, measure in zip(group, MEASURES, strict=False):
            _distributions(panel, own, measure, colours)
            panel.set_title(f"{load}: {measure.name}", fontsize=10)
        _over_time(group[-2:], load, own, colours)
    if len(loads) > 1:
        _over_levels(panels[-1], results, colours)
    for panel in panels.flat:
        tidy(panel)
    panels[0][0].legend(frameon=False, fontsize=8)
    return figure


def _distributions(panel: Any, rows: Sequence[LoadRow], measure: Measure, colours: dict[str, str]) -> None:
    found = {row.target: [1e3 * v for s in row.answered for v in measure.of(s)] for row in rows}
    for target, values in found.items():
        steps = np.sort([*values, min(values, default=np.nan)])  # the first step rises from 0
        shares = np.arange(len(steps)) / max(len(values), 1)
        panel.step(steps, shares, where="post", color=colours[target], label=target)
    together = [value for values in found.values() for value in values if value > 0]
    if together and max(together) > 10 * min(together):
        panel.set_xscale("log")
        panel.minorticks_off()
        panel.xaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        panel.set_xlim(left=0)
    panel.set(ylim=(0, 1.02), xlabel="ms", ylabel="share")


def _over_time(panels: Any, load: str, rows: Sequence[LoadRow], colours: dict[str, str]) -> None:
    """Draw times to the first token, and the requests in flight, over the time of a trial."""
    for row in rows:
        points = [(sample.sent, 1e3 * sample.first) for sample in row.answered if sample.first is not None]
        _plot(panels[0], points, ".", color=colours[row.target], alpha=0.6)
        steps = row.trials[max(row.trials)].in_flight()
        _plot(panels[1], steps, color=colours[row.target], drawstyle="steps-post")
    for panel, title in zip(panels, ("TTFT over time", "in flight, last round"), strict=True):
        panel.set_title(f"{load}: {title}", fontsize=10)
        panel.set_xlabel("s since the trial's begin")
    panels[0].set_ylabel("ms")


def _over_levels(panels: Any, results: LoadResults, colours: dict[str, str]) -> None:
    """Draw rates, medians and 99th percentiles of latencies over the levels of load."""
    rows = results.rows()
    for name, colour in colours.items():
        own = sorted((row for row in rows if row.target == name), key=lambda row: row.level)
        _plot(panels[0], [(r.level, r.median(lambda t: t.token_rate)) for r in own], "o-", color=colour)
        _plot(panels[1], [(r.level, r.median(lambda t: t.request_rate)) for r in own], "o-", color=colour)
        for panel, measure in zip(panels[2:], MEASURES, strict=True):
            found = [(row.level, row.percentiles(measure)) for row in own]
            for place, style in ((0, "o-"), (-1, "o:")):
                points = [(level, 1e3 * values[place]) for level, values in found if values]
                _plot(panel, points, style, color=colour)
    titles = ["tokens/s", "requests/s", *(f"{m.name}, ms: p50, dotted p99" for m in MEASURES)]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(rows[0].load.partition(" ")[0])


def _plot(panel: Any, points: Sequence[tuple[float, float]], *style: str, **options: Any) -> None:
    """Draw points from zero up, if there are any."""
    if points:
        panel.plot(*np.array(points).T, *style, **options)
        panel.set_ylim(0, 1.08 * panel.dataLim.y1 or 1)


def page(results: LoadResults, slo: Slo) -> str:
    """Return the page. Raises `SoothsayError` if matplotlib, which draws the charts, is not installed."""
    return html_page(
        "load.html",
        title="Load",
        about=results.conditions,
        tables=tables(results, slo),
        notes=notes(results, slo),
        chart=drawn(load_chart(results), "distributions of latencies, and what happened over time"),
    )
