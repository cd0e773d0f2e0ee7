"""The part of a layer in which tokens read what came before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.convolution_layer import ConvolutionLayer
from soothsay.model.delta_layer import DeltaLayer
from soothsay.model.kernels import Kernels, Norm
from soothsay.model.latent_attention import LatentAttention
from soothsay.model.layer_pass import LayerPass
from soothsay.model.linear import Dense
from soothsay.model.norm import RMSNorm, UnitNorm
from soothsay.model.rope import QueryGrowth
from soothsay.model.state_space_layer import StateSpaceLayer


class Sinks(nn.Module):
    """The sinks of a layer's heads; see `soothsay.model.attention.attend`."""

    def __init__(self, heads: int):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(heads))  # [H_q] float32, named as in checkpoints


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v in one product.

    A layer that reads the keys and values of another one computes queries only. `in_features` is the size of
    its input rows; None: the configuration's hidden size.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.config = c = config
        self.kernels = kernels
        self.window = config.windows[layer]
        self.heads = heads = config.heads(layer)
        self.shares = config.shares_kv(layer)
        self.gates = c.num_heads if c.gated_attention else 0
        """Gates of heads, whose rows come after those of the queries."""
        own = 0 if self.shares else heads.count * (1 if heads.keys_are_values else 2)
        width = (c.num_heads + self.gates + own) * heads.size
        self.qkv: nn.Module = Dense.random(in_features or c.hidden_size, width, bias=c.qkv_bias)
        self.o: nn.Module = Dense.random(c.num_heads * heads.size, c.hidden_size, bias=c.o_bias)
        normed = (c.num_heads, heads.count) if c.qk_norm_over_heads else (1, 1)  # heads
        self.q_norm = self._norm(normed[0] * heads.size, layer)
        self.k_norm = None if self.shares else self._norm(normed[1] * heads.size, layer)
        self.v_norm = UnitNorm(heads.size, c.norm_eps) if c.value_norm and not self.shares else None
        grows = c.query_growth is not None and (c.is_unrotated(layer) or not c.query_growth.unrotated)
        self.growth = QueryGrowth(c.query_growth, c.max_positions) if c.query_growth and grows else None
        self.sinks = Sinks(c.num_heads) if c.sinks else None

    def _norm(self, size: int, layer: int) -> Norm | None:
        """The norm of queries or of keys, if there is one in this layer."""
        c = self.config
        if c.qk_norm:
            return RMSNorm(size, c.norm_eps)
        return UnitNorm(size, c.norm_eps) if c.qk_unit_norm and not c.is_unrotated(layer) else None

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. First writes its own keys and values, if any, to `at`."""
        c, heads, gates = self.config, self.heads, None
        qkv = ops.heads(ops.apply(self.qkv, x), heads.size)  # [N, H_q + gates + 2 H_kv, d]
        if self.gates:
            _, gates, _ = ops.split(qkv, [c.num_heads, self.gates, 2 * heads.count])
        if heads.keys_are_values and not self.shares:
            _, keys = ops.split(qkv, [c.num_heads, heads.count])
            qkv = ops.cat([qkv, keys], qkv.dtype)
        norms = None if self.q_norm is None else (self.q_norm, self.k_norm or self.q_norm)
        if norms is not None and c.qk_norm_over_heads:
            qkv, norms = self._normed(ops, qkv, *norms), None
        kv, own = at.keys(2 * heads.count, heads.size, qkv), 0 if self.shares else heads.count
        slots, scale = at.batch.slots, c.attention_scale
        q = ops.rotate_store(qkv, norms, at.rope, scale, kv, slots, self.v_norm, gates=self.gates, keys=own)
        if self.growth is not None:
            g = self.growth
            q = ops.grow(q, g.factors, g.span, g.shift, at.batch.positions)
        sinks = None if self.sinks is None else self.sinks.sinks
        out = ops.attend(q, kv, at.batch, softcap=c.attention_softcap, window=self.window, sinks=sinks)
        if gates is not None:
            out = ops.sigmoid_gate(out, ops.flat(gates))
        return ops.apply(self.o, out)

    def _normed(self, ops: Kernels, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """Norm all queries of a row together, and all keys: `[N, H_q + 2 H_kv, d]`."""
        c = self.config
        q, k, v = ops.split(qkv, [c.num_heads, c.num_kv_heads, c.num_kv_heads])
        parts = [
            ops.heads(ops.norm(ops.cast(ops.flat(part), torch.float32), norm, qkv.dtype), c.head_dim)
            for part, norm in ((q, q_norm), (k, k_norm))
        ]
        return ops.cat([*parts, v], qkv.dtype)


class AttentionBesideStates(Attention):
    """Attention and Mamba-2 over the same rows. Their outputs are multiplied and added (Falcon-H1, 2025)."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, in_features: int | None = None):
        super().__init__(config, layer, kernels, in_features)
        assert config.state_space is not None
        assert config.state_space.beside is not None
        self.beside = StateSpaceLayer(config, kernels, in_features)
        self.multipliers = config.state_space.beside

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]` float32. Writes keys and values, and advances the states of the pass."""
        of_states, of_keys = self.multipliers
        return ops.blend(super().forward(ops, x, at), of_keys, self.beside(ops, x, at), of_states)

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.beside.commit(states, accepted)


RecurrentLayer = DeltaLayer | ConvolutionLayer | StateSpaceLayer | AttentionBesideStates
"""A layer that keeps a state, instead of keys and values or beside them."""


def attention_of(
    config: ModelConfig, layer: int, kernels: Kernels, in_features: int | None = None
) -> Attention | LatentAttention | RecurrentLayer:
    """The part of a layer in which tokens read what came before them. `in_features`: as in `Attention`."""
    if config.is_recurrent(layer):
        kept = ConvolutionLayer if config.convolution else DeltaLayer if config.delta else StateSpaceLayer
        return kept(config, kernels, in_features)
    if config.keeps_state(layer):
        return AttentionBesideStates(config, layer, kernels, in_features)
    kind = Attention if config.latent is None else LatentAttention
    return kind(config, layer, kernels, in_features)
