"""A verification alone, with evidence from elsewhere than an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soothsay.engine.sampling import Keyed
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import VERIFIERS, Evidence, Verdict, Walk


def run(walk: Walk, evidence: Callable[[Sequence[int]], Evidence]) -> Verdict:
    """The verdict, with the evidence for each node that is asked for."""
    try:
        wanted = next(walk)
        while True:
            wanted = walk.send(evidence(wanted))
    except StopIteration as ended:
        verdict: Verdict = ended.value
        return verdict


def match(tree: DraftTree, draws: Sequence[int]) -> Verdict:
    """The verdict where the target draws `draws[i]` after node i."""
    none = torch.empty(0, 0)
    return run(
        VERIFIERS["match"].verify(tree, Keyed(0)),
        lambda nodes: Evidence([draws[node] for node in nodes], none),
    )
