"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Each token leaves one row in the KV pool for all heads: a latent state, and a rotated key. A head's keys and
values are linear in the latent state. So queries are brought into the latent space instead, attention runs
over the rows in the pool as one key-value head, and its output becomes a head's values last. Prompts, single
tokens and trees all run so, for equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.model.decoder.decoder_block import LayerPass
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.loaded_part import StoredWeights
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.operands import Scoring
from soothsay.model.specs.attention_spec import LatentSpec

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
    """Attention over latent states. `in_features`: as in `Attention`."""

    def __init__(self, spec: LatentSpec, hidden: int, kernels: Kernels, in_features: int | None = None):
        super().__init__()
        self.spec = c = spec
        self.kernels, self.window, heads, bias = kernels, spec.window, spec.heads, spec.bias
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

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, in] -> [N, hidden]`. First writes rows to the memory `[1, S, rank + rotated]`."""
        c, float32 = self.spec, torch.float32
        latent, key = ops.split(read := ops.apply(self.kv_a, x), [c.rank, c.rotated])
        latent = ops.cast(self._normed(ops, latent, self.kv_a_norm), float32)
        key = ops.flat(ops.rotate(ops.heads(ops.cast(key, float32), c.rotated), at.rope))
        kv = at.keys(1, c.rank + c.rotated, read)
        ops.store(ops.cat([latent, key], read.dtype), kv, at.batch.slots)
        queries = ops.heads(self._queries(ops, x), c.plain + c.rotated)
        plain, turning = ops.split_heads(queries, [c.plain, c.rotated])
        turned = ops.rotate(ops.cast(turning, float32), at.rope)
        q = ops.scale(ops.cat_heads([self.kv_b.queries(ops, plain), turned], float32), c.scale)
        out = ops.attend(q, kv, at.batch, Scoring(c.softcap, self.window))
        kept, _ = ops.split_heads(ops.heads(out, c.rank + c.rotated), [c.rank, c.rotated])
        return ops.apply(self.o, ops.flat(self.kv_b.values(ops, kept)))

    def _queries(self, ops: Kernels, x: Tensor) -> Tensor:
        """`[N, in] -> [N, H * (plain + rotated)]`."""
        if self.spec.query_rank is None:
            return ops.apply(self.q, x)
        return ops.apply(self.q_b, self._normed(ops, ops.apply(self.q_a, x), self.q_a_norm))

    @staticmethod
    def _normed(ops: Kernels, x: Tensor, norm: RMSNorm) -> Tensor:
        return ops.norm(ops.cast(x, torch.float32), norm, x.dtype)
