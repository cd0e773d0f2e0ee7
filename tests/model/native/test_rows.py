"""Rows of packed weights against the same rows unpacked, bit for bit."""

from __future__ import annotations

import pytest
import torch
from blocks import HALVES, random_blocks

from soothsay.model.formats.gguf_blocks import decode
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.native.native_linear import NativeLinear, PackedTable
from soothsay.model.weights.quantized import Integers, Quantized, dequantized, joined

ROWS = torch.tensor([0, 63, 64, 129, 7, 7])


def table(kernels: NativeKernels, weight: Integers) -> PackedTable:
    layer = kernels.linear(weight, None, torch.float32)
    assert isinstance(layer, NativeLinear)
    return PackedTable(layer)


def random_weight(out: int, size: int, bits: int, group: int | None, zeros: bool) -> Quantized:
    groups = size // group if group else 1
    values = torch.randint(0, 2**bits, (out, size), dtype=torch.uint8)
    own = torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8) if zeros else None
    return Quantized(bits, values, torch.randn(out, groups), own)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(
    ("bits", "group"), [*((bits, group) for bits in (8, 6, 4, 2) for group in (None, 16)), (5, 32), (4, 128)]
)
def test_integers_of_each_size(kernels: NativeKernels, bits: int, group: int | None, zeros: bool) -> None:
    torch.manual_seed(bits)
    weight = random_weight(130, 256, bits, group, zeros)
    assert torch.equal(table(kernels, weight).floats(ROWS), weight.take(ROWS).dequantize())


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_of_each_type(kernels: NativeKernels, kind: str) -> None:
    weight = decode(kind, random_blocks(kind, 130, 512))
    assert torch.equal(table(kernels, weight).floats(ROWS), weight.take(ROWS).dequantize())


def test_weights_of_different_kinds(kernels: NativeKernels) -> None:
    torch.manual_seed(0)
    both = joined([random_weight(100, 64, 4, 32, zeros=False), random_weight(30, 64, 8, 16, zeros=True)])
    rows, found = torch.tensor([0, 99, 100, 129]), table(kernels, both)
    assert found.shape == (130, 64)
    assert torch.equal(found.floats(rows), dequantized(both, torch.float32)[rows])


def test_numbers_of_rows_that_are_apart_in_memory(kernels: NativeKernels) -> None:
    found = table(kernels, random_weight(130, 32, 8, None, zeros=False))
    assert torch.equal(found.floats(ROWS.repeat_interleave(3)[::3]), found.floats(ROWS))


def test_rows_that_do_not_exist_are_no_numbers(kernels: NativeKernels) -> None:
    found = table(kernels, random_weight(70, 32, 8, None, zeros=False)).floats(torch.tensor([69, 70, -1]))
    assert found.isnan().all(1).tolist() == [False, True, True]
