"""What all kinds of decoder layers have in common: the residual stream, and what they read beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.cache import KVAndStates, LayerMemory
from soothsay.core.states import LayerStates
from soothsay.model.ops.kernels import BlocksPass, Kernels, RecordedBlocks
from soothsay.model.ops.operands import Rotation


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Where the rows of a pass stand, and the memory of one layer."""

    batch: Batch
    rope: Rotation
    kv: Tensor | None = None
    """`[heads, S, row]`, keys and values; None: they live within the pass."""
    states: LayerStates | None = None
    """None: states live within the pass."""
    inputs: Tensor | None = None
    """`[N, in]`, what attention reads in place of the normed stream."""
    embedding: Tensor | None = None
    """`[N, size]` float32, the layer's own embedding of each token."""

    def keys(self, heads: int, size: int, like: Tensor) -> Tensor:
        """The keys and values. Within the pass, row i is in slot i, with the dtype of `like`."""
        return like.new_empty(heads, len(like), size) if self.kv is None else self.kv


def parts_of(memory: LayerMemory | None) -> tuple[Tensor | None, LayerStates | None]:
    """The keys and values in a layer's memory, and the states."""
    if isinstance(memory, KVAndStates):
        return memory.kv, memory.states
    return (None, memory) if isinstance(memory, LayerStates) else (memory, None)


class DecoderBlock(nn.Module, ABC):
    """A layer of a decoder. It reads the residual stream, and returns the next one."""

    recorded: RecordedBlocks | None = None
    """Runs `compute` in few calls; see `soothsay.model.decoder.blocks.record`."""

    kernels: Kernels
    width: int
    """Numbers of a row of the stream."""
    rope_number: int
    """The place of its rotary positions among those of a pass."""
    in_features: int | None = None
    """Size of the rows that attention reads in place of the normed stream, if they come with each pass."""
    embedding_size: int | None = None
    """Size of the layer's own embedding of each token, if it has one."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of its linear layers' outputs."""
        return cast(torch.dtype, cast(nn.Module, cast(nn.Module, self.attention).o).dtype)

    @abstractmethod
    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, width] -> [N, width]`, float32, by nothing but operations of `ops`."""

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        batch: Batch,
        kv: LayerMemory | None,
        inputs: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """`[N, width] -> [N, width]`, float32. For the arguments see `LayerPass`."""
        if self.recorded is None:
            return self.compute(self.kernels, x, LayerPass(batch, rope, *parts_of(kv), inputs, embedding))
        memory, own = None if kv is None else (kv,), None if embedding is None else embedding[None]
        ropes = (rope,) * (self.rope_number + 1)
        return self.recorded(BlocksPass(x, ropes, batch, memory, (0,), (), own, inputs))[1]


class Stream(nn.Module):
    """A stream of rows of the hidden size. Another kind of stream is a subclass.

    It is divided by `multiplier`. So layers add to it without multiplying what they add. They compute the
    same, since each begins with a norm.
    """

    def __init__(self, multiplier: float = 1.0):
        super().__init__()
        self.multiplier = multiplier

    def enter(self, x: Tensor) -> Tensor:
        """Embeddings `[N, hidden]` float32 to the first layer's input `[N, width]`."""
        return x if self.multiplier == 1.0 else x / self.multiplier

    def tap(self, x: Tensor) -> Tensor:
        """What a drafter sees of a layer's input: `[N, width] -> [N, hidden]`."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def leave(self, x: Tensor) -> Tensor:
        """The last layer's output as final states, before their norm: `[N, width] -> [N, hidden]`."""
        return self.tap(x)
