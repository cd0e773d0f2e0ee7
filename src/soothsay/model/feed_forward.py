"""The feed-forward part of a decoder block: dense, or a mixture of experts."""

from __future__ import annotations

from typing import cast

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


class Experts(nn.Module):
    """Mixture of experts (Mixtral, arXiv 2401.04088): each row runs through its best experts."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, kernels: Kernels):
        super().__init__()
        self.config = experts
        self.router: nn.Module = Dense.random(config.hidden_size, experts.count)
        self.experts = nn.ModuleList(FeedForward(config, experts.size, kernels) for _ in range(experts.count))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`. A row's experts are added in order of rank, for row-invariance."""
        scores: Tensor = self.router(x)
        weights, chosen = scores.float().softmax(-1).topk(self.config.chosen)  # [N, k]
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = x.new_zeros(*chosen.shape, x.shape[-1])  # [N, k, hidden]
        for index in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            out[rows, rank] = self.experts[index](x[rows]).to(out.dtype)
        return (out * weights[..., None]).sum(1)


def feed_forward(config: ModelConfig, layer: int, kernels: Kernels) -> nn.Module:
    """The feed-forward part of a layer: dense, or a mixture of experts."""
    if config.experts is not None and config.is_sparse(layer):
        return Experts(config, config.experts, kernels)
    return FeedForward(config, config.intermediate_size, kernels)
