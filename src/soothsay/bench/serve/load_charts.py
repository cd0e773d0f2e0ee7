"""The chart of `soothsay bench serve`: one figure, for a file or for the page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from soothsay.bench.serve.serve_results import MEASURES, LoadResults, LoadRow, Measure
from soothsay.plotting import new_figure, tidy

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
    colours = {name: f"C{number}" for number, name in enumerate(results.journal.conditions["targets"])}
    groups, size = len(loads) + (len(loads) > 1), len(MEASURES) + 2
    rows = groups * size // COLUMNS
    figure = new_figure(figsize=(WIDTH * COLUMNS, HEIGHT * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).reshape(groups, size)
    for group, (load, own) in zip(panels, loads, strict=False):
        for panel, measure in zip(group, MEASURES, strict=False):
            _distributions(panel, own, measure, colours)
            panel.set_title(f"{load}: {measure.name}", fontsize=10)
        _first_tokens(group[-2], own, colours)
        group[-2].set_title(f"{load}: TTFT over time", fontsize=10)
        _in_flight(group[-1], own, colours)
        group[-1].set_title(f"{load}: in flight, last round", fontsize=10)
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


def _first_tokens(panel: Any, rows: Sequence[LoadRow], colours: dict[str, str]) -> None:
    for row in rows:
        points = [(sample.sent, 1e3 * sample.first) for sample in row.answered if sample.first is not None]
        _plot(panel, points, ".", color=colours[row.target], alpha=0.6)
    panel.set(xlabel="s since the trial's begin", ylabel="ms")


def _in_flight(panel: Any, rows: Sequence[LoadRow], colours: dict[str, str]) -> None:
    for row in rows:
        steps = row.trials[max(row.trials)].in_flight()
        _plot(panel, steps, color=colours[row.target], drawstyle="steps-post")
    panel.set_xlabel("s since the trial's begin")


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
