"""Stores measurements of `soothsay bench peers`, sums them up, and draws them."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from soothsay.bench.journal import Journal
from soothsay.bench.spec.spec_page import HEADINGS
from soothsay.bench.tables import ResultTable

OURS = "soothsay"
"""Our engine, to which the others are compared."""

PLAIN = "plain"
"""The mode without speculation."""

ANSWER = "answer"
"""The measure of whole answers. Its items are prompts; the items of other measures are rounds."""

SUSPICIOUS = 8
"""With fewer leading tokens equal to ours, of `AGREEMENT`, an engine probably runs another model."""

CONTEXT, PROMPT, VERIFIED = 128, 512, (1, 4, 8, 16)
"""Tokens of a context and of a prompt, and rows of passes that are measured."""

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


class PeerResults(Journal[PeerRecord]):
    """The measurements in a journal."""

    WHAT, ENTRY = "measurements of 'bench peers'", PeerRecord
    KEY = ("measure", "dtype", "engine", "mode", "item")

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


def speeds_table(results: PeerResults, dtype: str, rounds: int) -> ResultTable:
    """Times of steps, prompts and passes, and whether engines say the same."""
    threads = results.conditions["threads"]
    caption = f"median of {rounds} rounds, {threads} threads; equal: leading tokens, of {AGREEMENT}"
    headings, table = ("", "engine", "ms", "tokens/s", "of ours", "equal"), list[list[str]]()
    measures = {"decode": f"one token, context {CONTEXT}", "prompt": f"a prompt of {PROMPT} tokens"}
    for rows in VERIFIED:
        passes = "a pass of 1 row" if rows == 1 else f"a pass of {rows} rows"
        measures[f"verify {rows}"] = f"{passes}, context {CONTEXT}"
    agreement = results.agreement(dtype)
    for measure, title in measures.items():
        times = results.medians(measure, dtype)
        for engine, (seconds, count) in sorted(times.items(), key=lambda item: item[0] != OURS):
            shown = seconds / count if measure == "decode" else seconds
            equal = str(agreement.get(engine, "")) if measure == "decode" else ""
            rate = "" if measure.startswith("verify") else f"{count / seconds:.1f}"
            ratio = "" if engine == OURS else f"{seconds / times[OURS][0]:.2f}x"
            table.append([title, engine, f"{1e3 * shown:.2f}", rate, ratio, equal])
    return ResultTable(headings, table, 2, f"weights in {dtype}", caption)


def suspicions(results: PeerResults, dtype: str) -> Iterator[str]:
    """Warnings of engines whose tokens differ much from ours. In int4, engines round differently."""
    for engine, equal in results.agreement(dtype).items():
        if equal < SUSPICIOUS and dtype != "int4":
            yield f"{engine} agrees in {equal} of 32 leading tokens only: does it run the same model?"


def answers_table(results: PeerResults, dtype: str) -> ResultTable:
    """Return a table of whole answers: tokens a second by task, and speed-ups."""
    rates = results.rates(dtype)
    title = f"whole answers, weights in {dtype}: tokens a second, mean over prompts"
    headings = ["", *(HEADINGS.get(task, task) for task in rates)]
    table = list[list[str]]()
    contestants = list(next(iter(rates.values()), {}))
    for engine, mode in sorted(contestants, key=lambda one: (one[0] != OURS, one)):
        table.append([f"{engine}, {_short(mode)}", *(f"{of[engine, mode]:.1f}" for of in rates.values())])
    for engine, mode in contestants:
        if engine == OURS and mode != PLAIN:
            ratios = (of[engine, mode] / of[OURS, PLAIN] for of in rates.values())
            table.append([f"{OURS}, {_short(mode)} / {PLAIN}", *(f"{ratio:.2f}x" for ratio in ratios)])
    if any(engine != OURS for engine, _ in contestants):
        ours, theirs = (
            [max(of[one] for one in contestants if (one[0] == OURS) is own) for of in rates.values()]
            for own in (True, False)
        )
        table.append(["our best / theirs", *(f"{a / b:.2f}x" for a, b in zip(ours, theirs, strict=True))])
    return ResultTable(headings, table, title=title)


def _short(mode: str) -> str:
    """A drafter without its options, which may be long paths."""
    return re.sub(r"\(.*?\)", "", mode)
