"""What a decoder computes, in stock operations; `soothsay.native` has the same in C.

A model holds one such set. Both give a row the same bits whatever other rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.engine.batch import Batch
from soothsay.model.attention import attend
from soothsay.model.linear import stock_linear
from soothsay.model.quantized import Quantized
from soothsay.model.rope import rotate

if TYPE_CHECKING:
    from soothsay.model.transformer import Block

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Norm(Protocol):
    """Root mean square norm: `x / rms(x) * weight` in float32."""

    @property
    def weight(self) -> Tensor:
        """`[size]` float32."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""


Ropes = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines as `Rope` gives them, and those of local layers."""


FusedBlocks = Callable[
    [Tensor, Ropes, Batch, Sequence[Tensor] | None, Sequence[int], Collection[int], Tensor | None],
    dict[int, Tensor],
]
"""Decoder blocks in one call, with the bits that they have in several. It takes what `Blocks.forward` takes,
and then `inputs` of `Block.forward`."""


class Kernels(Protocol):
    """Linear layers, and the operations between them. N rows; tensors contiguous; residuals are float32."""

    name: str

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """`[N, size]` float32, normed, in `dtype`."""

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """`x + delta`, or `x + norm(delta)`: `[N, size]` float32."""

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """`add`, and the `norm` of its result in `dtype`."""

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rope: tuple[Tensor, Tensor],
        scale: float,
        kv: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, and put keys and values into the pool.

        Args:
            qkv: `[N, H_q + 2 * H_kv, d]`.
            norms: of queries and keys, each head by itself, before rotation.
            rope: cosines and sines, `[N, 1, d]` float32, as `Rope` gives them.
            scale: queries are multiplied by it.
            kv: `[2 * H_kv, S, d]`, in the dtype of `qkv`; written at `slots`.
            slots: `[N]` int64.

        Returns:
            `[N, H_q, d]` float32 queries.
        """

    def attend(
        self, q: Tensor, kv: Tensor, batch: Batch, *, softcap: float | None = None, window: int | None = None
    ) -> Tensor:
        """Attention of each row to its own path; see `soothsay.model.attention.attend`."""

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """`[N, 2 * size]` -> `[N, size]`: activation of the first half times the second, same dtype."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The fastest kind for a weight `[out, in]` that will not change; see `soothsay.model.linear`.

        `dtype` is what should come out; kinds for which that is the weight's own give that.
        """

    def fuse(self, blocks: Sequence[Block]) -> FusedBlocks | None:
        """All of these blocks in one call, if there is one for them. What it reads must stay where it is."""


class StockKernels:
    """PyTorch's own operations: on any device, differentiable, the reference of the others."""

    name = "stock PyTorch operations"

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps).to(dtype)

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """See `Kernels`."""
        return x + (delta if post is None else self.norm(delta.float(), post, x.dtype))

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        x = self.add(x, delta, post)
        return x, self.norm(x, norm, dtype)

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rope: tuple[Tensor, Tensor],
        scale: float,
        kv: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See `Kernels`."""
        keys = kv.shape[0] // 2
        queries = qkv.shape[1] - 2 * keys
        heads = qkv.float()
        qk, v = heads[:, : queries + keys], heads[:, queries + keys :]
        if norms is not None:
            q_norm, k_norm = norms
            normed = (
                self.norm(qk[:, :queries], q_norm, qk.dtype),
                self.norm(qk[:, queries:], k_norm, qk.dtype),
            )
            qk = torch.cat(normed, dim=1)
        qk = rotate(qk, *rope)
        new = torch.cat([qk[:, queries:], v], dim=1).transpose(0, 1)  # [2 H_kv, N, d]
        kv.index_copy_(1, slots, new.to(kv.dtype))
        return qk[:, :queries] * scale

    def attend(
        self, q: Tensor, kv: Tensor, batch: Batch, *, softcap: float | None = None, window: int | None = None
    ) -> Tensor:
        """See `Kernels`."""
        return attend(q, kv, batch, softcap=softcap, window=window)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """See `Kernels`."""
        return stock_linear(weight, bias, dtype)

    def fuse(self, blocks: Sequence[Block]) -> FusedBlocks | None:
        """See `Kernels`: there is none."""
        return None
