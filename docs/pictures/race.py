"""Draws plain decoding and `auto` answering the same prompt side by side, as an SVG that moves.

    python docs/pictures/race.py MODEL docs/pictures/race.svg

Every token appears when it did: the times are those of the fastest of three answers each, which took turns.
Drafters forget everything before each answer. Tokens that they guessed are green.
"""

from __future__ import annotations

import sys
import time
import unicodedata
from dataclasses import dataclass
from html import escape
from pathlib import Path

from soothsay import LLM, SamplingParams
from soothsay.drafters.base import Drafter
from soothsay.drafters.registry import build_drafter

PROMPT = """Add type hints and a docstring to this function, and change nothing else:

```python
def moving_average(values, width):
    if width < 1:
        raise ValueError("width must be at least 1")
    total = sum(values[:width])
    averages = [total / width]
    for old, new in zip(values, values[width:]):
        total += new - old
        averages.append(total / width)
    return averages
```"""
TOKENS = 160  # at most
COLUMNS, CHARACTER, LINE = 66, 6.3, 15.0  # characters in a row; pixels of one
PAUSE = 2.5  # seconds that the picture stays at its end


@dataclass(frozen=True)
class Shown:
    """A token of an answer, and when it came."""

    text: str
    seconds: float
    was_drafted: bool


def answer(llm: LLM, drafter: Drafter) -> list[Shown]:
    """The answer of a drafter to `PROMPT`, which it has never seen."""
    drafter.reset()
    prompt = llm.chat_prompt(PROMPT)
    begin = time.perf_counter()
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=TOKENS), drafter=drafter)
    return [Shown(piece.text, time.perf_counter() - begin, piece.drafter is not None) for piece in stream]


def places(tokens: list[Shown]) -> list[tuple[int, int, str, Shown]]:
    """Where pieces of tokens stand: line, column, text without line ends."""
    line = column = 0
    found = []
    for token in tokens:
        for n, part in enumerate(token.text.split("\n")):
            if n:
                line, column = line + 1, 0
            while part:
                if column >= COLUMNS:
                    line, column = line + 1, 0
                found.append((line, column, part[: COLUMNS - column], token))
                column, part = column + len(found[-1][2]), part[len(found[-1][2]) :]
    return found


def panel(tokens: list[Shown], title: str, left: float, whole: float) -> tuple[str, int]:
    """One side of the picture, and its number of lines. `whole`: seconds until it begins again."""
    seconds = tokens[-1].seconds
    rate = f"{len(tokens) / seconds:.0f} tokens a second"
    pieces = [f'<text x="{left}" y="24" class="title">{escape(title)}</text>']
    pieces.append(appears(rate, left, 24, seconds, whole))
    lines = 0
    for line, column, text, token in places(tokens):
        lines = max(lines, line + 1)
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip(" "))
        x, y, length = left + (column + indent) * CHARACTER, 52 + line * LINE, len(text.strip()) * CHARACTER
        kind = "drafted" if token.was_drafted else "own"
        pieces.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" textLength="{length:g}" opacity="0">'
            f"{escape(text.strip())}{fade(token.seconds, whole)}</text>"
        )
    return "\n".join(pieces), lines


def fade(seconds: float, whole: float) -> str:
    """Shows what it is in from a moment on."""
    moment = min(seconds / whole, 0.9999)
    return (
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{moment:.4f}" dur="{whole:.2f}s" '
        f'calcMode="discrete" repeatCount="indefinite"/>'
    )


def appears(text: str, left: float, y: float, seconds: float, whole: float) -> str:
    """A number at the right of a title, from the answer's end on."""
    x = left + COLUMNS * CHARACTER
    return f'<text x="{x:g}" y="{y:g}" class="rate" opacity="0">{escape(text)}{fade(seconds, whole)}</text>'


def draw(plain: list[Shown], auto: list[Shown]) -> str:
    """The picture."""
    whole = plain[-1].seconds + PAUSE
    right = 40 + COLUMNS * CHARACTER + 20
    first, lines = panel(plain, "plain decoding", 20, whole)
    second, _ = panel(auto, "soothsay, auto: the same words", right, whole)
    width, height = right + COLUMNS * CHARACTER + 20, 60 + lines * LINE
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text {{ font: 10.4px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d7dde6 }}
.title {{ font-weight: bold; fill: #ffffff }}
.rate {{ text-anchor: end; fill: #ffd479 }}
.drafted {{ fill: #6ee787 }}
</style>
<rect width="100%" height="100%" rx="8" fill="#161b22"/>
<path d="M{right - 20:g} 12V{height - 12:g}" stroke="#30363d"/>
{first}
{second}
</svg>
"""


def main(model: str, out: str) -> None:
    """Answer, and write the picture."""
    llm = LLM(model, prefix_caching=False)
    drafters = [build_drafter(name, llm.engine.target) for name in ("none", "auto")]
    answers: list[list[list[Shown]]] = [[], []]
    for turn in range(4):
        for drafter, own in zip(drafters, answers, strict=True):
            own.append(answer(llm, drafter))
        if turn == 0:  # kernels choose their variants at first use
            answers = [[], []]
    plain, auto = (min(own, key=lambda tokens: tokens[-1].seconds) for own in answers)
    if [token.text for token in plain] != [token.text for token in auto]:
        raise SystemExit("the answers differ")
    Path(out).write_text(unicodedata.normalize("NFC", draw(plain, auto)))
    print(f"plain {plain[-1].seconds:.2f} s, auto {auto[-1].seconds:.2f} s, {len(plain)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
