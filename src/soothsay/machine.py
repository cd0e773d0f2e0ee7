"""What the machine has, and how it is treated."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def available_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not tell, 4 GiB."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return 4 * 2**30


def cache_directory() -> Path:
    """Where measurements of this machine are kept: `$XDG_CACHE_HOME/soothsay`, or `~/.cache/soothsay`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "soothsay"


def processor_name() -> str:
    """What the processor calls itself, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor that does not say
        return platform.processor()


def return_freed_memory() -> None:
    """Hand what was freed back to the system. The GNU allocator keeps it, and after many large tensors of
    different sizes it holds a good part of a model in holes; others return it by themselves."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype, *, large_pages: bool = False) -> Tensor:
    """Zeros in a mapping of their own, which costs memory only where it is written to, and leaves no hole in
    the heap when it goes. `large_pages`: where the system has them; for what will be written all over."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(*shape)
