"""Trees over the guesses of one pass, which a recurrent cell refines along each path.

One pass gives candidates for each depth. Their log-probabilities below a node depend on the node's path, by
way of the cell's state. The best tree grows node by node: the likeliest candidate below any node comes next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soothsay.core.tree import DraftTree

LEAST = 0.004
"""Minimum probability of a path, as the drafter sees it. It takes more time than a less likely path gains."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """What a cell knows of all tokens; see `soothsay.drafters.heads.modules.refiner`.

    Rows stand for the V tokens that can be guessed. U is the number of the cell's units.
    """

    tokens: Tensor  # [V, U] bfloat16: the part of a state that a token makes
    carry: Tensor  # [U, U] bfloat16: the part that the state above makes, a row for each of its units
    out: Tensor  # [V, U] bfloat16: a token's correction is the product with the state


@dataclass(frozen=True, eq=False)
class Candidates:
    """The guesses of one pass for D depths, K for each, before they are refined."""

    values: Tensor  # [D, K] float32 log-probabilities, the best first; minus infinity: there is none
    places: Tensor  # [D, K] int64 rows of the refinement
    read: Tensor  # [D, U] float32: the part of a state that the pass makes
    root: Tensor  # [U] float32: the part that the root's token makes
    scale: float  # factor of corrections


def grow(
    refinement: Refinement, candidates: Candidates, nodes: int, depth: int
) -> tuple[list[int], list[int], list[float]]:
    """Grow the best tree of at most `nodes` nodes and `depth` levels, the root included in the nodes.

    Returns:
        The row of each node in the refinement, its parent and its score; node 0 is the root, and its row has
        no meaning.
    """
    r, c = refinement, candidates
    tree, places = DraftTree(-1), [0]
    states: list[Tensor | None] = []
    waiting: list[Tensor] = []  # of each node, the scores of candidates below it; those in the tree are -inf

    def expand(node: int) -> None:
        level, above = tree.depths[node], tree.parents[node]
        if level >= min(depth, len(c.values)):
            states.append(None)
            waiting.append(torch.full_like(c.values[0], -math.inf))
            return
        state = c.read[level] + (r.tokens[places[node]].float() if node else c.root)
        if node:
            carried = states[above]
            assert carried is not None
            state = state + carried @ r.carry.float()
        state = F.silu(state)
        refined = c.values[level] + c.scale * (r.out[c.places[level]].float() @ state)
        outside = (1 - c.values[level].exp().sum()).clamp(
            min=0
        )  # tokens that are no candidates are not refined
        whole = torch.cat([refined, outside.log()[None]]).logsumexp(0)
        states.append(state)
        waiting.append(tree.scores[node] + (refined - whole).clamp(max=0))

    expand(0)
    while len(tree) < nodes:
        scores = torch.stack(waiting)
        above, chosen = divmod(int(scores.argmax()), scores.shape[1])
        best = float(scores[above, chosen])
        if best < math.log(LEAST):
            break
        waiting[above][chosen] = -math.inf
        places.append(int(c.places[tree.depths[above], chosen]))
        # places stand for tokens, and siblings are distinct
        tree.add(above, places[-1], best - tree.scores[above])
        expand(len(tree) - 1)
    return places, tree.parents, tree.scores
