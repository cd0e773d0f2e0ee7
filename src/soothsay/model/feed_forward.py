"""The feed-forward part of a decoder block: dense, or a mixture of experts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ExpertsConfig, ModelConfig
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense


class FeedForward(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv 2002.05202); gate and up in one product."""

    def __init__(self, config: ModelConfig, size: int, kernels: Kernels):
        super().__init__()
        self.gate_up: nn.Module = Dense.random(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down: nn.Module = Dense.random(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = config.activation
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`."""
        return cast(Tensor, self.down(self.kernels.gated(self.gate_up(x), self.activation)))


class Correction(nn.Module):
    """What is added to the experts' weights for their choice alone (DeepSeek-V3, arXiv 2412.19437)."""

    def __init__(self, count: int):
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.zeros(count))  # [experts], named as in checkpoints


def route(scores: Tensor, c: ExpertsConfig, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row.

    Args:
        scores: `[N, experts]`, the router's outputs.
        c: how to choose.
        correction: `[experts]` float32, added for the choice alone; None: nothing is.

    Returns:
        Weights `[N, chosen]` float32, and numbers `[N, chosen]` int64 of the experts, the best first.
    """
    scores = scores.float()
    weights = _sigmoid(scores) if c.sigmoid else scores.softmax(-1)
    worth = weights if correction is None else weights + correction
    if c.groups > 1:  # a group is worth as much as its best experts
        groups = worth.view(len(worth), c.groups, -1)
        best = groups.topk(c.group_best).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _best(best, c.groups_chosen), True)
        worth = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = _best(worth, c.chosen)
    weights = weights.gather(1, chosen)
    if c.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * c.scale, chosen


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, as the softmax of a number and 0: torch's own has other bits at the end of a tensor."""
    return torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0]


def _best(x: Tensor, count: int) -> Tensor:
    """Places of the largest numbers of each row, the first of equal ones: `[N, count]`."""
    return x.argsort(dim=-1, descending=True, stable=True)[:, :count]


class Experts(nn.Module):
    """Mixture of experts (Mixtral, arXiv 2401.04088): each row runs through its best experts."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, kernels: Kernels):
        super().__init__()
        self.config = experts
        self.router: nn.Module = Dense.random(config.hidden_size, experts.count)
        self.correction = Correction(experts.count) if experts.corrected else None
        self.experts = nn.ModuleList(FeedForward(config, experts.size, kernels) for _ in range(experts.count))
        self.shared = FeedForward(config, experts.shared_size, kernels) if experts.shared_size else None

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`. A row's experts are added in order of rank, for row-invariance."""
        correction = None if self.correction is None else self.correction.e_score_correction_bias
        weights, chosen = route(self.router(x), self.config, correction)  # [N, k]
        out = x.new_zeros(*chosen.shape, x.shape[-1])  # [N, k, hidden]
        for index in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            out[rows, rank] = self.experts[index](x[rows]).to(out.dtype)
        mixed = (out * weights[..., None]).sum(1)
        return mixed if self.shared is None else mixed + self.shared(x)


def feed_forward(config: ModelConfig, layer: int, kernels: Kernels) -> nn.Module:
    """The feed-forward part of a layer: dense, or a mixture of experts."""
    if config.experts is not None and config.is_sparse(layer):
        return Experts(config, config.experts, kernels)
    return FeedForward(config, config.intermediate_size, kernels)
