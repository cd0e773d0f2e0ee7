"""Verification without an engine: tests supply the evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soothsay.core.sampling import Keyed
from soothsay.core.tree import DraftTree
from soothsay.core.verify import VERIFIERS, Evidence, Verdict, Walk


def run(walk: Walk, evidence: Callable[[Sequence[int]], Evidence]) -> Verdict:
    """Run a verification to its verdict. `evidence` is called with the nodes that it asks for."""
    try:
        wanted = next(walk)
        while True:
            wanted = walk.send(evidence(wanted))
    except StopIteration as ended:
        verdict: Verdict = ended.value
        return verdict


def match(tree: DraftTree, draws: Sequence[int]) -> Verdict:
    """Return the verdict of `match` if the target draws `draws[i]` after node i."""
    none = torch.empty(0, 0)
    return run(
        VERIFIERS["match"].verify(tree, Keyed(0)),
        lambda nodes: Evidence([draws[node] for node in nodes], none),
    )
