"""Numbers that heads add to scores by the distance of a key (T5, Raffel et al. 2020, arXiv 1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from soothsay.model.loaded_part import LoadedPart, StoredWeights
from soothsay.model.specs.attention_spec import RelativeSpec


class RelativeScores(LoadedPart):
    """A layer's numbers, as `Scoring.relative` has them.

    Buckets of distances are found once, when weights are loaded: a pass only looks numbers up.
    """

    def __init__(self, spec: RelativeSpec, heads: int):
        super().__init__()
        self.spec = spec
        self.table = nn.Parameter(torch.zeros(heads, 2 * spec.most + 1))  # [H, distances] float32

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`."""
        stored = weights.tensor(name, "weight", torch.empty(self.spec.buckets, len(self.table)))
        self.table = nn.Parameter(stored.float()[buckets(self.spec)].t().contiguous())
        return self


def buckets(spec: RelativeSpec) -> Tensor:
    """`[2 * most + 1]` int64: the buckets of keys that are `most` before the row, ..., `most` after it."""
    distances = torch.arange(-spec.most, spec.most + 1)
    count = spec.buckets // 2 if spec.both_ways else spec.buckets
    after = torch.where(distances > 0, count, 0) if spec.both_ways else torch.zeros_like(distances)
    size = distances.abs() if spec.both_ways else -distances.clamp(max=0)
    exact = count // 2
    grown = torch.log(size.clamp(min=1).float() / exact) / math.log(spec.most / exact) * (count - exact)
    return after + torch.where(size < exact, size, (exact + grown.long()).clamp(max=count - 1))
