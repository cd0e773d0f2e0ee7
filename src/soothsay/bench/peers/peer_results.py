"""Stores measurements of `soothsay bench peers`, sums them up, and draws them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from soothsay.bench.journal import Records
from soothsay.plotting import new_figure

OURS = "soothsay"
"""Our engine, to which the others are compared."""

PLAIN = "plain"
"""The mode without speculation."""

ANSWER = "answer"
"""The measure of whole answers. Its items are prompts; the items of other measures are rounds."""

AGREEMENT = 32
"""Number of leading tokens that show whether two engines run the same model."""

Contestant = tuple[str, str]
"""An engine and a mode."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One measurement."""

    measure: str
    dtype: str
    engine: str
    mode: str
    item: str
    seconds: float
    tokens: int  # decoded, read or verified
    version: str = ""  # the engine's
    task: str = ""  # the prompt's
    output: list[int] = field(default_factory=list)  # the first tokens, if tokens were made

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Identifies the measurement."""
        return self.measure, self.dtype, self.engine, self.mode, self.item


class PeerResults(Records[PeerRecord]):
    """The measurements in a journal."""

    WHAT, ENTRY = "measurements of 'bench peers'", PeerRecord

    def _of(self, measure: str, dtype: str) -> Iterator[PeerRecord]:
        return (one for one in self.by_key.values() if (one.measure, one.dtype) == (measure, dtype))

    def medians(self, measure: str, dtype: str) -> dict[str, tuple[float, int]]:
        """Return each engine's median over rounds in seconds, and its tokens in one round."""
        rounds: dict[str, list[PeerRecord]] = defaultdict(list)
        for record in self._of(measure, dtype):
            rounds[record.engine].append(record)
        return {
            engine: (statistics.median(record.seconds for record in records), records[0].tokens)
            for engine, records in rounds.items()
        }

    def agreement(self, dtype: str) -> dict[str, int]:
        """Return how many of each engine's first `AGREEMENT` tokens equal ours.

        It is the median over rounds. Their prompts differ, and one near tie ends the agreement of a round.
        """
        outputs: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for record in self._of("decode", dtype):
            outputs[record.engine][record.item] = record.output
        ours = outputs.pop(OURS, {})
        return {
            engine: int(statistics.median(equal_tokens(ours[item], theirs[item]) for item in items))
            for engine, theirs in outputs.items()
            if (items := ours.keys() & theirs.keys())
        }

    def rates(self, dtype: str) -> dict[str, dict[Contestant, float]]:
        """Return tokens a second of whole answers by task, and over all tasks under the name "overall".

        It is the mean over prompts that all contestants have answered.
        """
        rates: dict[str, dict[Contestant, float]] = defaultdict(dict)
        tasks: dict[str, str] = {}
        for record in self._of(ANSWER, dtype):
            rates[record.item][record.engine, record.mode] = record.tokens / record.seconds
            tasks[record.item] = record.task
        everyone = {contestant for answered in rates.values() for contestant in answered}
        shared = {item: answered for item, answered in rates.items() if answered.keys() == everyone}
        groups = {
            task: [item for item in shared if tasks[item] == task] for task in dict.fromkeys(tasks.values())
        }
        groups["overall"] = list(shared)
        return {
            task: {one: statistics.mean(shared[item][one] for item in items) for one in sorted(everyone)}
            for task, items in groups.items()
            if items
        }


def equal_tokens(ours: list[int], theirs: list[int]) -> int:
    """Return the length of the common prefix.

    Example:
        >>> equal_tokens([1, 2, 3], [1, 2, 4])
        2
    """
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(ours), len(theirs)))


def answers_chart(results: PeerResults, dtypes: Sequence[str]) -> Any:
    """Draw tokens a second of whole answers by task: a panel for each dtype, a colour for each contestant.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    shown = {dtype: rates for dtype in dtypes if (rates := results.rates(dtype))}
    figure = new_figure(figsize=(9, 1 + 2.8 * max(len(shown), 1)), layout="constrained")
    panels = figure.subplots(max(len(shown), 1), 1, squeeze=False)[:, 0]
    everyone = {one for rates in shown.values() for one in rates["overall"]}  # not every dtype has them all
    colours = {one: f"C{i}" for i, one in enumerate(sorted(everyone, key=lambda one: (one[0] != OURS, one)))}
    handles = {}
    for panel, (dtype, rates) in zip(panels, shown.items(), strict=False):
        contestants = [one for one in colours if one in rates["overall"]]
        width = 0.8 / len(contestants)
        for number, one in enumerate(contestants):
            places = [task - 0.4 + width * (number + 0.5) for task in range(len(rates))]
            heights = [of[one] for of in rates.values()]
            handles[one] = panel.bar(places, heights, width, color=colours[one], label=", ".join(one))
        panel.set_xticks(range(len(rates)), [task.replace("_", " ") for task in rates])
        panel.tick_params(axis="x", length=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"weights in {dtype}", fontsize=10)
        panel.set_ylabel("tokens a second")
    bars = [handles[one] for one in colours]
    figure.legend(handles=bars, loc="outside lower center", frameon=False, ncols=3)
    return figure
