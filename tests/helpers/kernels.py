"""Kernels for tests that run no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from soothsay.model.native import library
from soothsay.model.native.native_kernels import load_native
from soothsay.model.ops.kernels import Kernels, StockKernels

STOCK = StockKernels()

FASTEST: Kernels = load_native() or STOCK
"""The fastest kernels that run on this processor: native ones if there are any."""

OPS, STOCK_OPS = FASTEST.sampling, STOCK.sampling
"""Their operations of sampling."""

SETS = [name for name in library.VARIANTS if not library._problem(name)] or ["portable"]
"""The sets of native kernels that run on this processor.

`model/test_kernel_sets.py` skips a test for each other set, and says what the processor lacks. Where nothing
was compiled, all tests of kernels are skipped.
"""

Opened = TypeVar("Opened")


def opened(kind: Callable[[str], Opened], name: str) -> Opened:
    """Operations of one of `SETS`. Skips the test if nothing was compiled."""
    try:
        return kind(name)
    except OSError as error:
        pytest.skip(f"no {name} kernels: {error}")
