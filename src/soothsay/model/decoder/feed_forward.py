"""The feed-forward part of a decoder block: dense, or a mixture of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import NormalDist
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.functions import xielu
from soothsay.model.decoder.norm import Multipliers, RMSNorm, Vector
from soothsay.model.loaded_part import FloatPart
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.feed_forward_spec import XIELU, DenseAndExpertsSpec, DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import NormSpec


class DensePart(nn.Module, ABC):
    """A feed-forward layer of two products, with an activation between them."""

    activation: str
    down: nn.Module

    @property
    @abstractmethod
    def first(self) -> nn.Module:
        """The first product, whose outputs `Kernels.gated` takes."""


class FeedForward(DensePart):
    """Gated feed-forward layer (Shazeer 2020, arXiv 2002.05202); gate and up in one product.

    With a sparsity, about this share of gates becomes zero, and the others are lessened (Gemma 3n).
    """

    def __init__(self, spec: DenseSpec, hidden: int, kernels: Kernels):
        super().__init__()
        size = spec.size
        self.cutoff = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        """Standard deviations above the mean up to which gates become zero."""
        self.gate_up: nn.Module = Dense.random(hidden, 2 * size, bias=spec.bias)
        self.down: nn.Module = Dense.random(size, hidden, bias=spec.bias)
        factors = spec.multipliers  # that of outputs multiplies what they are products of
        self.multipliers = None if factors is None else Multipliers(factors, (size, size))
        self.inner_norm = None if spec.inner_eps is None else RMSNorm(size, spec.inner_eps)
        self.activation = spec.activation
        self.kernels = kernels

    @property
    def first(self) -> nn.Module:
        """See `DensePart`."""
        return self.gate_up

    def forward(self, ops: Kernels, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`."""
        gate_up = ops.apply(self.gate_up, x)
        if self.multipliers is not None:
            gate_up = ops.scale(gate_up, self.multipliers.row)
        if self.cutoff is not None:
            dtype = gate_up.dtype
            gate_up = ops.cast(ops.compute(self._sparse, gate_up.shape[1], gate_up), dtype)
        inner = ops.gated(gate_up, self.activation)
        if self.inner_norm is not None:
            inner = ops.norm(ops.cast(inner, torch.float32), self.inner_norm, inner.dtype)
        return ops.apply(self.down, inner)

    def _sparse(self, gate_up: Tensor) -> Tensor:
        """Gates below the cutoff become zero, and the others are lessened by it: `[N, 2 * size]` float32."""
        assert self.cutoff is not None
        gate, up = gate_up.chunk(2, dim=-1)
        mean, deviation = moments(gate.float())
        gate = F.relu(gate.float() - (mean + deviation * self.cutoff)).to(up.dtype)
        return torch.cat([gate, up], -1).float()


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each row: `[N, size]` to `[N, 1]` each, float32.

    By the parts of a layer norm, whose bits do not depend on the number of rows.
    """
    _, mean, inverse = torch.native_layer_norm(x.contiguous(), x.shape[1:], None, None, 1e-30)
    return mean, 1 / inverse


class Xielu(FloatPart):
    """An activation whose four numbers are learned; see `soothsay.core.functions.xielu`."""

    def __init__(self) -> None:
        super().__init__(alpha_p="alpha_p", alpha_n="alpha_n", beta="beta", eps="eps")
        self.alpha_p, self.alpha_n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.beta, self.eps = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, size]` to the same in float32."""
        return xielu(x.float(), self.alpha_p, self.alpha_n, self.beta, self.eps)


class UngatedFeedForward(DensePart):
    """Feed-forward layer without a gate (Vaswani et al. 2017, arXiv 1706.03762)."""

    def __init__(self, spec: DenseSpec, hidden: int, kernels: Kernels):
        super().__init__()
        size = spec.size
        self.up: nn.Module = Dense.random(hidden, size, bias=spec.bias)
        self.down: nn.Module = Dense.random(size, hidden, bias=spec.bias)
        self.activation, self.kernels = spec.activation, kernels
        self.learned = Xielu() if spec.activation == XIELU else None

    @property
    def first(self) -> nn.Module:
        """See `DensePart`."""
        return self.up

    def forward(self, ops: Kernels, x: Tensor) -> Tensor:
        """`[N, hidden] -> [N, hidden]`."""
        up = ops.apply(self.up, x)
        if self.learned is None:
            return ops.apply(self.down, ops.gated(up, self.activation))
        return ops.apply(self.down, ops.cast(ops.compute(self.learned, up.shape[1], up), up.dtype))


def dense(spec: DenseSpec, hidden: int, kernels: Kernels) -> DensePart:
    """A feed-forward layer, with a gate or without."""
    kind = FeedForward if spec.gated else UngatedFeedForward
    return kind(spec, hidden, kernels)


def part_dtype(part: nn.Module) -> torch.dtype:
    """Element type of the outputs of a dense part, or of a mixture's experts."""
    one = part.experts[0] if isinstance(part, Experts) else part
    return cast(torch.dtype, cast(DensePart, one).down.dtype)


class Experts(nn.Module):
    """Mixture of experts (Mixtral, arXiv 2401.04088): each row runs through its best experts."""

    def __init__(self, spec: ExpertsSpec, hidden: int, kernels: Kernels):
        super().__init__()
        self.spec, self.kernels, count = spec, kernels, spec.routing.count
        self.ran = torch.zeros(1, dtype=torch.int64, device="cpu")
        """Number of experts that had rows in the last pass. Kernels write it, so it stays on the CPU."""
        self.scales = Vector("per_expert_scale", count) if spec.scaled else None
        self.router: nn.Module = Dense.random(hidden, count, bias=spec.router_bias)
        self.correction = None if spec.correction is None else Vector(spec.correction, count)
        latent, shared = spec.latent_size, spec.shared
        self.experts = nn.ModuleList(dense(spec.expert, latent or hidden, kernels) for _ in range(count))
        self.latent_in: nn.Module | None = None if latent is None else Dense.random(hidden, latent)
        self.latent_out: nn.Module | None = None if latent is None else Dense.random(latent, hidden)
        self.shared = None if shared is None else dense(shared, hidden, kernels)
        gated = shared is not None and spec.shared_gate
        self.shared_gate: nn.Module | None = Dense.random(hidden, 1) if gated else None

    def forward(self, ops: Kernels, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """`[N, hidden] -> [N, hidden]` float32. The router reads `routed` `[N, hidden]`; None: `x`."""
        routed = x if routed is None and self.latent_in is not None else routed
        scores = None if routed is None else ops.apply(self.router, routed)
        out = ops.mix(self, x if self.latent_in is None else ops.apply(self.latent_in, x), scores)
        if self.latent_out is not None:
            out = ops.cast(ops.apply(self.latent_out, out), torch.float32)
        if self.shared is None or self.mixes_shared:
            return out
        shared = self.shared(ops, x)
        if self.shared_gate is None:
            return ops.add(out, shared, None)
        return ops.add_gated(out, ops.apply(self.shared_gate, x), shared)

    @property
    def mixes_shared(self) -> bool:
        """Whether the shared part reads what the experts read, and is added as it is: `mixed` does it."""
        return self.shared is not None and self.shared_gate is None and self.latent_in is None

    def mixed(self, x: Tensor, scores: Tensor | None = None) -> Tensor:
        """`[N, in] -> [N, in]` float32, `in` being `latent_size` if there is one.

        A row's experts are added in order of rank, for row-invariance.
        """
        scores = self.router(x) if scores is None else scores
        correction, scales = (None if v is None else v.value for v in (self.correction, self.scales))
        weights, chosen = self.kernels.route(scores, self.spec.routing, correction, scales)  # [N, k]
        out = x.new_zeros(*chosen.shape, x.shape[-1], dtype=part_dtype(self))  # [N, k, in]
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        self.ran.fill_(sum(count > 0 for count in counts))
        own_places = torch.split(flat.argsort(stable=True), counts)  # those of each expert, in order
        for expert, places in zip(self.experts, own_places, strict=True):
            if len(places):
                rows, ranks = places // chosen.shape[1], places % chosen.shape[1]
                own = x[rows] * weights[rows, ranks, None] if self.spec.routing.scales_inputs else x[rows]
                out[rows, ranks] = expert(self.kernels, own)
        if self.spec.routing.scales_inputs:
            weights = torch.ones_like(weights)
        mixed = out[:, 0] * weights[:, :1]
        for rank in range(1, self.spec.routing.chosen):
            mixed = mixed + out[:, rank] * weights[:, rank, None]
        return mixed + cast(nn.Module, self.shared)(self.kernels, x) if self.mixes_shared else mixed


class DenseAndExperts(nn.Module):
    """A dense part beside a mixture of experts (Gemma 4).

    Both and the router read the residual stream, each by its own norm. Both outputs are normed as well.
    """

    def __init__(self, spec: DenseAndExpertsSpec, hidden: int, norm: NormSpec, kernels: Kernels):
        super().__init__()

        def own() -> RMSNorm:
            return RMSNorm(hidden, norm.eps)

        self.kernels = kernels
        self.dense = FeedForward(spec.dense, hidden, kernels)
        self.mixture = Experts(spec.experts, hidden, kernels)
        self.dense_norm, self.dense_post_norm = own(), own()
        self.experts_norm, self.experts_post_norm = own(), own()
        # published models multiply the router's inputs by 1 / sqrt(hidden)
        self.router_norm = RMSNorm(hidden, norm.eps, stored_as="scale", factor=hidden**-0.5)

    def forward(self, ops: Kernels, x: Tensor) -> Tensor:
        """`[N, hidden]` float32, the residual stream -> `[N, hidden]` float32."""
        dtype = cast(torch.dtype, self.dense.down.dtype)
        dense = self.dense(ops, ops.norm(x, self.dense_norm, dtype))
        routed = ops.norm(x, self.router_norm, dtype)
        mixed = self.mixture(ops, ops.norm(x, self.experts_norm, dtype), routed)
        dense = ops.norm(ops.cast(dense, torch.float32), self.dense_post_norm, torch.float32)
        return ops.add(dense, mixed, self.experts_post_norm)
