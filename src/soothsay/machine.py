"""What the machine has, and how it is treated."""

from __future__ import annotations

import ctypes
import sys


def available_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not tell, 4 GiB."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return 4 * 2**30


def return_freed_memory() -> None:
    """Hand what was freed back to the system. The GNU allocator keeps it, and after many large tensors of
    different sizes it holds a good part of a model in holes; others return it by themselves."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
