"""Drafters with KV of their own, whose head reads the target's feature of every token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from soothsay.core.cache import KVPool
from soothsay.core.request import Request
from soothsay.drafters.base import LevelwiseDrafter, Observation, Target
from soothsay.drafters.heads.serving import Served, ServedHead
from soothsay.drafters.trees.context import DraftPass
from soothsay.drafters.trees.features import FeatureKV


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

    @abstractmethod
    def run(self, batch: DraftPass) -> Sequence[Tensor]:
        """Compute a pass over committed tokens, and what comes after them if roots are among them."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.kv.observe(observations, self.served.fuse):
            self.run(batch)

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
