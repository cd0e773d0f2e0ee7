"""Bases of drafters with a trained head that reads the target's features.

A `FeatureDrafter` has KV of its own, and its head reads the feature of every token. A `LastFeatureDrafter`
has none, and its head reads the feature of the last token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic

import torch
from torch import Tensor

from soothsay.core.cache import KVPool
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, LevelwiseDrafter, Observation, Target
from soothsay.drafters.heads.serving import Served, ServedHead
from soothsay.drafters.trees.feature_kv import FeatureKV, LastFeatures
from soothsay.drafters.trees.growth import GrowingTree, GrownDrafter, parent_rows
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.drafters.trees.tree_shapes import TreeShape


class FeatureDrafter(LevelwiseDrafter, Generic[ServedHead]):
    """Keeps the features of committed tokens, and computes their rows when blocks need them.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        pool: the head's keys and values.
    """

    trained = True

    def __init__(self, target: Target, served: Served[ServedHead], pool: KVPool):
        self.target, self.served, self.taps = target, served, served.taps
        self.kv = FeatureKV(target, pool)

    def keep(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept of the target's features until their rows are computed, `[N, ...]` float32."""
        return self.served.fuse(taps)

    @abstractmethod
    def run(self, batch: DraftPass) -> Sequence[Tensor]:
        """Compute a pass over committed tokens, and what comes after them if roots are among them."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.kv.observe(observations, self.keep):
            self.run(batch)

    def num_known(self, request: Request, blocks: Sequence[int]) -> int:
        """The blocks that the head has read too: without a text's beginning, it hardly drafts right."""
        return self.kv.num_held(request, blocks)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        for batch in self.kv.close(request):
            self.run(batch)

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.kv.reset()

    def ready(self, request: Request) -> bool:
        """Return whether all features up to the root are known, see `Expander`."""
        return self.kv.ready(request)


class LastFeatureDrafter(Drafter, Generic[ServedHead]):
    """Keeps the feature of the token before each request's root. It has no KV.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
    """

    trained = True

    def __init__(self, target: Target, served: Served[ServedHead]):
        self.target, self.served, self.taps = target, served, served.taps
        self.head, self.shared, self.features = served.head, served.shared, LastFeatures()

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the head reads next."""
        self.features.observe(observations, self.served.fuse)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.features.release(request)

    def ready(self, request: Request) -> bool:
        """Return whether the feature before the root is known, see `Expander`."""
        return self.features.ready(request)


class StateGrownDrafter(LastFeatureDrafter[ServedHead], GrownDrafter[Tensor]):
    """Grows trees with a head that has no KV: a node's logits follow from its token and its parent's state.

    The state of a root's parent is the feature of the token before the root.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        shape: which nodes a tree gets.
    """

    def __init__(self, target: Target, served: Served[ServedHead], shape: TreeShape):
        LastFeatureDrafter.__init__(self, target, served)
        GrownDrafter.__init__(self, target, shape)

    @abstractmethod
    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the frontiers from `[M, n]` states of their parents: logits `[M, V]`, and their states."""

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, Tensor]:
        """See `Expander`."""
        return self.expand(growing, self.features.stacked([g.request for g in growing]))

    def expand_nodes(self, growing: Sequence[GrowingTree], states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Expander`."""
        return self.expand(growing, states.index_select(0, parent_rows(growing, states.device)))


def draft_ready(
    requests: Sequence[Request],
    ready: Callable[[Request], bool],
    draft: Callable[[Sequence[Request]], list[DraftTree]],
) -> list[DraftTree]:
    """Return the trees that `draft` makes for requests that are ready, and the root alone for the others."""
    trees = {request: DraftTree(int(request.tokens[-1])) for request in requests}
    if can := [request for request in requests if request.max_nodes > 1 and ready(request)]:
        trees.update(zip(can, draft(can), strict=True))
    return [*trees.values()]
