"""Draws a chart of bars as an SVG, for the README.

    python docs/pictures/bars.py OUT TITLE "label=number" ...

The last bar stands out.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

LEFT, LENGTH, STEP = 190, 520, 34  # pixels: where bars begin, the longest bar, from bar to bar


def draw(title: str, bars: list[tuple[str, float]]) -> str:
    """The chart."""
    longest = max(number for _, number in bars)
    rows = []
    for n, (label, number) in enumerate(bars):
        y, length = 46 + n * STEP, LENGTH * number / longest
        kind = "ours" if n == len(bars) - 1 else "other"
        rows.append(
            f'<text x="{LEFT - 12}" y="{y + 16}" class="label">{escape(label)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{length:g}" height="24" rx="3" class="{kind}"/>'
            f'<text x="{LEFT + length + 10:g}" y="{y + 16}">{number:g}</text>'
        )
    width, height = LEFT + LENGTH + 70, 46 + len(bars) * STEP + 6
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text {{ font: 14px system-ui, sans-serif; fill: #24292f }}
.title {{ font-weight: 600 }}
.label {{ text-anchor: end }}
.other {{ fill: #b6c2cf }}
.ours {{ fill: #1a7f37 }}
</style>
<rect width="100%" height="100%" rx="8" fill="#ffffff"/>
<text x="20" y="26" class="title">{escape(title)}</text>
{chr(10).join(rows)}
</svg>
"""


if __name__ == "__main__":
    out, title, *pairs = sys.argv[1:]
    split = [pair.rpartition("=") for pair in pairs]
    Path(out).write_text(draw(title, [(label, float(number)) for label, _, number in split]))
