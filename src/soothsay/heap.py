"""The heap of this process. Servers return what they have freed to the system, now and then."""

from __future__ import annotations

import ctypes
import sys

TIDY_INTERVAL = 30.0
"""Seconds between two returns of freed memory to the system. One takes some milliseconds. Texts and batches
of all sizes leave gaps in the heap, which otherwise grows for hours."""


def return_freed_memory() -> None:
    """Return freed memory to the system.

    The GNU allocator keeps freed memory. After many large tensors of different sizes, the gaps that it keeps
    add up to a good part of a model. Other allocators return memory by themselves.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
