"""The chart of `soothsay bench stack`: a staircase of factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soothsay.bench.stack.stack_results import StackRow
from soothsay.plotting import COLOURS, DIM, INK, RULE, new_figure

_ENDS = (1.0, 1.2, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000)
"""Numbers that may stand on the axis."""


def stack_chart(rows: Sequence[StackRow], title: str) -> Any:
    """Draw a bar for each rung, from the product of the factors before it to the product with its own.

    The axis is logarithmic, so that equal factors are equally long, wherever they stand. A thin line reaches
    from one quartile of the product to the other. The bar of a factor below 1 is pale.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    steps = [(row.rung.title, row.gain) for row in rows if row.gain is not None]
    names = [rows[0].rung.title, *(title for title, _ in steps), "all together"]
    figure = new_figure(figsize=(9.5, 1.3 + 0.52 * len(names)), layout="constrained")
    panel = figure.subplots()
    panel.set_xscale("log")
    before, ends = 1.0, [1.0]
    for place, (_, gain) in enumerate(steps, start=1):
        product, colour = gain.product, COLOURS[place % len(COLOURS)]
        loss = 0.45 if gain.factor.median < 1 else 1.0
        panel.barh(place, product.median - before, left=before, height=0.62, color=colour, alpha=loss)
        panel.plot([product.low, product.high], [place, place], color=INK, linewidth=1.2)
        panel.plot([product.median] * 2, [place, place + 1], color=DIM, linewidth=0.8, linestyle=(0, (2, 2)))
        ends += [product.median, product.low, product.high]
        _label(panel, max(before, product.median, product.high), place, f"{gain.factor.median:.2f}x", colour)
        before = product.median
    panel.plot([1, 1], [-0.31, len(names) - 0.7], color=DIM, linewidth=0.8)
    _label(panel, 1.0, 0, f"{rows[0].rate:.1f} tokens a second", DIM)
    panel.barh(len(names) - 1, before - 1, left=1.0, height=0.62, color=INK)
    _label(panel, max(before, 1.0), len(names) - 1, f"{before:.1f}x", INK)
    _axes(panel, names, min(ends), max(ends))
    panel.set_title(title, fontsize=11, color=INK, loc="left")
    return figure


def _label(panel: Any, x: float, place: int, text: str, colour: str) -> None:
    panel.annotate(
        text, (x, place), (6, 0), textcoords="offset points", color=colour, va="center", weight="bold"
    )


def _axes(panel: Any, names: Sequence[str], low: float, most: float) -> None:
    panel.set_xlim(low / 1.02, most * (most / low) ** 0.12 * 1.1)  # room for the last label
    panel.set_ylim(len(names) - 0.5, -0.5)
    shown = [end for end in _ENDS if low <= end <= most * 1.1]
    panel.set_xticks(shown, [f"{end:g}x" for end in shown])
    panel.set_xlabel(f"tokens a second, in multiples of {names[0]}", fontsize=10, color=DIM)
    panel.minorticks_off()
    panel.set_yticks(range(len(names)), names)
    panel.tick_params(length=0, labelcolor=INK)
    panel.get_yticklabels()[-1].set_fontweight("bold")
    panel.grid(axis="x", color=RULE)
    panel.set_axisbelow(True)
    panel.spines[:].set_visible(False)
