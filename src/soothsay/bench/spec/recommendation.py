"""Says in a sentence which drafter to use, how much it gains, and how sure that is."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Sequence

from soothsay.bench.spec.spec_results import PLAIN, RESAMPLES, Score, SpecResults, SpecRow, by_setting

SURE = 0.95
"""Share of the resamples in which a drafter must be faster than another one to be called so."""

FEW = 10
"""Questions below which the interval is called rough."""


def recommendations(results: SpecResults) -> Iterator[tuple[str, str]]:
    """Yield for each setting a sentence, and the command that serves the model accordingly.

    `auto` is preferred unless another drafter is faster for sure, since it adapts to other prompts. Nothing
    is said of rows whose answers were not compared, or differ.
    """
    settings = [*by_setting(results.rows())]
    for (temperature, batch), rows in settings:
        named = [
            row for row in rows if row.name != PLAIN and row.overall.different == 0 and row.overall.rates
        ]
        if named:
            where = f"At temperature {temperature:g}, batch {batch}: " if len(settings) > 1 else ""
            drafter, said = _choice(named)
            words = "soothsay", "serve", str(results.conditions.get("model", "MODEL")), "--drafter", drafter
            yield where + said, shlex.join(words)


def _choice(rows: Sequence[SpecRow]) -> tuple[str, str]:
    best = max(rows, key=lambda row: row.overall.speedup)
    level = [row for row in rows if _share_faster(best.overall, row.overall) < SURE]  # and the best itself
    chosen = next((row for row in level if row.name == "auto"), best)
    (low, high), questions = chosen.overall.interval, len(chosen.overall.rates)
    sure = f"95% interval {low:.2f} to {high:.2f}, {questions} question{'s' if questions > 1 else ''}"
    if questions < FEW:
        sure += ", so few that this is rough"
    gain = f"{chosen.overall.speedup:.2f} times as fast as plain decoding ({sure})"
    if best.overall.speedup <= 1:
        return PLAIN, f"Use no drafter: the best, {chosen.name}, is {gain}."
    if low <= 1:
        return chosen.name, f"{chosen.name} may be worth trying: it is {gain}, which may be chance."
    others = [row.name for row in level if row is not chosen]
    beside = f"; {' and '.join(others)} may be as fast" if others else ", and faster than all others here"
    return chosen.name, f"Use {chosen.name}: it is {gain}{beside}."


def _share_faster(one: Score, other: Score) -> float:
    """The share of resamples of the questions in which `one` has the higher mean rate."""
    if one is other or len(one.rates) != len(other.rates):
        return 0.0
    draw = random.Random(0)
    pairs = [own - theirs for (own, _), (theirs, _) in zip(one.rates, other.rates, strict=True)]
    return sum(sum(draw.choices(pairs, k=len(pairs))) > 0 for _ in range(RESAMPLES)) / RESAMPLES
