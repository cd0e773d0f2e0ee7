"""What a recurrent head drafts in one call: rows of committed tokens, and trees below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.core.request import Request
from soothsay.model.norm import Norm
from soothsay.model.rope import Rope


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
