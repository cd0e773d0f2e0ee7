"""The part of a layer in which tokens read the keys and values of tokens before them.

Heads may add numbers to scores by the distance of a key (T5, Raffel et al. 2020, arXiv 1910.10683).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.states import LayerStates
from soothsay.model.decoder.decoder_block import LayerPass
from soothsay.model.decoder.norm import RMSNorm, UnitNorm
from soothsay.model.decoder.recurrent_layers import (
    ConvolutionLayer,
    DeltaLayer,
    SelectiveLayer,
    StateSpaceLayer,
)
from soothsay.model.decoder.rope import QueryGrowth, Rope
from soothsay.model.loaded_part import FloatPart, LoadedPart, StoredWeights
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.operands import HeadForm, Norm, Scoring
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec, RelativeSpec
from soothsay.model.specs.state_specs import BesideStatesSpec


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


class Sinks(FloatPart):
    """The sinks of a layer's heads; see `soothsay.model.ops.attention.attend`."""

    def __init__(self, heads: int):
        super().__init__(sinks="sinks")
        self.sinks = nn.Parameter(torch.zeros(heads))  # [H_q] float32, named as in checkpoints


STILL = 1 / 32768
"""Radians per position. Pairs of dimensions that turn less count as still."""


class KeyCentre(LoadedPart):
    """What keys in 8 bits are kept relative to: their bias, in pairs of dimensions that hardly turn.

    It shifts all scores of a query alike, which softmax does not see. In Qwen 2.5, biases are up to fifty
    times as large as the rest of a key, nearly all in such pairs. Without them, a row's scale fits the rest.
    """

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.register_buffer("centre", None, persistent=False)
        self.centre: Tensor | None  # [H_kv, d] float32; None: zeros

    @staticmethod
    def fit(spec: AttentionSpec) -> bool:
        """Whether keys have a bias, and scores may be shifted."""
        shifts = spec.norms is None and spec.softcap is None and not spec.sinks
        return spec.bias and shifts and spec.projections == 3

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`."""
        if weights.kv_dtype == torch.int8:
            c, rope = self.spec, Rope(self.spec.rotation)
            heads = c.heads * (1 + c.gated) + 2 * c.kv_heads
            bias = weights.tensor(name.removesuffix("centre") + "qkv", "bias", torch.empty(heads * c.size))
            keys = bias.float().view(heads, c.size)[-2 * c.kv_heads : -c.kv_heads]
            self.centre = keys * rope.scale * (rope.signed.abs() < STILL)
        return self


def _grown(growth: QueryGrowth | None, ops: Kernels, q: Tensor, at: LayerPass) -> Tensor:
    """Queries `[N, H, d]` float32, multiplied by factors of their positions if these grow."""
    if growth is None:
        return q
    return ops.grow(q, growth.factors, growth.span, growth.shift, at.batch.positions)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v in one product.

    A layer that reads the keys and values of another one computes queries only.
    """

    def __init__(self, spec: AttentionSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec = c = spec
        self.kernels, self.window = kernels, spec.window
        self.shares = spec.reads is not None
        self.gates = c.heads if c.gated else 0
        """Gates of heads, whose rows come after those of the queries."""
        own = c.kv_heads * (c.projections - 1)
        width = (c.heads + self.gates + own) * c.size
        self.qkv: nn.Module = Dense.random(in_features or hidden, width, bias=c.bias)
        self.o: nn.Module = Dense.random(c.heads * c.size, hidden, bias=c.o_bias)
        self.q_norm, self.k_norm = self._norm(c.heads), None if self.shares else self._norm(c.kv_heads)
        values = c.norms is not None and c.norms.values and not self.shares
        self.v_norm = UnitNorm(c.size, c.norms.eps) if c.norms is not None and values else None
        self.unit = UnitNorm(c.size, c.norms.eps) if c.norms is not None and c.norms.last else None
        self.growth = None if c.growth is None else QueryGrowth(c.growth)
        self.sinks = Sinks(c.heads) if c.sinks else None
        self.centre = KeyCentre(c) if KeyCentre.fit(c) else None
        self.relative = None if c.relative is None else RelativeScores(c.relative, c.heads)
        self.inner_norm = None if c.inner_eps is None else RMSNorm(c.heads * c.size, c.inner_eps)

    def _norm(self, heads: int) -> Norm | None:
        """The norm of queries or of keys, if there is one."""
        norms, size = self.spec.norms, self.spec.size
        if norms is None:
            return None
        kind = RMSNorm if norms.learned else UnitNorm
        return kind(size * heads if norms.over_heads else size, norms.eps)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. First writes its own keys and values, if any, to `at`."""
        c, gates = self.spec, None
        qkv = ops.apply(self.qkv, x)
        if c.clip is not None:
            clipped = partial(torch.clamp, min=-c.clip, max=c.clip)
            qkv = ops.cast(ops.compute(clipped, qkv.shape[1], qkv), qkv.dtype)
        qkv = ops.heads(qkv, c.size)  # [N, H_q + gates + 2 H_kv, d]
        if self.gates:
            _, gates, _ = ops.split(qkv, [c.heads, self.gates, 2 * c.kv_heads])
        if c.keys_are_values and not self.shares:
            _, keys = ops.split(qkv, [c.heads, c.kv_heads])
            qkv = ops.cat([qkv, keys], qkv.dtype)
        norms = None if self.q_norm is None else (self.q_norm, self.k_norm or self.q_norm)
        if norms is not None and c.norms is not None and c.norms.over_heads:
            qkv, norms = self._normed(ops, qkv, *norms), None
        if self.unit is not None:
            norms = self.unit, self.unit
        kv, own = at.keys(2 * c.kv_heads, c.size, qkv), 0 if self.shares else c.kv_heads
        centre = None if self.centre is None else self.centre.centre
        form = HeadForm(c.scale, norms, self.v_norm, self.gates, own, centre)
        q = ops.rotate_store(qkv, at.rope, kv, at.batch.slots, form)
        if self.unit is not None:
            q = ops.heads(ops.scale(ops.flat(q), self._both_weights()), c.size)
        q = _grown(self.growth, ops, q, at)
        sinks = None if self.sinks is None else self.sinks.sinks
        relative = None if self.relative is None else self.relative.table
        out = ops.attend(q, kv, at.batch, Scoring(c.softcap, self.window, sinks, relative))
        if gates is not None:
            out = ops.sigmoid_gate(out, ops.flat(gates))
        if self.inner_norm is not None:
            out = ops.norm(out, self.inner_norm, qkv.dtype)
        return ops.apply(self.o, out)

    def _both_weights(self) -> Tensor:
        """What queries are multiplied by in place of norms after the rotation: `[H_q * d]`.

        A rotation keeps the size of a head, so that its norm may come before. In scores, the weights of
        queries and of keys meet number by number.
        """
        assert self.q_norm is not None
        assert self.k_norm is not None
        return (self.q_norm.weight * self.k_norm.weight).repeat(self.spec.heads)

    def _normed(self, ops: Kernels, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """Norm all queries of a row together, and all keys: `[N, H_q + 2 H_kv, d]`."""
        c = self.spec
        q, k, v = ops.split(qkv, [c.heads, c.kv_heads, c.kv_heads])
        parts = [
            ops.heads(ops.norm(ops.cast(ops.flat(part), torch.float32), norm, qkv.dtype), c.size)
            for part, norm in ((q, q_norm), (k, k_norm))
        ]
        return ops.cat([*parts, v], qkv.dtype)


class AttentionBesideStates(Attention):
    """Attention and Mamba-2 over the same rows. Their outputs are multiplied and added (Falcon-H1, 2025)."""

    def __init__(self, spec: BesideStatesSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__(spec.attention, hidden, kernels, in_features)
        self.beside = StateSpaceLayer(spec.states, hidden, kernels, in_features)
        self.multipliers = spec.of_states, spec.of_attention

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]` float32. Writes keys and values, and advances the states of the pass."""
        of_states, of_keys = self.multipliers
        return ops.blend(super().forward(ops, x, at), of_keys, self.beside(ops, x, at), of_states)

    def commit(self, states: LayerStates, accepted: Accepted) -> None:
        """Advance states by accepted rows of trees, from the journal."""
        self.beside.commit(states, accepted)


RecurrentLayer = DeltaLayer | ConvolutionLayer | StateSpaceLayer | SelectiveLayer | AttentionBesideStates
"""A layer that keeps a state, instead of keys and values or beside them."""


EPS = 1e-6
"""Epsilon of the norms of latent states. The file's own holds for the other norms."""


class PerHead(Dense):
    """What makes a head's keys and values of a latent state: `[H * (plain + value), rank]`, head by head.

    Only its transposed products are needed for keys, so it is not called itself. Plain and trainable.
    """

    def __init__(self, weight: Tensor, heads: int, plain: int, kernels: Kernels):
        super().__init__(weight)
        self.heads, self.plain, self.kernels = heads, plain, kernels

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`. Row-invariant products take its place."""
        weight = weights.plain(name, self.weight)
        return PackedPerHead(weight.view(self.heads, -1, weight.shape[1]), self.plain, self.kernels)

    def _parts(self) -> tuple[Tensor, Tensor]:
        whole = self.weight.view(self.heads, -1, self.weight.shape[1])
        return whole[:, : self.plain], whole[:, self.plain :]

    def queries(self, ops: Kernels, q: Tensor) -> Tensor:
        """Queries in the latent space: `[N, H, plain] -> [N, H, rank]`."""
        return torch.einsum("nhp,hpr->nhr", q.to(self.dtype), self._parts()[0])

    def values(self, ops: Kernels, x: Tensor) -> Tensor:
        """Values of latent states: `[N, H, rank] -> [N, H, value]`."""
        return torch.einsum("nhr,hvr->nhv", x.to(self.dtype), self._parts()[1])


class PackedPerHead(nn.Module):
    """A loaded `PerHead`: a row-invariant layer for the keys of each head, and one for its values."""

    def __init__(self, weight: Tensor, plain: int, kernels: Kernels):
        super().__init__()

        def layers(weights: Tensor) -> nn.ModuleList:  # [H, out, in]
            each = (kernels.linear(own.contiguous(), None, torch.float32) for own in weights)
            return nn.ModuleList(each)

        self.keys = layers(weight[:, :plain].transpose(1, 2))
        self.valued = layers(weight[:, plain:])

    def queries(self, ops: Kernels, q: Tensor) -> Tensor:
        """See `PerHead`."""
        return ops.apply_heads(self.keys, q)

    def values(self, ops: Kernels, x: Tensor) -> Tensor:
        """See `PerHead`."""
        return ops.apply_heads(self.valued, x)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). `in_features`: as in `Attention`.

    Each token leaves one row in the KV pool for all heads: a latent state, and a rotated key. A head's keys
    and values are linear in the latent state. So queries are brought into the latent space instead, attention
    runs over the rows in the pool as one key-value head, and its output becomes a head's values last.
    Prompts, single tokens and trees all run so, for equal bits.
    """

    def __init__(self, spec: LatentSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec = c = spec
        self.kernels, heads, bias = kernels, spec.heads, spec.bias
        size, queries = in_features or hidden, heads * (c.plain + c.rotated)
        if c.query_rank is None:
            self.q: nn.Module = Dense.random(size, queries)
        else:
            self.q_a: nn.Module = Dense.random(size, c.query_rank, bias=bias)
            self.q_a_norm = RMSNorm(c.query_rank, EPS)
            self.q_b: nn.Module = Dense.random(c.query_rank, queries)
        self.kv_a: nn.Module = Dense.random(size, c.rank + c.rotated, bias=bias)
        self.kv_a_norm = RMSNorm(c.rank, EPS)
        self.kv_b: PerHead | PackedPerHead = PerHead(
            Dense.random(c.rank, heads * (c.plain + c.value)).weight.data, heads, c.plain, kernels
        )
        self.o: nn.Module = Dense.random(heads * c.value, hidden, bias=c.o_bias)
        self.growth = None if c.growth is None else QueryGrowth(c.growth)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. First writes rows to the memory `[1, S, rank + rotated]`."""
        c, float32 = self.spec, torch.float32
        latent, key = ops.split(read := ops.apply(self.kv_a, x), [c.rank, c.rotated])
        latent = ops.cast(self._normed(ops, latent, self.kv_a_norm), float32)
        key = ops.flat(ops.rotate(ops.heads(ops.cast(key, float32), c.rotated), at.rope))
        kv = at.keys(1, c.rank + c.rotated, read)
        ops.store(ops.cat([latent, key], read.dtype), kv, at.batch.slots)
        queries = ops.heads(self._queries(ops, x), c.plain + c.rotated)
        plain, turning = ops.split(queries, [c.plain, c.rotated], 2)
        turned = ops.rotate(ops.cast(turning, float32), at.rope)
        q = ops.scale(ops.cat([self.kv_b.queries(ops, plain), turned], float32, 2), c.scale)
        q = _grown(self.growth, ops, q, at)
        out = ops.attend(q, kv, at.batch, Scoring(c.softcap, c.window))
        kept, _ = ops.split(ops.heads(out, c.rank + c.rotated), [c.rank, c.rotated], 2)
        return ops.apply(self.o, ops.flat(self.kv_b.values(ops, kept)))

    def _queries(self, ops: Kernels, x: Tensor) -> Tensor:
        """`[N, in] -> [N, H * (plain + rotated)]`."""
        if self.spec.query_rank is None:
            return ops.apply(self.q, x)
        return ops.apply(self.q_b, self._normed(ops, ops.apply(self.q_a, x), self.q_a_norm))

    @staticmethod
    def _normed(ops: Kernels, x: Tensor, norm: RMSNorm) -> Tensor:
        return ops.norm(ops.cast(x, torch.float32), norm, x.dtype)
