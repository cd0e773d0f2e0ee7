"""Whole sequences in the one decoder: batches of them, and kernels with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.strands import Strands
from soothsay.core.transfer import upload
from soothsay.errors import TrainingError
from soothsay.model.decoder.blocks import Block
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.operands import PLAIN, Scoring
from soothsay.model.transformer import Transformer
from soothsay.model.weights.quantized import Integers, dequantized
from soothsay.train.examples import Example
from soothsay.train.losses import Likely


@dataclass(frozen=True)
class Sequences(Batch):
    """B sequences of T rows each, one after the other, padded at their ends.

    At level 0 a row attends to its sequence up to itself. Training unrolls a draft level by level. The rows
    of level l are the l-th draft tokens after some tokens of level 0, the anchors. A row of level l attends
    to level 0 up to its anchor, and to the rows of the same anchor in levels 1 to l.

    Example:
        One sequence `a b c d` with the anchors `a` and `b` (columns 0 and 1). Level 1 has the rows `b` and
        `c`, the tokens after the anchors; level 2 has the rows `c` and `d`. The row `d` attends to `a b` of
        level 0, to `c` of level 1, and to itself.
    """

    shape: tuple[int, int]  # B, T
    answer: Tensor  # [B, T] bool, the tokens to learn
    real: Tensor  # [B, T] bool, False for padding
    level: int = 0
    anchors: Tensor | None = None  # [B, T] int64 of a deeper level: the columns of its anchors in level 0

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device | str = "cpu") -> Sequences:
        """Pack `examples`, padded to the longest."""
        size = len(examples), max(len(example.tokens) for example in examples)
        tokens = torch.zeros(size, dtype=torch.int64)
        answer, real = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        for i, example in enumerate(examples):
            n = len(example.tokens)
            tokens[i, :n] = torch.from_numpy(example.tokens)
            answer[i, :n] = torch.from_numpy(example.answer)
            real[i, :n] = True
        rows, device = tokens.numel(), torch.device(device)
        tokens, answer, real = upload([tokens, answer, real], device)
        return cls(
            tokens=tokens.view(-1),
            positions=torch.arange(size[1], device=device).repeat(size[0]),
            slots=torch.arange(rows, device=device),
            logit_rows=torch.arange(rows, device=device),
            asked=(),
            paths=(),
            num_slots=rows,
            group=1,
            windows=(),
            shape=size,
            answer=answer,
            real=real,
        )

    @cached_property
    def before_answers(self) -> Tensor:
        """`[B * T]` bool: the rows before a token of an answer."""
        return F.pad(self.answer[:, 1:], (0, 1)).flatten()

    @cached_property
    def strands(self) -> Strands:
        """Layers that keep a state read them."""
        raise TrainingError("models whose layers keep states cannot be trained, nor drafters for them")

    def rows(self, columns: slice) -> Sequences:
        """Keep some columns of every sequence. Positions stay."""
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
        """Return the rows of level `level` after the anchors.

        Args:
            level: at least 1.
            anchors: `[B, n]` int64 columns of level 0.

        Returns:
            n rows a sequence. A row after the last column has the token of the last column.
        """
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


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch, and what the target computes for it."""

    batch: Sequences  # B sequences of T tokens
    features: Tensor  # [B, T, H] the inputs of the head
    teacher: Likely  # what the target expects at every token of an answer
    teacher_rows: Tensor  # [B, T] for each token of an answer, its row in `teacher`
    generator: torch.Generator  # of this step

    def learned(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Columns `[B, n]` within the sequences, and whether a token of an answer is there."""
        there = columns < self.batch.shape[1]
        columns = columns.clamp(max=self.batch.shape[1] - 1)
        return columns, at(self.batch.answer, columns) & there

    def anchors(self, share: float) -> Tensor:
        """Draw the columns after which drafts are learned, in order.

        They are a share of the columns t whose token t + 2 belongs to an answer. n is the same for all
        sequences. A sequence with fewer of these columns gets others, whose losses do not count.

        Returns:
            `[B, n]` int64.
        """
        answered = F.pad(self.batch.answer[:, 2:], (0, 1))  # the first draft token after column t is t + 2
        drawn = torch.rand(answered.shape, generator=self.generator, device=answered.device)
        count = max(1, round(share * int(answered.sum(1).max())))
        return (drawn + ~answered).argsort(1)[:, :count].sort(1).values

    def levels(self, depth: int, share: float) -> Iterator[tuple[Sequences, Tensor]]:
        """The rows of each level of drafts, and the columns `[B, n]` after which they are drafted.

        The first draft token is learned after every token, deeper ones after a `share` of them.
        """
        rows, anchors = self.batch.rows(slice(1, None)), self.anchors(share)
        b, t = rows.shape
        yield rows, torch.arange(t, device=anchors.device).expand(b, t)
        for level in range(1, depth):
            yield rows.deeper(level, anchors), anchors


class TrainingKernels(StockKernels):
    """Stock operations over `Sequences`, with gradients. A row's bits may depend on the other rows."""

    name = "stock PyTorch operations, for training"

    def write(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """See `Kernels`. They go to the last rows of `kv`; `slots` is not used."""
        own = kv[:, kv.shape[1] - k.shape[1] :]
        own[: len(k)], own[len(k) :] = k, v

    def attend(self, q: Tensor, kv: Tensor, batch: Batch, how: Scoring = PLAIN) -> Tensor:
        """See `Kernels` and `Sequences`."""
        assert isinstance(batch, Sequences)
        if how != PLAIN:
            raise TrainingError(
                "models with capped attention scores, sliding windows or sinks cannot be trained"
            )
        if len(kv) == 1:
            raise TrainingError("models with latent attention cannot be trained")
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

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`. PyTorch's own SiLU takes half of the time."""
        if activation != "silu":
            return super().gated(gate_up, activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """Return a layer with a trainable weight. See `Kernels`."""
        plain = weight if isinstance(weight, Tensor) else dequantized(weight, dtype)
        return Dense(plain.clone(), None if bias is None else bias.clone())


def at(x: Tensor, columns: Tensor) -> Tensor:
    """Pick columns of each sequence: `[B, T, ...]` and `[B, n]` -> `[B, n, ...]`."""
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


def head_weight(model: Transformer) -> Tensor:
    """The weight of an output head, `[V, H]`, whose products are logits.

    Raises `TrainingError` if the head has a bias, or the model has an encoder.
    """
    if model.spec.source is not None:
        raise TrainingError(f"models of family {model.spec.family!r} cannot be trained: they have an encoder")
    if model.spec.head.biased:
        raise TrainingError(f"models of family {model.spec.family!r} cannot be trained: the head has a bias")
    weight, scale = weight_of(model.head), model.spec.head.scale
    return weight if scale == 1.0 else weight * scale


def weight_of(linear: nn.Module) -> Tensor:
    """The weight of a linear layer, `[out, in]`."""
    return cast(Tensor, linear.weight)


def compile_blocks(module: nn.Module, backend: str = "inductor") -> None:
    """Compile the decoder blocks of `module`, for any number of rows.

    Worth it on a GPU: to launch the many small operations takes longer than to run them. On a CPU, matrix
    products take nearly all of the time, and compiling takes longer than it saves.
    """
    for block in module.modules():
        if isinstance(block, Block):
            block.compile(dynamic=True, backend=backend)


def _attend_to_levels(q: Tensor, k: Tensor, v: Tensor, own: Tensor, anchors: Tensor) -> Tensor:
    """Compute the attention of the last level's rows. T counts columns of level 0, n anchors a sequence.

    Args:
        q: `[B, H_q, n, d]` scaled.
        k: `[B, H_kv, T, d]` keys of level 0.
        v: `[B, H_kv, T, d]` values of level 0.
        own: `[2, levels, B, H_kv, n, d]` keys and values of levels 1 to the last.
        anchors: `[B, n]` the last column of level 0 that each row attends to.

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
