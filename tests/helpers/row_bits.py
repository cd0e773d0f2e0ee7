"""Compares the bits of rows: alone and in company, by strides, addresses and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

THREADS = (1, 2, 3) if (os.cpu_count() or 1) > 1 else (1,)  # on one core, threads wait for each other
COMPANY = (1, 2, 7, 31)


def layouts(rows: Tensor) -> Iterator[Tensor]:
    """The same rows: adjacent, at an address that is no multiple of 16, and as the left half of others."""
    yield rows.clone()
    yield torch.cat([rows.new_zeros(3), rows.flatten()])[3:].view(rows.shape)
    yield torch.cat([rows, rows], -1)[..., : rows.shape[-1]]


def assert_row_bits(run: Callable[[Tensor], Tensor], rows: Tensor, *, strided: bool = True) -> None:
    """Assert that `run` gives each of `rows` the bits that it has alone, on one thread.

    Args:
        run: `[N, ...]` to `[N, ...]`, row by row.
        rows: `[M, ...]`.
        strided: False: it takes adjacent rows only.
    """
    alone, most = torch.cat([run(row[None].clone()) for row in rows]), len(rows)
    some = {count for count in COMPANY if count < most} | {most}
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            for count in some if threads == 1 else {1, most}:
                for number, own in enumerate(layouts(rows[-count:])):
                    if strided or number < 2:
                        assert torch.equal(run(own), alone[-count:]), (threads, count, number)
    finally:
        torch.set_num_threads(1)
