"""Says in a sentence which drafter to use, how much it gains, and how sure that is."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from soothsay.bench.spec.spec_results import OVERALL, PLAIN, RESAMPLES, SpecResults, SpecRow, by_setting

SURE = 0.95
"""Share of the resamples in which a drafter must be faster than another one to be called so."""

BUSY = 0.9
"""Share of CPU time in wall time below which the machine was busy."""

FEW = 10
"""Questions, or batches of them, below which the interval is called rough."""


def recommendations(results: SpecResults) -> Iterator[tuple[str, str]]:
    """Yield for each setting a sentence, and the command that serves the model accordingly.

    `auto` is preferred unless another drafter is faster for sure, since it adapts to other prompts. Nothing
    is said of rows whose answers were not compared, or differ. On a busy machine, CPU time counts.
    """
    every = results.rows()
    measure = " by CPU time" if cpu_share(every) < BUSY else ""
    settings = [*by_setting([_by_cpu(row) for row in every] if measure else every)]
    for (temperature, batch), rows in settings:
        named = [
            row for row in rows if row.name != PLAIN and row.overall.different == 0 and row.overall.rates
        ]
        if named:
            where = f"At temperature {temperature:g}, batch {batch}: " if len(settings) > 1 else ""
            drafter, said = _choice(named, measure)
            for verifier in results.conditions.get("verifiers", ()):  # which requests choose, not servers
                drafter = drafter.removesuffix(f", {verifier}")
            words = "soothsay", "serve", str(results.conditions.get("model", "MODEL")), "--drafter", drafter
            yield where + said, shlex.join(words)


def cpu_share(rows: Sequence[SpecRow]) -> float:
    """The smallest share of CPU time in the time that a contender took. 1: unknown."""
    return min((row.overall.cpu_share for row in rows if row.overall.cpu_share), default=1.0)


def _by_cpu(row: SpecRow) -> SpecRow:
    score = replace(row.overall, speedup=row.overall.cpu_speedup, rates=row.overall.cpu_rates)
    return replace(row, scores={OVERALL: score})


def _choice(rows: Sequence[SpecRow], measure: str) -> tuple[str, str]:
    best = max(rows, key=lambda row: row.overall.speedup)
    level = [row for row in rows if _share_faster(best, row) < SURE]  # and the best itself
    chosen = next((row for row in level if row.name == "auto"), best)
    (low, high), count = chosen.overall.interval, len(chosen.overall.rates)
    one, many = ("question", "questions") if chosen.batch == 1 else ("batch", "batches")
    number = f"{count} {many if count > 1 else one}"
    sure = f"95% interval {low:.2f} to {high:.2f}, {number}" if count > 1 else number
    if count < FEW:
        sure += ", so few that this is rough: more prompts, or --rounds N, say more"
    gain = f"{chosen.overall.speedup:.2f} times as fast as plain decoding{measure} ({sure})"
    if best.overall.speedup <= 1:
        return PLAIN, f"Use no drafter: even the best one, {chosen.name}, is only {gain}."
    if low <= 1 or count == 1:
        return chosen.name, f"{chosen.name} may be worth trying: it is {gain}, which may be chance."
    others = " and ".join(f"{row.name} ({row.overall.speedup:.2f})" for row in level if row is not chosen)
    beside = f"; {others} cannot be told apart with {number}" if others else ""
    if len(level) == 1 < len(rows):
        beside = ", and faster than all others here"
    return chosen.name, f"Use {chosen.name}: it is {gain}{beside}."


def _share_faster(one: SpecRow, other: SpecRow) -> float:
    """The share of resamples of the questions in which `one` has the higher mean rate."""
    rates = one.overall.rates, other.overall.rates
    if one is other or len(rates[0]) != len(rates[1]):
        return 0.0
    draw = random.Random(0)
    pairs = [own - theirs for (own, _), (theirs, _) in zip(*rates, strict=True)]
    return sum(sum(draw.choices(pairs, k=len(pairs))) > 0 for _ in range(RESAMPLES)) / RESAMPLES
