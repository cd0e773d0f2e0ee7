"""Stores the runs of `soothsay bench stack`, checks their answers, computes the factors, and draws them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from soothsay.bench.journal import Journal, Records
from soothsay.bench.peers.peer_results import equal_tokens
from soothsay.bench.tables import records_table
from soothsay.errors import SoothsayError
from soothsay.plotting import COLOURS, DIM, INK, RULE, new_figure

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
    def key(self) -> tuple[str, int]:
        """Identifies the run."""
        return self.rung, self.round

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
class Gain:
    """What a rung adds."""

    factor: Spread  # its rate over that of the rung that it is compared with
    product: Spread  # of all factors up to this one


@dataclass(frozen=True, slots=True)
class StackRow:
    """A rung's results."""

    rung: Rung
    rate: float  # tokens a second, median over rounds
    gain: Gain | None  # None: it is a base


class StackResults(Records[StackRun]):
    """The runs in a journal. Adding one raises `SoothsayError` for wrong answers."""

    WHAT, ENTRY = "runs of 'bench stack'", StackRun

    def __init__(self, rungs: Sequence[Rung], journal: Journal):
        self.rungs = list(rungs)
        super().__init__(journal)

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
            gain = None
            if rung.against:
                others = (self.by_key[rung.against, number].rate for number in rounds)
                ratios = [own / other for own, other in zip(rates, others, strict=True)]
                products = [whole * ratio for whole, ratio in zip(products, ratios, strict=True)]
                gain = Gain(Spread.of(ratios), Spread.of(products))
            rows.append(StackRow(rung, statistics.median(rates), gain))
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


def stack_table(rows: Sequence[StackRow], rounds: int, title: str) -> Table:
    """A row for each rung."""

    def spread(row: StackRow) -> str:
        return "" if row.gain is None else f"{row.gain.factor.low:.2f} to {row.gain.factor.high:.2f}"

    return records_table(
        rows,
        {"each adds one thing": "{.rung.title}"},
        {
            "tokens/s": "{.rate:.1f}",
            "factor": lambda row: "" if row.gain is None else f"{row.gain.factor.median:.2f}x",
            "quartiles": spread,
            "product": lambda row: "" if row.gain is None else f"{row.gain.product.median:.2f}x",
        },
        # a base after the first is no rung: the last rung is compared with it
        style=lambda row: "dim" if row.gain is None and row is not rows[0] else "",
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
