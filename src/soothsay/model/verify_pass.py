"""A pass that verifies a draft tree, for measurements of what passes cost."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.core.cache import KVPool
from soothsay.core.tree import DraftTree
from soothsay.model.transformer import Transformer

Layout = Literal["chain", "binary"]
"""The shape of a draft tree: a chain, or two children for each node."""


class VerifyPass:
    """One pass that verifies a tree of `rows` nodes after a context, as the engine runs it.

    It packs the batch and computes all layers and the logits of all rows. It does not draft, sample or move
    KV. It can be run again and again: the tree's keys and values overwrite themselves.

    Args:
        model: the model to run.
        cache: a pool of its own with at least `context + rows` slots; see `filled_cache`.
        rows: nodes of the tree, the root included.
        context: tokens before the root.
        layout: the shape of the tree.
    """

    def __init__(self, model: Transformer, cache: KVPool, rows: int, context: int, layout: Layout = "chain"):
        self.model, self.cache = model, cache
        tree = DraftTree(0)
        for node in range(1, rows):
            parent = node - 1 if layout == "chain" else (node - 1) // 2
            tree.add(parent, node % model.config.vocab_size)
        self.rows = Rows(
            tokens=np.array(tree.tokens[:1], dtype=np.int64),
            start=context,
            table=np.arange(cache.num_slots // cache.block_size),
            tree=tree,
            state=0,
        )

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """`[rows, V]` logits."""
        return self.model.run(self.model.pack([self.rows], self.cache.block_size), self.cache)[2]


def filled_cache(model: Transformer, context: int, rows: int) -> KVPool:
    """A pool for `context` tokens and `rows` after them, filled with noise.

    Memory that was never written is one page of zeros, and reading it costs nothing: times would be wrong.
    """
    size = EngineConfig.block_size
    return model.new_cache(-(-(context + rows) // size), size, nodes=rows, is_filled=True)
