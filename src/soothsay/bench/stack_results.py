"""Stores the runs of `soothsay bench stack`, checks their answers, computes the factors, and draws them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from soothsay.bench.journal import Journal
from soothsay.bench.peers.peer_results import equal_tokens
from soothsay.bench.tables import ResultTable, records_table
from soothsay.errors import SoothsayError
from soothsay.plotting import COLOURS, DIM, INK, new_figure, tidy

PEER, PLAIN = "transformers", "plain"
"""Names of the lowest rungs."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A contender, and what its answers and its rate are compared with."""

    name: str  # identifies it in the journal
    title: str
    against: str = ""  # the rung whose rate it is compared with; empty: it is a base
    equal_to: str = ""  # the rung whose answers it must give; empty: none


@dataclass(frozen=True, slots=True)
class StackRun:
    """One run: all prompts, answered by one rung."""

    rung: str
    round: int  # from 1
    seconds: float
    answers: list[list[int]]  # token ids, by prompt

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.answers)) / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds, between the quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(*(float(np.quantile(values, share)) for share in (0.25, 0.5, 0.75)))


@dataclass(frozen=True, slots=True)
class StackRow:
    """A rung's results."""

    rung: Rung
    rate: float  # tokens a second, median over rounds
    factor: Spread | None = None  # its rate over that of `rung.against`; None: it is a base
    product: float = 1.0  # of all factors up to this one, median over rounds


class StackResults(Journal[StackRun]):
    """The runs in a journal. Adding one raises `SoothsayError` for wrong answers."""

    WHAT, ENTRY, KEY = "runs of 'bench stack'", StackRun, ("rung", "round")

    def __init__(self, rungs: Sequence[Rung], conditions: Mapping[str, Any], path: Path | None = None):
        self.rungs = list(rungs)
        super().__init__(conditions, path)

    def keep(self, record: StackRun) -> None:
        """Keep a run, if its answers are right."""
        self._check(record)
        super().keep(record)

    def rows(self) -> list[StackRow]:
        """A row for each rung. Ratios are of one round, spreads over rounds."""
        rounds = sorted({number for _, number in self.by_key})
        products = [1.0] * len(rounds)
        rows = []
        for rung in self.rungs:
            rates = [self.by_key[rung.name, number].rate for number in rounds]
            row = StackRow(rung, statistics.median(rates))
            if rung.against:
                others = (self.by_key[rung.against, number].rate for number in rounds)
                ratios = [own / other for own, other in zip(rates, others, strict=True)]
                products = [whole * ratio for whole, ratio in zip(products, ratios, strict=True)]
                row = replace(row, factor=Spread.of(ratios), product=statistics.median(products))
            rows.append(row)
        return rows

    def agreement(self) -> tuple[int, int] | None:
        """Prompts to which transformers and our plain decoding give equal answers, and all prompts."""
        pair = [run for rung in (PEER, PLAIN) if (run := self.by_key.get((rung, 1)))]
        if len(pair) < 2:
            return None
        theirs, ours = (run.answers for run in pair)
        return sum(a == b for a, b in zip(theirs, ours, strict=True)), len(ours)

    def _check(self, run: StackRun) -> None:
        """Raise `SoothsayError` if an answer differs from an earlier one that it must equal."""
        equal_to = {rung.name: rung.equal_to or rung.name for rung in self.rungs if rung.name != PEER}
        group = equal_to.get(run.rung)
        for other in self.by_key.values():
            if group is None or equal_to.get(other.rung) != group:
                continue
            for prompt, (own, known) in enumerate(zip(run.answers, other.answers, strict=True), start=1):
                if own != known:
                    raise SoothsayError(_difference(run, other, prompt, own, known))
            return


def _difference(run: StackRun, other: StackRun, prompt: int, own: list[int], known: list[int]) -> str:
    place = equal_tokens(own, known) + 1
    return (
        f"'{run.rung}' in round {run.round} and '{other.rung}' in round {other.round} give different answers "
        f"to prompt {prompt}, from token {place} on. This must never happen: 'soothsay verify' says more"
    )


def stack_chart(rows: Sequence[StackRow], title: str) -> Any:
    """Draw a bar for each rung, from the product of the factors before it to the product with its own.

    The axis is logarithmic, so that equal factors are equally long, wherever they stand. The bar of a factor
    below 1 is pale.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    steps = [row for row in rows if row.factor is not None]
    names = [rows[0].rung.title, *(row.rung.title for row in steps), "all together"]
    figure = new_figure(figsize=(9.5, 1.3 + 0.52 * len(names)), layout="constrained")
    panel, ends = figure.subplots(), [1.0, *(row.product for row in steps)]
    looks = {"textcoords": "offset points", "va": "center", "weight": "bold"}

    def bar(place: int, begin: float, end: float, text: str, colour: str, alpha: float = 1.0) -> None:
        panel.barh(place, end - begin, left=begin, height=0.62, color=colour, alpha=alpha)
        panel.annotate(text, (max(begin, end), place), (6, 0), color=colour, **looks)

    bar(0, 1.0, 1.0, f"{rows[0].rate:.1f} tokens a second", DIM)
    for place, (row, (before, product)) in enumerate(zip(steps, pairwise(ends), strict=True), start=1):
        factor = cast(Spread, row.factor).median
        colour = COLOURS[place % len(COLOURS)]
        bar(place, before, product, f"{factor:.2f}x", colour, 0.45 if factor < 1 else 1.0)
    bar(len(names) - 1, 1.0, ends[-1], f"{ends[-1]:.1f}x", INK)
    panel.set_xscale("log")
    panel.set_xlim(min(ends) / 1.02, 1.3 * max(ends))  # room for the last label
    panel.xaxis.set_major_locator(import_module("matplotlib.ticker").LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    panel.minorticks_off()
    panel.set_xlabel(f"tokens a second, in multiples of {names[0]}", fontsize=10, color=DIM)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), names)
    tidy(panel)
    panel.set_axisbelow(True)
    panel.set_title(title, fontsize=11, color=INK, loc="left")
    return figure


def stack_table(rows: Sequence[StackRow], rounds: int, title: str) -> ResultTable:
    """A row for each rung."""

    def spread(row: StackRow) -> str:
        return "" if row.factor is None else f"{row.factor.low:.2f} to {row.factor.high:.2f}"

    return records_table(
        rows,
        {"each adds one thing": "{.rung.title}"},
        {
            "tokens/s": "{.rate:.1f}",
            "factor": lambda row: "" if row.factor is None else f"{row.factor.median:.2f}x",
            "quartiles": spread,
            "product": lambda row: "" if row.factor is None else f"{row.product:.2f}x",
        },
        # a base after the first is no rung: the last rung is compared with it
        style=lambda row: "dim" if row.factor is None and row is not rows[0] else "",
        title=title,
        caption=f"ratios within a round, medians and quartiles of {rounds} rounds",
    )


def stack_notes(results: StackResults) -> list[str]:
    """What a reader of the table must know."""
    notes = [
        "From integers on, all answers to a prompt are equal, token by token: this was checked. The prefix "
        "cache has longer prompts. So the last product holds where the other factors hold for them too."
    ]
    if agreement := results.agreement():
        equal, prompts = agreement
        differ = (
            f"transformers and this engine give equal answers to {equal} of {prompts} prompts. They round at "
            "different places, so they may decide a near tie differently."
        )
        notes.insert(0, differ)
    return notes
