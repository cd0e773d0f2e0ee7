"""The chart of a training's metrics."""

from __future__ import annotations

import json
from pathlib import Path

from soothsay.plotting import new_figure, save_png, tidy


def plot_metrics(metrics: Path, path: Path) -> None:
    """Draw the loss by step and the results of evaluations to a PNG file.

    The loss is smoothed over a fiftieth of the steps.

    Args:
        metrics: JSON lines that `Trainer` has written.
        path: of the chart.

    Raises `SoothsayError` if matplotlib is not installed.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    evaluated = [line for line in lines if "score" in line]
    names = [
        name for name in ("accepted", "accepted_sampled", "held_out_lm") if evaluated and name in evaluated[0]
    ]
    figure = new_figure(figsize=(10 if names else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    panels[0].plot(steps, losses, color="C0", alpha=0.25)
    panels[0].plot(steps, _smooth(losses, max(1, len(losses) // 50)), color="C0")
    panels[0].set_ylabel("loss, nats a token")
    for name in names:
        found = [line[name] for line in evaluated]
        panels[1].plot([line["step"] for line in evaluated], found, "o-", label=name.replace("_", " "))
    if names:
        panels[1].set_ylabel("held-out loss" if names == ["held_out_lm"] else "tokens a step")
        panels[1].legend(frameon=False)
    for panel in panels:
        panel.set_xlabel("steps")
        tidy(panel)
    save_png(figure, path, dpi=120)


def _smooth(values: list[float], width: int) -> list[float]:
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - width + 1) : i + 1])
    ]
