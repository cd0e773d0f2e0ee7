"""Whole sequences through the one decoder: a batch of them, and kernels that can be differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.engine.batch import Batch
from soothsay.errors import TrainingError
from soothsay.model.kernels import Norm, StockKernels
from soothsay.model.linear import Dense
from soothsay.model.quantized import Quantized
from soothsay.model.rope import rotate
from soothsay.model.transformer import Block
from soothsay.train.data import Example


@dataclass(frozen=True)
class Sequences(Batch):
    """B sequences of T rows each, one behind the other, padded at their ends.

    At level 0 a row attends to the rows up to itself. A draft that is unrolled has a pass for each level l
    behind it: its rows are the l-th guesses behind some tokens, the anchors, and attend to level 0 up to the
    anchor and to what the same anchor has in the levels between.
    """

    shape: tuple[int, int]  # B, T
    answer: Tensor  # [B, T] bool, tokens that the model should say
    real: Tensor  # [B, T] bool, tokens that are no padding
    level: int = 0
    anchors: Tensor | None = None  # [B, T] of a deeper level: where its anchors stand in level 0

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device | str = "cpu") -> Sequences:
        """Lay out `examples`."""
        size = len(examples), max(len(example.tokens) for example in examples)
        tokens = torch.zeros(size, dtype=torch.int64)
        answer, real = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        for i, example in enumerate(examples):
            n = len(example.tokens)
            tokens[i, :n] = torch.from_numpy(example.tokens)
            answer[i, :n] = torch.from_numpy(example.answer)
            real[i, :n] = True
        rows = tokens.numel()
        return cls(
            tokens=tokens.view(-1).to(device),
            positions=torch.arange(size[1]).repeat(size[0]).to(device),
            slots=torch.arange(rows, device=device),
            logit_rows=torch.arange(rows, device=device),
            spans=(),
            paths=(),
            num_slots=rows,
            group=1,
            windows=(),
            shape=size,
            answer=answer.to(device),
            real=real.to(device),
        )

    def rows(self, columns: slice) -> Sequences:
        """A part of every sequence, at the positions it had."""
        b, t = self.shape
        tokens, positions = (x.view(b, t)[:, columns] for x in (self.tokens, self.positions))
        size = b, tokens.shape[1]
        slots = self.slots[: size[0] * size[1]]
        return replace(
            self,
            tokens=tokens.reshape(-1),
            positions=positions.reshape(-1),
            slots=slots,
            logit_rows=slots,
            num_slots=len(slots),
            shape=size,
            answer=self.answer[:, columns],
            real=self.real[:, columns],
        )

    def deeper(self, level: int, anchors: Tensor) -> Sequences:
        """The `level`-th guesses behind the tokens `anchors` `[B, n]`; beyond a sequence's end they have its
        last token."""
        b, t = self.shape
        tokens = at(self.tokens.view(b, t), (anchors + level).clamp(max=t - 1)).reshape(-1)
        positions = at(self.positions.view(b, t), anchors).reshape(-1) + level
        before = b * t + (level - 1) * len(tokens)
        return replace(
            self,
            tokens=tokens,
            positions=positions,
            slots=torch.arange(before, before + len(tokens), device=tokens.device),
            num_slots=before + len(tokens),
            shape=(b, anchors.shape[1]),
            level=level,
            anchors=anchors,
        )


class TrainingKernels(StockKernels):
    """Stock operations over `Sequences`, differentiable and fast; rows are not independent of each other."""

    name = "stock PyTorch operations, for training"

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rope: tuple[Tensor, Tensor],
        scale: float,
        kv: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See `Kernels`. The slots are those of the last level that `kv` has room for."""
        keys = kv.shape[0] // 2
        queries = qkv.shape[1] - 2 * keys
        qk, v = qkv[:, : queries + keys].float(), qkv[:, queries + keys :]
        if norms is not None:
            q, k = qk[:, :queries], qk[:, queries:]
            qk = torch.cat([self.norm(q, norms[0], q.dtype), self.norm(k, norms[1], k.dtype)], dim=1)
        qk = rotate(qk, *rope)
        own = kv[:, kv.shape[1] - len(qkv) :]
        own[:keys] = qk[:, queries:].transpose(0, 1)
        own[keys:] = v.transpose(0, 1)
        return qk[:, :queries] * scale

    def attend(
        self, q: Tensor, kv: Tensor, batch: Batch, *, softcap: float | None = None, window: int | None = None
    ) -> Tensor:
        """See `Kernels` and `Sequences`."""
        assert isinstance(batch, Sequences)
        if softcap is not None or window is not None:
            raise TrainingError("models with capped attention scores or sliding windows cannot be trained")
        b, t = batch.shape
        heads, d = kv.shape[0] // 2, kv.shape[2]
        q = q.to(kv.dtype).view(b, t, -1, d).transpose(1, 2)  # [B, H_q, T, d]
        rows = kv.shape[1] - batch.level * b * t  # of level 0
        k, v = kv[:, :rows].view(2, heads, b, -1, d).transpose(1, 2)  # [B, H_kv, T_0, d]
        if batch.anchors is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        else:
            own = kv[:, rows:].view(2, heads, batch.level, b, t, d).permute(0, 2, 3, 1, 4, 5)
            out = _attend_to_levels(q, k, v, own, batch.anchors)
        return out.transpose(1, 2).reshape(b * t, -1)

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The kind that trains. See `Kernels`."""
        plain = weight.dequantize() if isinstance(weight, Quantized) else weight
        return Dense(plain.clone(), None if bias is None else bias.clone())


def at(x: Tensor, columns: Tensor) -> Tensor:
    """`[B, T, ...]`, `[B, n]` -> `[B, n, ...]`: of each sequence, its own columns."""
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


def weight_of(linear: nn.Module) -> Tensor:
    """`[out, in]` of a linear layer that trains."""
    return cast(Tensor, linear.weight)


def compile_blocks(module: nn.Module, backend: str = "inductor") -> None:
    """Compile the decoder blocks of `module`, for any number of rows.

    On a GPU, launching their many small operations one by one takes longer than running them; on a CPU,
    products take nearly all of the time, and compiling would take longer than it saves.
    """
    for block in module.modules():
        if isinstance(block, Block):
            block.compile(dynamic=True, backend=backend)


def _attend_to_levels(q: Tensor, k: Tensor, v: Tensor, own: Tensor, anchors: Tensor) -> Tensor:
    """Attention of the last level's rows.

    Args:
        q: `[B, H_q, n, d]` scaled.
        k: `[B, H_kv, T, d]` keys of level 0.
        v: `[B, H_kv, T, d]` values of level 0.
        own: `[2, levels, B, H_kv, n, d]`, those of the levels behind it, the last one's included.
        anchors: `[B, n]` the last row of level 0 that each row sees.

    Returns:
        `[B, H_q, n, d]`.
    """
    group, t = q.shape[1] // k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    own_k, own_v = own.repeat_interleave(group, 3)
    hidden = torch.arange(t, device=q.device) > anchors[:, None, :, None]  # [B, 1, n, T]
    scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)  # [B, H_q, n, T]
    own_scores = (q * own_k).sum(-1).movedim(0, -1)  # [B, H_q, n, levels]
    weights = torch.cat([scores, own_scores], dim=-1).float().softmax(-1).to(v.dtype)
    out: Tensor = weights[..., :t] @ v + (weights[..., t:].movedim(-1, 0)[..., None] * own_v).sum(0)
    return out
