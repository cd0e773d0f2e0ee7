"""Drafters whose head continues from its own output, token by token: EAGLE, EAGLE-2, EAGLE-3, MTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool
from soothsay.core.params import MIN_TEMPERATURE
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import FeatureDrafter, Served, draft_ready, load_head
from soothsay.drafters.heads.trained_head import Head, RecurrentHead
from soothsay.drafters.ops.draft_ops import DraftBatch, DraftInput, RecurrentDrafts
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree, GrownDrafter, TreeShape, parent_rows
from soothsay.drafters.trees.guesses import SHARPNESS
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.model.ops.kernels import Outputs as PassOutputs
from soothsay.model.ops.kernels import StockKernels

Outputs = tuple[Tensor, ...]
"""`[M, H]` outputs of a head's modules, of M rows. The logits come from the first; rows below read the rest,
or the first if it is the only one."""


class RecurrentDrafter(FeatureDrafter[RecurrentHead], GrownDrafter[Outputs]):
    """Grows trees with a recurrent head. It has KV of its own, and reads the target's features.

    The row of a committed token reads the target's feature of the token before. The row of a node reads the
    head's output at its parent. A subclass whose head has several modules redefines `run` and
    `run_nodes`.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        shape: which nodes a tree gets.
    """

    def __init__(self, target: Target, served: Served[RecurrentHead], shape: TreeShape):
        block, kernels = served.head.config.block, target.model.kernels
        FeatureDrafter.__init__(self, target, served, block)
        GrownDrafter.__init__(self, target, shape)
        self.modules = [_Module(served, number) for number in range(block.num_layers)]
        self.kernels = kernels if kernels.fit(block) else StockKernels()

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, Outputs]:
        """Compute committed tokens up to the roots, see `Expander`."""
        found: dict[Request, list[Tensor]] = {}
        for batch in self.kv.catch_up({g.request: g.expanded for g in growing}):
            for request, *rows in zip(batch.ends, *self.run(batch), strict=True):
                found[request] = rows
        modules = zip(*(found[g.request] for g in growing), strict=True)
        outputs = tuple(torch.stack(rows) for rows in modules)
        return self._logits(outputs), outputs

    def expand_nodes(self, growing: Sequence[GrowingTree], states: Outputs) -> tuple[Tensor, Outputs]:
        """Compute the frontiers; the states are the outputs of the last level. See `Expander`."""
        parents = parent_rows(growing, states[0].device)
        read = tuple(output.index_select(0, parents) for output in states)
        packed = self.pack([g.frontier_rows(self.kv.states[g.request].first_key) for g in growing])
        outputs = tuple(packed.select_logit_rows(out) for out in self.run_nodes(packed, read))
        return self._logits(outputs), outputs

    def run(self, batch: DraftPass) -> Outputs:
        """Compute a pass over committed tokens. Return the outputs of its logit rows, of every module."""
        packed = self.pack(batch.rows)
        out = self.run_module(packed, self.fused(torch.cat(batch.features)))
        return (packed.select_logit_rows(out),)

    def fused(self, kept: Tensor) -> Tensor:
        """What rows read of the features that `keep` has kept."""
        return kept

    def run_nodes(self, packed: Batch, read: Outputs) -> Outputs:
        """Compute a pass over nodes, which read the outputs of their parents.

        Returns `[N, H]` outputs of the module whose predictions come next, and of those after it.
        """
        return (self.run_module(packed, read[0]),)

    def run_module(self, packed: Batch, features: Tensor, module: int = 0) -> Tensor:
        """Compute a pass of one module: `[N, H]` features -> `[N, H]` outputs."""
        whole = packed.reading(features)
        return self.kernels.run_pass(self.modules[module], whole, self.kv.pool, None, ())[0]

    def _logits(self, outputs: Outputs) -> Tensor:
        return self.head.logits(outputs[0], self.shared)


@dataclass(frozen=True)
class _Module:
    """A module of a head as a `PassModel`, so that kernels may repeat a recorded pass of it."""

    served: Served[RecurrentHead]
    number: int

    def compute(
        self, batch: Batch, cache: KVPool | None, layers: Sequence[int] | None, taps: Sequence[int]
    ) -> PassOutputs:
        """See `PassModel`. The outputs take the place of logits."""
        assert batch.inputs is not None
        assert cache is not None
        embedded = self.served.head.embed(batch.tokens, self.served.shared)
        kv = cache.kv(self.number)
        out: Tensor = self.served.head(embedded, batch.inputs, batch, kv, self.number)
        return out, (), batch.select_logit_rows(out)


class ConfidentDrafter(RecurrentDrafter):
    """A recurrent head with EAGLE-2's tree: the likeliest nodes of each level get children.

    A subclass says by `method` and `kind` whose heads it drafts with.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: the method's, as `find_head` looks for it.
        depth: levels of the tree.
        width: nodes of each level that get children; None: as many as the largest tree has room for.
        branch: children of each of these nodes; None: one more than `width`.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    method: ClassVar[str]
    """Its name in the registry."""

    kind: ClassVar[type[RecurrentHead]]

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        depth: int = 8,
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        self.shape = ConfidentShape.within(self.method, target, depth, width, branch)
        super().__init__(target, load_head(self.kind, model, target, dtype), self.shape)
        whole = self.served.view is None
        self.at_once = self.head.drafts_at_once(self.shared, target.ops) if whole else None

    def keep(self, taps: Sequence[Tensor]) -> Tensor:
        """See `FeatureDrafter`. A draft in one call fuses features itself."""
        return super().keep(taps) if self.at_once is None else torch.cat(list(taps), -1)

    def fused(self, kept: Tensor) -> Tensor:
        """See `RecurrentDrafter`."""
        return kept if self.at_once is None else self.served.fuse(kept.chunk(len(self.taps), -1))

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow a tree for each request that is ready; the others get the root alone."""
        if self.at_once is None:
            return super().propose(requests)
        own = [request for request in requests if _is_plain(request)]
        trees = dict(zip(own, draft_ready(own, self.ready, partial(self._draft, self.at_once)), strict=True))
        if others := [request for request in requests if request not in trees]:
            trees.update(zip(others, super().propose(others), strict=True))
        return [trees[request] for request in requests]

    def _draft(self, at_once: RecurrentDrafts, ready: Sequence[Request]) -> list[DraftTree]:
        """Trees of requests whose parameters change logits by temperature and truncation alone."""
        trees = {request: DraftTree(request.last_token) for request in ready}
        shape, pool = self.shape, self.kv.pool
        for batch in self.kv.catch_up(trees):
            own = zip(batch.requests, batch.rows, batch.features, strict=True)
            inputs = [_draft_input(*one) for one in own]
            numbers = shape.depth, shape.width, shape.branch, self.min_level_gain
            draft_batch = DraftBatch(inputs, cast(Tensor, pool.layers[0]), pool.block_size, *numbers)
            for request, out in zip(batch.requests, at_once(draft_batch), strict=True):
                if out is not None:
                    trees[request].append_nodes(out.tokens[1:], out.parents[1:], out.scores[1:])
        return [trees[request] for request in ready]


def _is_plain(request: Request) -> bool:
    """Whether drafting in one call knows all that the request wants."""
    params = request.params
    return request.constraint is None and not params.changes_logits and not params.rule.guessing.draws


def _draft_input(request: Request, rows: Rows, features: Tensor) -> DraftInput:
    temperature = request.params.temperature
    factor = 1 / max(temperature, MIN_TEMPERATURE) if temperature > 0 else SHARPNESS
    return DraftInput(request, rows, features, 0 if rows.tree is None else request.max_nodes, factor)
