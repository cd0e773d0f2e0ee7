"""The native kernels: C libraries, one for each instruction set, of which the best that runs here is loaded.

They are compiled when the package is installed, if a compiler is there. Each kernel has a twin in stock
operations, which is its reference, its fallback and its oracle in the tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from soothsay.engine.batch import Batch

VARIANTS = ("avx512bf16", "avx512", "avx2", "portable")
"""Instruction sets, the best first."""

KV_DTYPES = (torch.float32, torch.bfloat16)


class Library:
    """One compiled set of kernels. Raises `OSError` where it is missing or cannot run on this processor."""

    def __init__(self, variant: str):
        files = [Path(__file__).parent / f"_{variant}{suffix}" for suffix in EXTENSION_SUFFIXES]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise OSError(f"the native kernels for {variant} were not compiled")
        self.variant = variant
        self._library = ctypes.CDLL(str(file))
        if not self._library.soothsay_runs_here():
            raise OSError(f"this processor does not have {variant}")
        self._attend = self._library.soothsay_attend
        self._attend.restype = None
        self._attend.argtypes = [
            *(c_void_p, c_void_p, c_int),  # q, kv, is_bf16
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int),  # paths
            *(c_int, c_int, c_int, c_int64, c_float, c_int64),  # heads, group, d, slots, softcap, window
            c_void_p,  # out
        ]

    def attend(
        self, q: Tensor, kv: Tensor, batch: Batch, *, softcap: float | None = None, window: int | None = None
    ) -> Tensor:
        """`soothsay.model.attention.attend`, reading keys in place. `d` must be a multiple of 32.

        A row's bits depend on its query and its own keys only, not even on the number of threads. With
        avx512bf16 and a bfloat16 pool, queries and weights are rounded to bfloat16 before they multiply.
        """
        q = q.contiguous()
        heads, slots, d = kv.shape[0] // 2, kv.shape[1], kv.shape[2]
        if kv.dtype not in KV_DTYPES or not kv.is_contiguous() or d % 32:
            raise ValueError(f"kv of {kv.dtype} and shape {list(kv.shape)} does not fit the native kernel")
        out = torch.empty(q.shape)
        flat = batch.flat
        self._attend(
            q.data_ptr(),
            kv.data_ptr(),
            kv.dtype == torch.bfloat16,
            flat.keys.data_ptr(),
            flat.key_begin.data_ptr(),
            flat.rows.data_ptr(),
            flat.positions.data_ptr(),
            flat.row_begin.data_ptr(),
            len(flat.row_begin) - 1,
            heads,
            q.shape[1] // heads,
            d,
            slots,
            softcap or 0.0,
            window or 0,
            out.data_ptr(),
        )
        return out.view(len(q), -1)


@cache
def library(variant: str | None = None) -> Library | None:
    """The library for an instruction set, or the best that runs here; None where there is none."""
    return next(_loadable(VARIANTS if variant is None else (variant,)), None)


def _loadable(variants: tuple[str, ...]) -> Iterator[Library]:
    for variant in variants:
        try:
            yield Library(variant)
        except OSError:
            continue
