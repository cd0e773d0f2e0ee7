"""The feed-forward part of a decoder block: dense, or a mixture of experts."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ExpertsConfig, ModelConfig
from soothsay.model.kernels import FusedExperts, Kernels
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


class Experts(nn.Module):
    """Mixture of experts (Mixtral, arXiv 2401.04088): each row runs through its best experts."""

    fused: FusedExperts | None = None
    """Does `mixed` in one call; see `soothsay.model.transformer.fuse`."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, kernels: Kernels):
        super().__init__()
        self.config, self.kernels = experts, kernels
        self.router: nn.Module = Dense.random(config.hidden_size, experts.count, bias=experts.router_bias)
        self.correction = Correction(experts.count) if experts.corrected else None
        self.experts = nn.ModuleList(FeedForward(config, experts.size, kernels) for _ in range(experts.count))
        self.shared = FeedForward(config, experts.shared_size, kernels) if experts.shared_size else None
        gated = self.shared is not None and experts.shared_gate
        self.shared_gate: nn.Module | None = Dense.random(config.hidden_size, 1) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`."""
        out = self.mixed(x) if self.fused is None else self.fused(x)
        if self.shared is None or self.shared_gate is None:
            return out
        # a whole vector of equal numbers for each row: an odd one out would be computed in another way
        gate = torch.sigmoid(cast(Tensor, self.shared_gate(x)).float().repeat(1, 32))[:, :1]
        return cast(Tensor, out + gate * self.shared(x))

    def mixed(self, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`, without a gated shared part.

        A row's experts are added in order of rank, for row-invariance.
        """
        correction = None if self.correction is None else self.correction.e_score_correction_bias
        weights, chosen = self.kernels.route(self.router(x), self.config, correction)  # [N, k]
        dtype = cast(torch.dtype, cast(FeedForward, self.experts[0]).down.dtype)
        out = x.new_zeros(*chosen.shape, x.shape[-1], dtype=dtype)  # [N, k, hidden]
        for index in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            own = x[rows] * weights[rows, rank, None] if self.config.scales_inputs else x[rows]
            out[rows, rank] = self.experts[index](own)
        if self.config.scales_inputs:
            weights = torch.ones_like(weights)
        mixed = out[:, 0] * weights[:, :1]
        for rank in range(1, self.config.chosen):
            mixed = mixed + out[:, rank] * weights[:, rank, None]
        return mixed if self.shared is None or self.shared_gate is not None else mixed + self.shared(x)


def feed_forward(config: ModelConfig, layer: int, kernels: Kernels) -> nn.Module:
    """The feed-forward part of a layer: dense, or a mixture of experts."""
    if config.experts is not None and config.is_sparse(layer):
        return Experts(config, config.experts, kernels)
    return FeedForward(config, config.intermediate_size, kernels)
