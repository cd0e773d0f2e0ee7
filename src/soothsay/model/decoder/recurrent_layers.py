"""Layers that keep a state instead of keys and values, in place of attention or beside it.

- The gated delta rule: Qwen3-Next and Qwen3.5, and with more decays Kimi Linear.
- Mamba-2: Granite 4, and Falcon-H1 beside attention. Mamba: Jamba and Falcon-Mamba.
- A short convolution: LFM2 (2025). Three products of a row are the gates b and c and an input x. The
  convolution runs over `b x` of the last tokens, channel by channel, and c opens its output. A state is the
  last inputs of the convolution.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.decoder_block import LayerPass
from soothsay.model.decoder.norm import Multipliers, RMSNorm, UnitNorm
from soothsay.model.loaded_part import FloatPart
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.operands import Norm
from soothsay.model.ops.state_ops import Recurrence, SelectiveScan, StateSpace, TokenRule
from soothsay.model.specs.state_specs import (
    ConvolutionSpec,
    DeltaSpec,
    KimiDeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)


class RuleLayer(nn.Module):
    """A layer whose states change by a rule for each token."""

    kernels: Kernels
    rule: TokenRule

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        rows, gates = states.journal[accepted.rows], states.gates[accepted.rows]
        self.kernels.token_rule(rows, gates, self.rule, states, accepted.strands)


class DeltaLayer(RuleLayer):
    """The gated delta rule between two products. See `soothsay.model.ops.state_ops`."""

    def __init__(self, spec: DeltaSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels = spec, kernels
        self.rule = Recurrence(spec)
        self.o: nn.Module = Dense.random(spec.values, hidden)
        self._add_products(in_features or hidden)

    def _add_products(self, size: int) -> None:
        c = self.spec
        self.qkvz: nn.Module = Dense.random(size, c.channels + c.values)
        self.gates: nn.Module = Dense.random(size, 2 * c.value_heads)

    def _products(self, ops: Kernels, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and gates of the rule."""
        return ops.apply(self.qkvz, x), ops.apply(self.gates, x)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        rows, gates = self._products(ops, x)
        out = ops.token_rule(rows, gates, self.rule, at.states, at.batch.strands)
        return ops.apply(self.o, out)


class KimiDeltaLayer(DeltaLayer):
    """Kimi Delta Attention: decays and the gates of outputs are products of products."""

    spec: KimiDeltaSpec

    def _add_products(self, size: int) -> None:
        c = self.spec
        self.qkv: nn.Module = Dense.random(size, c.channels)
        self.low: nn.Module = Dense.random(size, 2 * c.rank + c.value_heads)
        """What decays are made of, what gates of outputs are made of, and the gates that change a state."""
        self.decays: nn.Module = Dense.random(c.rank, c.keys)
        self.z: nn.Module = Dense.random(c.rank, c.values)

    def _products(self, ops: Kernels, x: Tensor) -> tuple[Tensor, Tensor]:
        c, qkv, low = self.spec, ops.apply(self.qkv, x), ops.apply(self.low, x)
        decays, z, b = ops.split(low, [c.rank, c.rank, c.value_heads])
        rows = ops.cat([qkv, ops.apply(self.z, z)], qkv.dtype)
        return rows, ops.cat([b, ops.apply(self.decays, decays)], low.dtype)


class StateSpaceLayer(RuleLayer):
    """Mamba-2 between two products. See `soothsay.model.ops.state_ops`."""

    def __init__(self, spec: StateSpaceSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels, c = spec, kernels, spec
        self.sizes = [c.size, c.channels, c.heads]
        self.zxbct: nn.Module = Dense.random(in_features or hidden, sum(self.sizes))
        """Gates of outputs, then inputs of the convolution, then steps."""
        self.multipliers = Multipliers(c.multipliers, c.parts) if c.multipliers else None
        self.rule = StateSpace(c)
        self.o: nn.Module = Dense.random(c.size, hidden)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        zxbct = ops.apply(self.zxbct, x)
        if self.multipliers is not None:
            zxbct = ops.scale(zxbct, self.multipliers.row)
        z, xbc, steps = ops.split(zxbct, self.sizes)
        rows = ops.cat([xbc, z], zxbct.dtype)
        return ops.apply(self.o, ops.token_rule(rows, steps, self.rule, at.states, at.batch.strands))


class SelectiveLayer(RuleLayer):
    """Mamba: what changes a state is a product of what the convolution gives."""

    rule: SelectiveScan

    def __init__(self, spec: SelectiveSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels, c = spec, kernels, spec
        self.xz: nn.Module = Dense.random(in_features or hidden, 2 * c.size)
        self.sizes = [c.rank, c.state_size, c.state_size]
        self.inner: nn.Module = Dense.random(c.size, sum(self.sizes))
        """What steps are made of, B and C."""
        self.steps: nn.Module = Dense.random(c.rank, c.size)
        self.rule = SelectiveScan(c)
        self.o: nn.Module = Dense.random(c.size, hidden)
        norm, eps = RMSNorm if c.learned else UnitNorm, c.norm_eps
        norms = [] if eps is None else [norm(size, eps) for size in self.sizes]
        self.norms = nn.ModuleList(norms)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        xz, strands = ops.apply(self.xz, x), at.batch.strands
        inputs, _ = ops.split(xz, [self.spec.size] * 2)
        inner = ops.apply(self.inner, ops.convolved(inputs, self.rule, at.states, strands))
        parts, dtype = ops.split(inner, self.sizes), inner.dtype
        if self.norms:
            norms = cast(Iterable[Norm], self.norms)
            floats = [ops.cast(part, torch.float32) for part in parts]
            parts = [ops.norm(part, norm, dtype) for part, norm in zip(floats, norms, strict=True)]
        steps, b, c = parts
        gates = ops.cat([ops.apply(self.steps, steps), b, c], dtype)
        return ops.apply(self.o, ops.token_rule(xz, gates, self.rule, at.states, strands))


class Taps(FloatPart):
    """The weights of a convolution, random ones at first. Float32."""

    def __init__(self, spec: ConvolutionSpec):
        super().__init__("weight", weight="weight")
        taps = torch.empty(spec.taps, spec.channels)
        self.weight = nn.Parameter(taps if taps.is_meta else taps.normal_(std=spec.taps**-0.5))
        """`[taps, channels]`, the token's own last."""


class ConvolutionLayer(nn.Module):
    """A convolution over the last tokens, between two gates and two products."""

    def __init__(self, spec: ConvolutionSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec, self.kernels = spec, kernels
        self.bcx: nn.Module = Dense.random(in_features or hidden, 3 * spec.channels)
        self.taps = Taps(spec)
        self.o: nn.Module = Dense.random(spec.channels, hidden)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. Advances the states of the pass by the rows of committed tokens."""
        bcx, taps = ops.apply(self.bcx, x), self.taps.weight
        return ops.apply(self.o, ops.gated_convolve(bcx, taps, at.states, at.batch.strands))

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.kernels.convolve(states.journal[accepted.rows], self.taps.weight, states, accepted.strands)
