"""Kernels for tests that run no model."""

from __future__ import annotations

from soothsay.model.native.native_kernels import load_native
from soothsay.model.ops.kernels import Kernels, StockKernels

STOCK = StockKernels()

FASTEST: Kernels = load_native() or STOCK
"""The fastest kernels that run on this processor: native ones if there are any."""

OPS, STOCK_OPS = FASTEST.sampling, STOCK.sampling
"""Their operations of sampling."""
