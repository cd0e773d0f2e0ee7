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


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype, *, large_pages: bool = False) -> Tensor:
    """Allocate zeros in a memory mapping of their own.

    A page takes memory only once it is written to. Freeing the tensor returns all of it to the system.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        large_pages: whether to ask for large pages, where the system has them. For tensors that will be
            written to in most places.
    """
    if 0 in shape:  # which cannot be mapped
        return torch.zeros(shape, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(*shape)
