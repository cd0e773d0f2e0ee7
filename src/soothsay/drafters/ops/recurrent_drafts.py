"""What a recurrent head drafts in one call: rows of committed tokens, and trees below them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Planted:
    """A request's rows, and the tree that is wanted below the last of them."""

    rows: Rows  # without nodes; their table is known
    features: Tensor  # [p, taps * H] float32: what the target's layers gave for the token before each
    nodes: int  # of the largest tree, the root included; 0: nothing is drafted
    depth: int  # of the deepest tree
    ends: Collection[int]  # tokens that nothing is drafted after
    params: SamplingParams  # they change logits by temperature and truncation alone
    seed: int
    factor: float  # of logits: how sharp the drafter's distribution is


@dataclass(frozen=True, slots=True)
class Drafting:
    """The requests of a call, and the shape of their trees.

    `depth`, `width` and `branch` are those of `soothsay.drafters.trees.tree_shapes.ConfidentShape`, and `least` is
    that of `TreeGrower.grow`.
    """

    requests: Sequence[Planted]
    kv: Tensor  # [2 * H_kv, S, d] of the head's block
    block_size: int
    depth: int
    width: int
    branch: int
    least: float


class Grown(NamedTuple):
    """The nodes of a tree, its root first: their tokens, parents and scores."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
