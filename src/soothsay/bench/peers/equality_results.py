"""Stores the answers of `soothsay bench equality`, and compares, tabulates and draws them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from soothsay.bench.journal import Journal
from soothsay.bench.peers.peer_results import OURS, PLAIN
from soothsay.bench.tables import ResultTable
from soothsay.plotting import new_figure, series_style, tidy

AGAIN = "plain, again"
"""A second run of plain decoding. If it differs, an engine is not deterministic in any case."""

Way = tuple[str, str, str, int]
"""An engine, its element type, its mode, and the number of prompts in a batch."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """A greedy answer."""

    engine: str
    dtype: str
    mode: str
    batch: int
    item: str  # the prompt's id
    task: str
    tokens: list[int]  # with the end token, if the answer has one
    margins: list[float] = field(default_factory=list)
    """The lead of the likeliest token over the second at each token of plain decoding's answer: a difference
    of log-probabilities, in float32."""
    version: str = ""  # the engine's

    @property
    def way(self) -> Way:
        """How the answer was made."""
        return self.engine, self.dtype, self.mode, self.batch


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer parts from plain decoding's."""

    position: int  # the first token that differs, from 0
    margin: float | None  # the margin there; None: plain decoding's answer had ended


@dataclass(frozen=True, slots=True)
class EqualityRow:
    """One way to decode, beside the plain decoding of the same engine, one prompt at a time."""

    way: Way
    answers: int
    partings: tuple[Parting, ...]  # one for each answer that differs, by position

    @property
    def share(self) -> float:
        """The share of answers that differ."""
        return len(self.partings) / self.answers

    @property
    def margins(self) -> list[float]:
        """The margins where answers part, the smallest first."""
        return sorted(parting.margin for parting in self.partings if parting.margin is not None)

    @property
    def label(self) -> str:
        """The mode, and the batch."""
        return f"{self.way[2]}, batch of {self.way[3]}" if self.way[3] > 1 else self.way[2]


class EqualityResults(Journal[AnswerRecord]):
    """The answers in a journal."""

    WHAT, ENTRY, KEY = "answers of 'bench equality'", AnswerRecord, ("way", "item")

    def rows(self) -> Iterator[EqualityRow]:
        """Yield a row for each way, ours first."""
        ways = dict.fromkeys(record.way for record in self.by_key.values())
        for way in sorted(ways, key=lambda way: way[0] != OURS):
            base = *way[:2], PLAIN, 1
            own = {item: one for (of, item), one in self.by_key.items() if of == way}
            pairs = [(one, self.by_key[base, item]) for item, one in own.items() if (base, item) in self]
            if way != base and pairs:
                found = filter(None, (parting(plain, one) for one, plain in pairs))
                yield EqualityRow(way, len(pairs), tuple(sorted(found, key=_order)))


def _order(one: Parting) -> tuple[int, float]:
    return one.position, one.margin or 0.0


def parting(plain: AnswerRecord, other: AnswerRecord) -> Parting | None:
    """Find where an answer parts from plain decoding's. None: they are equal.

    Example:
        >>> parting(AnswerRecord("", "", "", 1, "", "", [5, 6], [2.0, 0.1]), AnswerRecord(..., [5, 7]))
        Parting(position=1, margin=0.1)
    """
    for position, (one, two) in enumerate(zip_longest(plain.tokens, other.tokens)):
        if one != two:
            return Parting(position, plain.margins[position] if position < len(plain.margins) else None)
    return None


def equality_table(results: EqualityResults) -> ResultTable:
    """A row for each engine, type, mode and batch."""
    headings = ("engine", "weights", "how", "answers", "differ", "share")
    places = ("first part at", "median", "margin there, median", "largest")
    rows = []
    for row in results.rows():
        positions, margins = [one.position for one in row.partings], row.margins
        where = [f"{positions[0]}", f"{statistics.median(positions):.0f}"] if positions else ["", ""]
        how_near = [f"{statistics.median(margins):.3f}", f"{margins[-1]:.3f}"] if margins else ["", ""]
        counts = [f"{row.answers}", f"{len(positions)}", f"{row.share:.0%}"]
        rows.append([*row.way[:2], row.label, *counts, *where, *how_near])
    return ResultTable((*headings, *places), rows, names=3)


def equality_chart(results: EqualityResults) -> Any:
    """Draw the shares that differ, and where answers part, with the margin there. A matplotlib figure."""
    rows = [*results.rows()]
    figure = new_figure(figsize=(10, 1.5 + 0.24 * len(rows)), layout="constrained")
    bars, places = figure.subplots(1, 2, width_ratios=(3, 2))
    engines = [*dict.fromkeys(row.way[:2] for row in rows)]
    for number, row in enumerate(rows):
        colour, _ = series_style(engines.index(row.way[:2]))
        bars.barh(number, 100 * row.share, color=colour)
        bars.annotate(f"{row.share:.0%}", (100 * row.share, number), (3, -3), textcoords="offset points")
        near = [one for one in row.partings if one.margin is not None]
        places.scatter([one.position for one in near], [one.margin for one in near], s=9, color=colour)
    bars.set_yticks(range(len(rows)), [" ".join((*row.way[:2], row.label)) for row in rows], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 100)
    bars.set_xlabel("greedy answers that differ from the engine's own plain decoding, %")
    places.set_xlabel("token at which an answer parts")
    places.set_ylabel("log-probability of the best token minus the second")
    places.set_yscale("symlog", linthresh=0.001)
    places.set_ylim(bottom=0)
    for panel in (bars, places):
        tidy(panel)
    return figure
