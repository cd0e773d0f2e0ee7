"""Messages between an engine and the processes that run further layers: fields, tensors, and plans.

A frame is the length of a JSON header, the header, and the elements of the tensors. Nothing in it is code,
and all sizes are checked before anything is used. A plan has the rows of a pass, or the moves after it, as
one list of integers.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.cache import Move
from soothsay.core.strands import Marks
from soothsay.core.tree import DraftTree

MAX_FRAME = 1 << 30
"""Limit of bytes. The rows of a long prompt's chunk, 8,192 rows of 8,192 numbers, take 256 MB."""

MAX_HEADER = 1 << 16
"""Limit of bytes of a header. Those in use have some hundreds."""

MAX_TENSORS = 1 << 10
"""Limit of tensors in a frame. There is one for each layer whose input a drafter reads."""

DTYPES = {"float32": torch.float32, "int64": torch.int64}
"""Element types, by name."""

ALIGNED = 8
"""Elements of tensors begin at multiples of this number of bytes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)  # values that JSON has
    tensors: Sequence[Tensor] = ()  # on the CPU, of the types in `DTYPES`


class FrameError(Exception):
    """What was received is not a frame."""


def send(pipe: Connection, frame: Frame) -> None:
    """Send a frame. Raises `OSError` if the other side is gone."""
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in frame.tensors]
    header = json.dumps([frame.kind, frame.fields, shapes]).encode()
    header += b" " * (-(len(header) + 4) % ALIGNED)
    parts = [tensor.numpy().tobytes() for tensor in frame.tensors]
    pipe.send_bytes(b"".join([struct.pack("<I", len(header)), header, *parts]))


def receive(pipe: Connection) -> Frame:
    """Wait for a frame.

    Raises:
        EOFError, OSError: the other side is gone, or sends more than `MAX_FRAME` bytes.
        FrameError: this is no frame.
    """
    data = bytearray(pipe.recv_bytes(MAX_FRAME))
    try:
        (size,) = struct.unpack_from("<I", data)
        if size > MAX_HEADER:
            raise ValueError(f"a header of {size} bytes")
        kind, fields, shapes = json.loads(data[4 : 4 + size])
        if not isinstance(kind, str) or not isinstance(fields, dict) or len(shapes) > MAX_TENSORS:
            raise ValueError("a header of another form")
        return Frame(kind, fields, _tensors(data, 4 + size, shapes))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise FrameError(f"not a frame: {error}") from None


def _tensors(data: bytearray, begin: int, shapes: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """The tensors of a frame, which share its memory."""
    tensors = []
    for name, shape in shapes:
        if len(shape) > 3 or not all(type(size) is int and 0 <= size <= MAX_FRAME for size in shape):
            raise ValueError(f"a tensor of the shape {shape}")
        dtype, count = DTYPES[name], math.prod(shape)
        if count == 0:
            tensors.append(torch.empty(*shape, dtype=dtype))
            continue
        tensors.append(torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(*shape))
        begin += count * dtype.itemsize
    if begin != len(data):
        raise ValueError(f"{len(data) - begin} bytes too many")
    return tensors


NONE = -1
"""Stands for None where a number is not negative."""


def written_rows(requests: Sequence[Rows]) -> Tensor:
    """Rows as int64. Scores and draws of trees are left out: layers do not read them."""
    plan = array("q", [len(requests)])
    for rows in requests:
        tree, table = rows.tree, rows.table
        plan.extend((len(rows.tokens), rows.start, NONE if table is None else len(table)))
        plan.extend((NONE if tree is None else len(tree), rows.first, rows.first_key))
        plan.append(NONE if rows.state is None else rows.state)
        _write_marks(plan, rows.marks)
        plan.extend(rows.tokens.tolist())
        plan.extend(() if table is None else table.tolist())
        plan.extend(() if tree is None else (*tree.tokens, *tree.parents))
    return _tensor(plan)


def read_rows(plan: Tensor, num_blocks: int | None) -> list[Rows]:
    """The inverse of `written_rows`.

    Args:
        plan: as received.
        num_blocks: of the pool; None: keys and values live within the pass.

    Raises `FrameError` for what is not a plan, or would reach beyond the pool.
    """
    reader = _Reader(plan)
    found = []
    for _ in range(reader.count()):
        pending, start, blocks = reader.count(), reader.count(), reader.number()
        nodes, first, first_key, state = (reader.number() for _ in range(4))
        marks = reader.marks()
        tokens = reader.take(pending)
        table = None if blocks == NONE else reader.table(blocks, num_blocks)
        tree = None if nodes == NONE else reader.tree(nodes)
        if first < 1 or not 0 <= first_key <= start or (pending == 0 and tree is None):
            raise FrameError("rows that no request has")
        found.append(
            Rows(
                *(tokens, start, table, tree, first, first_key),
                state=None if state == NONE else state,
                marks=marks,
            )
        )
    reader.end()
    return found


def written_moves(moves: Sequence[Move]) -> Tensor:
    """Moves as int64."""
    plan = array("q", [len(moves)])
    for move in moves:
        plan.extend((len(move.table), len(move.sources), move.start))
        plan.append(NONE if move.state is None else move.state)
        _write_marks(plan, move.marks)
        plan.extend(move.table.tolist())
        plan.extend(move.sources)
    return _tensor(plan)


def read_moves(plan: Tensor, num_blocks: int) -> list[Move]:
    """The inverse of `written_moves`. Raises `FrameError` as `read_rows` does."""
    reader = _Reader(plan)
    found = []
    for _ in range(reader.count()):
        blocks, nodes, start, state = reader.count(), reader.count(), reader.count(), reader.number()
        marks = reader.marks()
        table, sources = reader.table(blocks, num_blocks), reader.take(nodes).tolist()
        if any(source < start for source in sources):
            raise FrameError("a move from before the tree")
        found.append(Move(table, sources, start, None if state == NONE else state, marks))
    reader.end()
    return found


def _write_marks(plan: array[int], marks: Marks) -> None:
    plan.append(len(marks))
    plan.extend(number for mark in marks for number in mark)


def _tensor(plan: array[int]) -> Tensor:
    return torch.frombuffer(plan, dtype=torch.int64)


class _Reader:
    """Reads integers, and checks them."""

    def __init__(self, plan: Tensor):
        if plan.dtype != torch.int64 or plan.dim() != 1:
            raise FrameError("a plan is a list of int64")
        self._numbers, self._place = plan.numpy(), 0

    def number(self) -> int:
        """The next number."""
        return int(self.take(1)[0])

    def count(self) -> int:
        """The next number, which is not negative."""
        if (number := self.number()) < 0:
            raise FrameError(f"a count of {number}")
        return number

    def take(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The next numbers."""
        begin, self._place = self._place, self._place + count
        if count < 0 or self._place > len(self._numbers):
            raise FrameError("a plan that is too short")
        return self._numbers[begin : self._place]

    def marks(self) -> Marks:
        """Pairs of a number of tokens and a slot."""
        numbers = self.take(2 * self.count()).tolist()
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))

    def table(self, blocks: int, num_blocks: int | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The numbers of a request's blocks."""
        table = self.take(blocks)
        if num_blocks is None or (blocks and not 0 <= table.min() <= table.max() < num_blocks):
            raise FrameError("a block that the pool does not have")
        return table

    def tree(self, nodes: int) -> DraftTree:
        """A tree of some nodes."""
        tokens, parents = self.take(nodes).tolist(), self.take(nodes).tolist()
        if not nodes or parents[0] != -1 or not all(0 <= p < i for i, p in enumerate(parents[1:], start=1)):
            raise FrameError("a tree without a root, or with a node before its parent")
        tree = DraftTree(tokens[0])
        tree.append_nodes(tokens[1:], parents[1:], [0.0] * (nodes - 1))
        return tree

    def end(self) -> None:
        """Check that all was read."""
        if self._place != len(self._numbers):
            raise FrameError("a plan that is too long")
