"""Predicts speed-ups from counts and times, and says how many nodes of a tree would have been best.

A step of speculation takes one pass over all nodes of its tree, and time outside of the pass: for drafting,
scheduling and text. It brings the accepted tokens and one more. A step of plain decoding takes a pass of one
row and its time outside, and brings one token. So, with T(rows) the time of a pass,

    speed-up = tokens a step x (T(1) + plain's time outside) / (T(nodes) + time outside)

Leviathan et al. 2023 (arXiv 2211.17192) have this with a constant T and with drafting as the only time
outside. T is measured apart from the run, and gives the proportions of passes. Their scale is that of plain
decoding's passes in the run, since the speed of a machine changes. Times outside are those of the run.
"""

from __future__ import annotations

from collections.abc import Callable

from soothsay.bench.spec.run_times import RunTimes

PassTime = Callable[[int, float], float]
"""Seconds of a pass, by its rows and by the tokens before each row."""


def predicted_seconds(plain: RunTimes, drafted: RunTimes, time: PassTime, nodes: int | None = None) -> float:
    """Seconds after prefill that `drafted` should take, if its trees had at most `nodes` nodes.

    None: as they were. With several requests at once, their trees in a pass are taken to be equally large.
    """
    scale, trees = plain.verify / plain.passes / time(round(plain.at_once), plain.context), drafted.counts
    sizes = trees.cut(len(trees.sizes) if nodes is None else nodes)
    one = sum(share * time(round(drafted.at_once * size), drafted.context) for size, share in sizes)
    return drafted.passes * scale * one + drafted.outside


def speedups_by_nodes(plain: RunTimes, drafted: RunTimes, time: PassTime) -> list[float]:
    """The speed-up over plain decoding that trees of at most 1, 2, ... nodes should bring.

    The first is 1: a root alone is plain decoding, without a drafter. The others take the time of drafting
    as it was. Drafters that would draft less for a smaller tree would be a little faster than this.
    """
    plain_rate, trees = plain.counts.steps / (plain.verify + plain.outside), drafted.counts
    rates = (
        trees.tokens(nodes) * trees.steps / predicted_seconds(plain, drafted, time, nodes)
        for nodes in range(2, len(trees.sizes) + 1)
    )
    return [1.0, *(rate / plain_rate for rate in rates)]
