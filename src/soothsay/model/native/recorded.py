"""What a recorded program is made of: operations of values, which stand for the tensors of a pass.

Lifetimes of values give them their places in scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from soothsay.model.native.program import SCRATCH, Operand, Operation


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of a pass: some bytes for each row."""

    size: int
    where: int = SCRATCH
    place: int = 0
    first: int = 0
    """The operation that writes it first."""
    last: int = -1
    """The last operation that uses it."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """Stands for a tensor `[N, size]` or `[N, heads, size]`: a whole buffer, or a part of each row."""

    buffer: Buffer
    dtype: torch.dtype
    sizes: tuple[int, ...]
    """Heads, if there are some, and size."""
    row: int
    """Elements from row to row."""
    begin: int = 0
    """Elements of a row before it."""
    head: int = 0
    """Elements from head to head."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor. The number of rows is not known."""
        return -1, *self.sizes

    @property
    def is_whole(self) -> bool:
        """Whether its rows are end to end."""
        heads, size = self.heads, self.sizes[-1]
        return self.row == heads * size and (heads == 1 or self.head == size)

    @property
    def heads(self) -> int:
        """Number of heads; 1 if there are none."""
        return self.sizes[0] if len(self.sizes) == 2 else 1

    def operand(self) -> Operand:
        """As the library reads it, once the buffer has its place."""
        b, half = self.buffer, self.dtype == torch.bfloat16
        head = self.head if len(self.sizes) == 2 else 0
        begin = self.begin * self.dtype.itemsize
        return Operand(b.place, begin, self.row, head, b.where, half, self.heads, self.sizes[-1])


@dataclass(frozen=True, slots=True)
class Memory:
    """Stands for the keys and values of a layer."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    """Within a pass."""


@dataclass(frozen=True)
class RecordedPass:
    """Stands for the `LayerPass` of a layer."""

    rope: int
    """The number of its rope."""
    inputs: Value | None
    embedding: Value | None
    batch: Any = field(default_factory=lambda: RecordedBatch(0, RecordedBatch(1)))
    states: None = None
    memory: list[Memory] = field(default_factory=list)
    """Its keys and values."""

    @property
    def kv(self) -> Memory:
        """See `LayerPass`: those that the layer has written before."""
        return self.memory[0]

    def keys(self, heads: int, size: int, like: Value) -> Memory:
        """See `LayerPass`."""
        self.memory.append(Memory((heads, -1, size), like.dtype))
        return self.memory[-1]


@dataclass(frozen=True)
class RecordedBatch:
    """Stands for the batch. Operations find what they read of it in their pass."""

    sight: int
    """Which of the paths of the pass its rows attend by."""
    across: RecordedBatch | None = None
    slots: None = None
    positions: None = None
    strands: None = None


@dataclass(frozen=True)
class Program:
    """The operations of one layer, with places for all that they write."""

    ops: tuple[Operation, ...]
    scratch: int
    """Bytes a row."""
    kv_size: int
    """Bytes a row of keys and values within a pass."""
    kv_dtype: torch.dtype | None
    """Their element type; None: there are none."""

    @property
    def cuts(self) -> int:
        """Operations that stock operations of Python compute."""
        return sum(op.function is not None for op in self.ops)
