"""Charts of Spec-Bench's results: bars, stacked bars and lines, as matplotlib figures.

Sizes are in pixels of the page at its usual width, one of which is a point of the figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soothsay.plotting import DIM, INK, RULE, new_figure, series_style, set_tooltip

BAR, WORSE = "#3b6fb6", "#c98b86"
"""Colours of a bar, and of one that is below the reference."""

Point = tuple[float, float]

_ROW, _LETTER = 20, 6.4  # pixels: height of a bar's row; width of a letter on average
_LONGEST = 24  # letters of a name; the whole name is in its tooltip
_INCH = 72  # points


def bars(values: Sequence[tuple[str, float]], top: float, reference: float | None = None) -> Any:
    """Draw horizontal bars with their names and numbers, one below the other.

    Args:
        values: names and values.
        top: the largest value that fits, equal for charts that are compared.
        reference: where a dashed line is drawn; bars below it have another colour.
    """
    panel = _rows([name for name, _ in values], width=360, right=40)
    panel.set_xlim(0, top or 1.0)
    for place, (name, value) in enumerate(values):
        worse = reference is not None and value < reference
        (bar,) = panel.barh(place, value, height=0.7, color=WORSE if worse else BAR)
        _number(panel, place, value)
        for part in (bar, panel.get_yticklabels()[place]):
            set_tooltip(part, f"{name}: {value:.2f}")
    if reference is not None:
        panel.axvline(reference, color=DIM, linewidth=1, linestyle=(0, (3, 3)))
    return panel.figure


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> Any:
    """Draw horizontal bars of several parts, one below the other, with the sum after each.

    Args:
        rows: names, and the values of the parts by the parts' names. Part i has the colour of series i.
        unit: of the values, for tooltips.
    """
    panel = _rows([name for name, _ in rows], width=720, right=60)
    sums = [sum(parts.values()) for _, parts in rows]
    panel.set_xlim(0, max(sums, default=0.0) or 1.0)
    for place, (name, parts) in enumerate(rows):
        begin = 0.0
        for number, (part, value) in enumerate(parts.items()):
            (bar,) = panel.barh(place, value, left=begin, height=0.7, color=series_style(number)[0])
            set_tooltip(bar, f"{name}, {part}: {value:.3f} {unit}")
            begin += value
        _number(panel, place, sums[place])
        set_tooltip(panel.get_yticklabels()[place], name)
    return panel.figure


def lines(
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    reference: float | None = None,
    percent: bool = False,
) -> Any:
    """Draw lines from zero up. Their x stand at equal distances, as depths and batches do.

    Args:
        series: points by the name of the line. Line i has the style of series i.
        x_label: name of the x axis.
        y_label: name of the y axis.
        reference: where a dashed line is drawn across.
        percent: whether y is shown as a percentage.
    """
    width, height, left, right, bottom, above = 560, 300, 56, 12, 40, 10
    figure = new_figure(figsize=(width / _INCH, height / _INCH))
    size = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + above) / height)
    panel = figure.add_axes(size)
    xs = sorted({x for points in series.values() for x, _ in points})
    place = {x: i for i, x in enumerate(xs)}
    for number, (name, points) in enumerate(series.items()):
        colour, style = series_style(number)
        panel.plot([place[x] for x, _ in points], [y for _, y in points], color=colour, linestyle=style)
        for x, y in points:
            (dot,) = panel.plot(place[x], y, "o", color=colour, markersize=5)
            set_tooltip(dot, f"{name}, {x_label} {x:g}: {f'{y:.1%}' if percent else f'{y:.2f}'}")
    if reference is not None:
        panel.axhline(reference, color=DIM, linewidth=1, linestyle=(0, (3, 3)))
    highest = max([y for points in series.values() for _, y in points] + [reference or 0.0])
    panel.set_ylim(0, 1.05 * highest or 1.0)
    panel.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    panel.set_xlabel(x_label, fontsize=11, color=DIM)
    panel.set_ylabel(y_label, fontsize=11, color=DIM)
    panel.tick_params(length=0, labelsize=11, labelcolor=DIM)
    if percent:
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    panel.grid(axis="y", color=RULE)
    panel.set_axisbelow(True)
    panel.spines[:].set_visible(False)
    return figure


def _number(panel: Any, place: int, value: float) -> None:
    """Write a number after the bar in row `place`."""
    looks = {"va": "center", "fontsize": 11, "color": DIM}
    panel.annotate(f"{value:.2f}", (value, place), (4, 0), textcoords="offset points", **looks)


def _rows(names: Sequence[str], width: int, right: int) -> Any:
    """Return a panel with a name for each row from the top, and `right` pixels of room for numbers."""
    height = _ROW * len(names) + 4
    shown = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in names]
    left = 12 + _LETTER * max(map(len, shown), default=0)
    figure = new_figure(figsize=(width / _INCH, height / _INCH))
    panel = figure.add_axes((left / width, 2 / height, 1 - (left + right) / width, 1 - 4 / height))
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), shown)
    panel.tick_params(axis="y", length=0, pad=6, labelsize=12, labelcolor=INK)
    for label in panel.get_yticklabels():
        label.set_parse_math(False)  # a dollar sign in a name is a dollar sign
    panel.xaxis.set_visible(False)
    panel.spines[:].set_visible(False)
    return panel
