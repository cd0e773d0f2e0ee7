"""Small plots as SVG, drawn here: text and colours are the page's, so that they follow it into the dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = 10
"""Of series, `--c0` to `--c9` in the page's style; series beyond repeat them with dashed lines."""

Point = tuple[float, float]

_ROW, _TEXT = 20, 6.4  # pixels: height of a bar's row; width of a character on average
_LONGEST = 24  # characters of a name; the rest is in its tooltip


def bars(values: Sequence[tuple[str, float]], top: float, reference: float | None = None) -> str:
    """Horizontal bars with their names and numbers, one below the other.

    Args:
        values: a name and its value.
        top: the largest value that has room, the same for panels that are compared.
        reference: where a line across is drawn.
    """
    left = _name_width([name for name, _ in values])
    width, height = 360, _ROW * len(values) + 4
    scale = (width - left - 40) / (top or 1.0)
    parts = []
    for i, (name, value) in enumerate(values):
        y = _ROW * i + 2
        worse = " worse" if reference is not None and value < reference else ""
        parts.append(
            f"<g><title>{escape(name)}: {value:.2f}</title>{_name(name, left, y)}"
            f'<rect class="bar{worse}" x="{left}" y="{y + 3}" width="{_n(value * scale)}" '
            f'height="{_ROW - 6}"/>'
            f'<text class="number" x="{_n(left + value * scale + 4)}" y="{y + 14}">{value:.2f}</text></g>'
        )
    if reference is not None:
        x = _n(left + reference * scale)
        parts.append(f'<line class="reference" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
    return _svg(width, height, parts)


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Horizontal bars in parts, each part with a colour of its own in the order of the first row's."""
    left = _name_width([name for name, _ in rows])
    width, height = 720, _ROW * len(rows) + 4
    top = max((sum(parts.values()) for _, parts in rows), default=0.0)
    scale = (width - left - 60) / (top or 1.0)
    drawn = []
    for i, (name, parts) in enumerate(rows):
        x, y = float(left), _ROW * i + 2
        drawn.append(_name(name, left, y))
        for number, (part, value) in enumerate(parts.items()):
            drawn.append(
                f'<rect {_colour(number, "fill")} x="{_n(x)}" y="{y + 3}" width="{_n(value * scale)}" '
                f'height="{_ROW - 6}"><title>{escape(f"{name}, {part}: {value:.3f} {unit}")}</title></rect>'
            )
            x += value * scale
        drawn.append(f'<text class="number" x="{_n(x + 4)}" y="{y + 14}">{sum(parts.values()):.2f}</text>')
    return _svg(width, height, drawn)


def lines(
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    reference: float | None = None,
    percent: bool = False,
) -> str:
    """Lines from zero up; their x are names of equal distance, such as depths or batches."""
    width, height, left, bottom, right, above = 560, 300, 44, 40, 12, 10
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _ceiling(max([y for points in series.values() for _, y in points] + [reference or 0.0]))
    step = (width - left - right) / max(len(xs) - 1, 1)
    place = {x: left + (step * i if len(xs) > 1 else (width - left - right) / 2) for i, x in enumerate(xs)}

    def level(y: float) -> float:
        return above + (height - above - bottom) * (1 - y / top)

    parts = []
    for i in range(5):
        y = top * i / 4
        shown = f"{y:.0%}" if percent else f"{y:g}"
        parts.append(
            f'<line class="rule" x1="{left}" x2="{width - right}" y1="{_n(level(y))}" y2="{_n(level(y))}"/>'
            f'<text class="tick" x="{left - 6}" y="{_n(level(y) + 4)}" text-anchor="end">{shown}</text>'
        )
    parts += [
        f'<text class="tick" x="{_n(place[x])}" y="{height - bottom + 16}" text-anchor="middle">{x:g}</text>'
        for x in xs
    ]
    middle = (left + width - right) / 2
    parts.append(
        f'<text class="tick" x="{_n(middle)}" y="{height - 6}" text-anchor="middle">{x_label}</text>'
    )
    if reference is not None:
        y = level(reference)
        parts.append(f'<line class="reference" x1="{left}" x2="{width - right}" y1="{_n(y)}" y2="{_n(y)}"/>')
    for number, (name, points) in enumerate(series.items()):
        path = " ".join(f"{_n(place[x])},{_n(level(y))}" for x, y in points)
        parts.append(f'<polyline class="line" {_colour(number, "stroke")} points="{path}"/>')
        for x, y in points:
            shown = f"{y:.1%}" if percent else f"{y:.2f}"
            parts.append(
                f'<circle {_colour(number, "fill")} cx="{_n(place[x])}" cy="{_n(level(y))}" r="3">'
                f"<title>{escape(f'{name}, {x_label} {x:g}: {shown}')}</title></circle>"
            )
    return _svg(width, height, parts, y_label)


def legend(names: Sequence[str]) -> str:
    """Names beside the colours of their series."""
    entries = (
        f'<li><svg width="22" height="10" aria-hidden="true"><line class="line" {_colour(i, "stroke")} '
        f'x1="0" x2="22" y1="5" y2="5"/></svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _colour(number: int, what: str) -> str:
    dashes = ";stroke-dasharray:5 3" if what == "stroke" and number >= COLOURS else ""
    return f'style="{what}:var(--c{number % COLOURS}){dashes}"'


def _name_width(names: Sequence[str]) -> int:
    return 12 + int(_TEXT * max((min(len(name), _LONGEST) for name in names), default=0))


def _name(name: str, left: int, y: float) -> str:
    shown = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return f'<text x="{left - 6}" y="{y + 14}" text-anchor="end">{escape(shown)}</text>'


def _ceiling(value: float) -> float:
    """A round number that is no less, and can be quartered."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if m * power >= value * 0.999)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _svg(width: int, height: int, parts: Sequence[str], label: str = "") -> str:
    named = f' role="img" aria-label="{escape(label)}"' if label else ' role="img"'
    return f'<svg viewBox="0 0 {width} {height}"{named}>{"".join(parts)}</svg>'
