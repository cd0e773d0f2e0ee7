"""The chart of `soothsay bench learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soothsay.bench.learn import LEARNING, STATIC, LearnReport
from soothsay.plotting import new_figure, series_style, tidy

SMOOTH = 3
"""Number of windows that a point is the mean of."""


def learn_chart(report: LearnReport) -> Any:
    """Draw tokens a step along the stream, with and without learning.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    figure = new_figure(figsize=(7.5, 4.0), layout="constrained")
    panel = figure.subplots()
    for number, name in enumerate((STATIC, LEARNING)):
        windows = [window for window in report.windows if name in window.runs]
        runs = [window.runs[name] for window in windows]
        means = []
        for i in range(len(runs)):
            near = runs[max(i - SMOOTH + 1, 0) : i + 1]
            means.append(sum(run.tokens for run in near) / max(sum(run.steps for run in near), 1))
        places = [window.first + window.size for window in windows]
        panel.plot(places, means, color=series_style(number)[0], label=name, linewidth=1.8)
    held_out = [window.first for window in report.windows if window.held_out]
    if held_out:
        panel.axvspan(held_out[0], report.windows[-1].first + report.windows[-1].size, alpha=0.08)
    tidy(panel)
    panel.set_ylim(bottom=1)
    panel.set(xlabel="requests answered (shaded: held out)", ylabel="tokens a step")
    panel.legend(frameon=False)
    title = f"{Path(report.model).name}, {report.drafter.partition('(')[0]}, {report.share:.0%} of a core"
    panel.set_title(title, fontsize=10)
    return figure
