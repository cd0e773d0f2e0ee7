"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Each token leaves one row in the KV pool for all heads: a latent state, and a rotated key. A head's keys and
values are linear in the latent state. So queries are brought into the latent space instead, attention runs
over the rows in the pool as one key-value head, and its output becomes a head's values last. Prompts, single
tokens and trees all run so, for equal bits.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.loaded_part import StoredWeights
from soothsay.model.norm import RMSNorm
from soothsay.model.rope import rotate
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

    def queries(self, q: Tensor) -> Tensor:
        """Queries in the latent space: `[N, H, plain] -> [N, H, rank]`."""
        return torch.einsum("nhp,hpr->nhr", q.to(self.dtype), self._parts()[0])

    def values(self, x: Tensor) -> Tensor:
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

    def queries(self, q: Tensor) -> Tensor:
        """See `PerHead`."""
        return _each(self.keys, q)

    def values(self, x: Tensor) -> Tensor:
        """See `PerHead`."""
        return _each(self.valued, x)


def _each(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Run each head through its own layer: `[N, H, in] -> [N, H, out]`."""
    heads = x.transpose(0, 1).contiguous()
    return torch.stack([layer(head) for layer, head in zip(layers, heads, strict=True)], dim=1)


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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Tensor | None) -> Tensor:
        """`[N, in] -> [N, hidden]`. First writes a row of each token to `kv` `[1, S, rank + rotated]`."""
        c, rows = self.spec, len(x)
        latent, key = torch.split(self.kv_a(x), [c.rank, c.rotated], dim=-1)
        new = torch.cat([self._normed(latent, self.kv_a_norm).float(), self._rotated(key, rope)], dim=-1)
        new = new.to(latent.dtype)
        if kv is None:  # KV lives within the pass: row i in slot i
            kv = new.new_empty(1, *new.shape)
        kv.index_copy_(1, batch.slots, new[None])
        queries = self._queries(x).view(rows, -1, c.plain + c.rotated)
        plain, turning = torch.split(queries, [c.plain, c.rotated], dim=-1)
        q = torch.cat([self.kv_b.queries(plain).float(), rotate(turning.float(), *rope)], dim=-1)
        q = q * c.scale
        out = self.kernels.attend(q, kv, batch, softcap=c.softcap, window=self.window)
        values = self.kv_b.values(out.view(rows, -1, c.rank + c.rotated)[..., : c.rank])
        return cast(Tensor, self.o(values.flatten(1)))

    def _queries(self, x: Tensor) -> Tensor:
        """`[N, in] -> [N, H * (plain + rotated)]`."""
        if self.spec.query_rank is None:
            return cast(Tensor, self.q(x))
        return cast(Tensor, self.q_b(self._normed(self.q_a(x), self.q_a_norm)))

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.kernels.norm(x.float().contiguous(), norm, x.dtype)

    @staticmethod
    def _rotated(key: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(key.float()[:, None], *rope)[:, 0]
