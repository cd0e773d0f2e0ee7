"""Memory mappings of their own for tensors that live long: pools of keys and values, and weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in a memory mapping of their own.

    A page takes memory only once it is written to. Freeing the tensor returns all of it to the system.
    """
    if 0 in shape:  # which cannot be mapped
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_mapping(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


class LargePages:
    """Memory for tensors that live together, in large pages where the system has them.

    Tensors that are allocated one after the other share a mapping, since most are smaller than a large page
    or end in the middle of one. With experts of 1.5 MB in mappings of their own, a pass takes 1.3 times as
    long. A page takes memory only once it is written to. Freeing all tensors of a mapping returns its memory
    to the system; the last mapping lives as long as this object.
    """

    SHARED = 2**28
    """Bytes of a mapping, unless one tensor is larger. The end of each is a large page that is not full."""

    PAGE = 2**21
    """Bytes of a large page."""

    LINE = 64
    """Bytes of a cache line. Tensors begin at one."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeros."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // self.LINE) * self.LINE
        if room > len(self._rest):
            shared = max(room, self.SHARED)
            buffer = _mapping(shared + self.PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                buffer.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(buffer, dtype=torch.uint8)
            begin = -whole.data_ptr() % self.PAGE
            self._rest = whole[begin : begin + shared]
        own, self._rest = self._rest[:size], self._rest[room:]
        return own.view(dtype).view(*shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Allocate a copy of a tensor."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _mapping(size: int) -> mmap.mmap:
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, size, **private)
