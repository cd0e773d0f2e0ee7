"""Measurements of peers, and what they add up to."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field

from soothsay.bench.journal import Journal
from soothsay.errors import SoothsayError

OURS = "soothsay"
"""The engine that all others are measured against."""

PLAIN = "plain"
"""The mode that guesses nothing."""

ANSWER = "answer"
"""The measure of whole answers; its items are prompts. The items of all others are rounds."""

AGREEMENT = 32
"""Tokens whose equality tells whether two engines run the same model."""

Contestant = tuple[str, str]
"""An engine and a mode."""


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement."""

    measure: str
    dtype: str
    engine: str
    mode: str
    item: str
    seconds: float
    tokens: int  # made, read or verified
    version: str = ""  # of the engine
    task: str = ""  # of a prompt
    output: list[int] = field(default_factory=list)  # the first tokens, where there are any

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What was measured."""
        return self.measure, self.dtype, self.engine, self.mode, self.item


class Results:
    """Records, kept in a journal.

    Raises `SoothsayError` if it holds anything else.
    """

    def __init__(self, journal: Journal):
        self._journal = journal
        try:
            records = [Record(**entry) for entry in journal.entries]
        except TypeError as error:
            raise SoothsayError(f"the journal does not hold measurements of peers ({error})") from None
        self._records = {record.key: record for record in records}

    def __contains__(self, key: tuple[str, str, str, str, str]) -> bool:
        return key in self._records

    def add(self, record: Record) -> None:
        """Keep a record, in the journal too."""
        self._records[record.key] = record
        self._journal.add(asdict(record))

    def medians(self, measure: str, dtype: str) -> dict[str, tuple[float, int]]:
        """Of each engine, the median of its rounds in seconds, and the tokens of one."""
        rounds: dict[str, list[Record]] = defaultdict(list)
        for record in self._records.values():
            if (record.measure, record.dtype) == (measure, dtype):
                rounds[record.engine].append(record)
        return {
            engine: (statistics.median(record.seconds for record in records), records[0].tokens)
            for engine, records in rounds.items()
        }

    def agreement(self, dtype: str) -> dict[str, int]:
        """Of each engine, how many of its first `AGREEMENT` tokens behind a prompt are ours.

        The median over rounds, which have other prompts: a near tie ends agreement in any one of them.
        """
        outputs: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for record in self._records.values():
            if (record.measure, record.dtype) == ("decode", dtype):
                outputs[record.engine][record.item] = record.output
        ours = outputs.pop(OURS, {})
        return {
            engine: int(statistics.median(equal_tokens(ours[item], theirs[item]) for item in items))
            for engine, theirs in outputs.items()
            if (items := ours.keys() & theirs.keys())
        }

    def rates(self, dtype: str) -> dict[str, dict[Contestant, float]]:
        """Tokens a second of whole answers, the mean over the prompts that all contestants have answered.

        By task, and over all prompts under the name "overall".
        """
        rates: dict[str, dict[Contestant, float]] = defaultdict(dict)
        tasks: dict[str, str] = {}
        for record in self._records.values():
            if (record.measure, record.dtype) == (ANSWER, dtype):
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
    """The length of the common beginning.

    Example:
        >>> equal_tokens([1, 2, 3], [1, 2, 4])
        2
    """
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(ours), len(theirs)))
