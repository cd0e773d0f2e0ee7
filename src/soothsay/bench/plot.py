"""Plots of what was measured. matplotlib is needed for them and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from soothsay.bench.peers.results import OURS, Results
from soothsay.bench.step import StepReport
from soothsay.errors import SoothsayError


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure. Raises `SoothsayError` if matplotlib is not installed."""
    try:
        return import_module("matplotlib.figure").Figure(**options)
    except ImportError:
        raise SoothsayError("a plot needs matplotlib: pip install matplotlib") from None


def plot_steps(report: StepReport, path: Path) -> None:
    """Draw t(M) as lines, one colour a dtype, above their dashed floors; one panel a context.

    Raises `SoothsayError` if matplotlib is not installed.
    """
    contexts = sorted({time.context for time in report.times})
    dtypes = list(dict.fromkeys(time.dtype for time in report.times))
    figure = new_figure(figsize=(1 + 4.5 * len(contexts), 4.2), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for panel, context in zip(panels, contexts, strict=True):
        for number, dtype in enumerate(dtypes):
            times = [time for time in report.times if (time.dtype, time.context) == (dtype, context)]
            rows, colour = [time.rows for time in times], f"C{number}"
            panel.plot(rows, [time.ms for time in times], "o-", color=colour, label=dtype)
            panel.plot(rows, [time.floor_ms for time in times], "--", color=colour, alpha=0.7)
            panel.set_xscale("log", base=2)
            panel.set_xticks(rows, [str(count) for count in rows])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"context of {context:,} tokens", fontsize=10)
        panel.set_xlabel("rows in the pass")
    panels[0].set_ylim(bottom=0)  # last, since it fixes the top, which the panels share
    panels[0].set_ylabel("milliseconds a forward pass")
    panels[0].plot([], [], "--", color="grey", label="floor")
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"{Path(report.model).name}: {report.threads} threads, {report.bandwidth / 1e9:.0f} GB/s, "
        f"trees: {report.layout}",
        fontsize=10,
    )
    figure.savefig(path, format="png", dpi=150)


def plot_answers(results: Results, dtypes: Sequence[str], path: Path) -> None:
    """Draw tokens a second of whole answers as bars by task, one colour a contestant; one panel a dtype.

    Raises `SoothsayError` if matplotlib is not installed.
    """
    shown = {dtype: rates for dtype in dtypes if (rates := results.rates(dtype))}
    figure = new_figure(figsize=(9, 1 + 2.8 * max(len(shown), 1)), layout="constrained")
    panels = figure.subplots(max(len(shown), 1), 1, squeeze=False)[:, 0]
    everyone = {one for rates in shown.values() for one in rates["overall"]}  # not every dtype has them all
    colours = {one: f"C{i}" for i, one in enumerate(sorted(everyone, key=lambda one: (one[0] != OURS, one)))}
    handles = {}
    for panel, (dtype, rates) in zip(panels, shown.items(), strict=False):
        contestants = [one for one in colours if one in rates["overall"]]
        width = 0.8 / len(contestants)
        for number, one in enumerate(contestants):
            places = [task - 0.4 + width * (number + 0.5) for task in range(len(rates))]
            heights = [of[one] for of in rates.values()]
            handles[one] = panel.bar(places, heights, width, color=colours[one], label=", ".join(one))
        panel.set_xticks(range(len(rates)), [task.replace("_", " ") for task in rates])
        panel.tick_params(axis="x", length=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"weights in {dtype}", fontsize=10)
        panel.set_ylabel("tokens a second")
    bars = [handles[one] for one in colours]
    figure.legend(handles=bars, loc="outside lower center", frameon=False, ncols=3)
    figure.savefig(path, format="png", dpi=150)
