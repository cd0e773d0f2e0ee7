"""The operations of drafters that depend on a device or an instruction set, what they take and what they
return.

The engine has one set of them, which it passes to drafters in `Target`. `DraftOps` has the stock operations,
`native_draft_ops.NativeDraftOps` those of a compiled library. Texts, and guesses that are refined node by
node, are the host's: whatever device the model is on, these operations take tensors of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.core.functions import silu
from soothsay.core.request import Request
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.automaton import Automaton, StockAutomaton
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.operands import Norm


@dataclass(frozen=True)
class RecurrentLayers:
    """The layers of a recurrent head of one block, as they are served; see `eagle3_head.Eagle3Head`."""

    block: nn.Module
    head: nn.Module
    fuse: nn.Module
    taps: int  # parts of what it reads, which are normed one by one
    tap_norms: Tensor | None  # weights of these norms, one after the other; None: they are not normed
    embedding: nn.Module
    rope: Rope
    embedding_norm: Norm
    feature_norm: Norm
    norm: Norm  # of outputs
    ids: Tensor | None  # `[outputs of head]` int64, the tokens that they stand for; None: all
    norms_residual: bool
    norms_output: bool
    join: nn.Module | None = None  # of both to what the block adds to; None: it adds to the feature


@dataclass(frozen=True, slots=True)
class DraftInput:
    """A request's rows, and the tree that is wanted below the last of them.

    The request's parameters change logits by temperature and truncation alone.
    """

    request: Request
    rows: Rows  # without nodes; their table is known
    features: Tensor  # [p, taps * H] float32: what the target's layers gave for the token before each
    nodes: int  # of the largest tree, the root included; 0: nothing is drafted
    factor: float  # of logits: how sharp the drafter's distribution is


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The requests of a call, and the shape of their trees.

    `depth`, `width` and `branch` are those of `soothsay.drafters.trees.tree_shapes.ConfidentShape`, and
    `least` is that of `TreeGrower.grow`.
    """

    inputs: Sequence[DraftInput]
    kv: Tensor  # [2 * H_kv, S, d] of the head's block
    block_size: int
    depth: int
    width: int
    branch: int
    least: float


class DraftOutput(NamedTuple):
    """The nodes of a tree, its root first: their tokens, parents and scores."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


RecurrentDrafts = Callable[[DraftBatch], list[DraftOutput | None]]
"""Computes rows of committed tokens and grows the trees below them in one call."""


LEAST_REFINED = 0.004
"""Minimum probability of a path, as the drafter sees it. It takes more time than a less likely path gains."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """What a cell knows of all tokens; see `soothsay.drafters.heads.refiner`.

    Rows stand for the V tokens that can be guessed. U is the number of the cell's units.
    """

    tokens: Tensor  # [V, U] bfloat16: the part of a state that a token makes
    carry: Tensor  # [U, U] bfloat16: the part that the state above makes, a row for each of its units
    out: Tensor  # [V, U] bfloat16: a token's correction is the product with the state
    followers: Tensor  # [V, F] int64: for each token, some that often come after it


class HeadOutputs(NamedTuple):
    """What one pass says of D depths, for each of R requests, float32. V and U are those of `Refinement`."""

    logits: Tensor  # [R * D, V], of the depths of a request one after the other; the first is refined
    read: Tensor  # [R * D, U]: the part of a state that each depth makes
    states: Tensor  # [R, U]: the states of the roots


RedrafterCall = Callable[[Tensor, Tensor], HeadOutputs]
"""A ReDrafter head in one call, of features `[R, F]` and normed embeddings `[R, H]`, both float32."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The guesses of one pass for D depths, K for each. Those of the first depth are refined already."""

    # [D, V] float32, of all tokens; times `factor` they are log-probabilities up to a constant
    scores: Tensor
    factor: float
    values: Tensor  # [D, K] float32 log-probabilities, the best first; minus infinity: there is none
    places: Tensor  # [D, K] int64 rows of the refinement
    read: Tensor  # [D, U] float32: the part of a state that the pass makes; the first is not read
    root: Tensor  # [U] float32: the root's state
    scale: float  # factor of corrections


def grow_refined_tree(refinement: Refinement, candidates: Candidates, nodes: int, depth: int) -> DraftOutput:
    """Grow the best tree of at most `nodes` nodes and `depth` levels, the root included in the nodes.

    Returns:
        The nodes. Their tokens are rows of the refinement; that of the root has no meaning.
    """
    r, c = refinement, candidates
    tree, places = DraftTree(-1), [0]
    states: list[Tensor] = []  # of each node that can have children
    below: list[tuple[Tensor, Tensor]] = []  # rows and scores of the candidates; -inf for those in the tree
    nothing = c.places[0, :0], c.values[0, :0]

    def expand(node: int) -> None:
        level = tree.depths[node]
        if level >= min(depth, len(c.values)):
            states.append(c.root)
            below.append(nothing)
        elif node == 0:
            states.append(c.root)
            below.append((c.places[0], c.values[0].clone()))
        else:
            above = states[tree.parents[node]] @ r.carry.float()
            states.append(silu(c.read[level] + r.tokens[places[node]].float() + above))
            rows, log_probs = _refined(r, c, level, places[node], states[-1])
            below.append((rows, tree.scores[node] + log_probs))

    expand(0)
    while len(tree) < nodes:
        above = max(range(len(tree)), key=lambda node: _best(below[node][1]))
        rows, scores = below[above]
        score = _best(scores)
        if score < math.log(LEAST_REFINED):
            break
        chosen = int(scores.argmax())
        scores[chosen] = -math.inf
        places.append(int(rows[chosen]))  # rows stand for tokens, so siblings are distinct
        tree.add(above, places[-1], score - tree.scores[above])
        expand(len(tree) - 1)
    return DraftOutput(places, tree.parents, tree.scores)


def _refined(r: Refinement, c: Candidates, level: int, row: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates below a node whose token has this row: their rows and refined log-probabilities."""
    constant = c.factor * c.scores[level, c.places[level, 0]] - c.values[level, 0]
    followers = r.followers[row]
    more = c.factor * c.scores[level, followers] - constant
    least = c.scores[level, c.places[level][c.values[level] > -math.inf]].min()
    more = more.masked_fill(c.scores[level, followers] >= least, -math.inf)  # these are among the best
    values, rows = torch.cat([c.values[level], more]), torch.cat([c.places[level], followers])
    refined = values + c.scale * (r.out[rows].float() @ state)
    outside = (1 - values.exp().sum()).clamp(min=0)  # tokens that are no candidates are not refined
    whole = torch.cat([refined, outside.log()[None]]).logsumexp(0)
    return rows, (refined - whole).clamp(max=0)


def _best(scores: Tensor) -> float:
    return float(scores.max()) if len(scores) else -math.inf


class DraftOps:
    """The stock operations. A subclass computes some of them in another way."""

    sampling = SamplingOps()
    """Those of the host."""

    def redrafter_head(self, layers: Sequence[nn.Module], norm: Norm, depths: int) -> RedrafterCall | None:
        """One call for all that a ReDrafter head computes; None if there is none for these layers.

        Args:
            layers: its linear layers: `look`, `guesses`, `read`, `token` and `out` of the cell, and `head`.
                The weights must keep their addresses.
            norm: of guesses.
            depths: that it predicts.
        """
        return None

    def recurrent_drafts(self, layers: RecurrentLayers) -> RecurrentDrafts | None:
        """One call for all that a recurrent head drafts; None if there is none for these layers.

        The weights must keep their addresses. Scores are nearly those of `SamplingOps`, so trees may differ
        where scores nearly tie.
        """
        return None

    def grow_paths(
        self, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
    ) -> DraftOutput:
        """Grow the best tree over refined guesses; see `grow_refined_tree`.

        The native one sums in another order, so trees may differ where scores nearly tie.
        """
        return grow_refined_tree(refinement, candidates, nodes, depth)

    def automaton(self, counted: int) -> Automaton:
        """An empty automaton. `counted` is that of `Automaton`."""
        return StockAutomaton(counted)
