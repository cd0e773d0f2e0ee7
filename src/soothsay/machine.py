"""The machine: its memory, its processor, and its directory for caches."""

from __future__ import annotations

import math
import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def available_memory() -> int:
    """Bytes that can be allocated without swapping; 4 GiB if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return 4 * 2**30


def cache_directory() -> Path | None:
    """The directory for measurements of this machine: `$XDG_CACHE_HOME/soothsay`, or `~/.cache/soothsay`.

    None if the user has no home directory. The directory may not exist.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "soothsay"
    except RuntimeError:  # as in a container with a user id that has no name
        return None


def processor_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor without a name
        return platform.processor()


def processor_seconds_of_others() -> float | None:
    """Processor seconds that other processes of this machine have used so far. None: it does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system


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
