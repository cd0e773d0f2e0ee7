"""Messages between an engine and the processes that run further layers: some fields, and tensors.

A frame is the length of a JSON header, the header, and the elements of the tensors. Nothing in it is code,
and all sizes are checked before anything is used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

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
