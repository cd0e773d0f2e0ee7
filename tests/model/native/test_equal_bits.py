"""Products have the same bits with every instruction set that multiplies and adds in one rounding."""

from __future__ import annotations

import pytest
import torch
from blocks import random_blocks
from kernels import SETS, opened

from soothsay.model.formats.gguf_blocks import DECODERS, decode
from soothsay.model.native.library import VARIANTS
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.native.native_linear import NativeLinear, PackedTable
from soothsay.model.weights.quantized import Quantized

OUT, IN, ROWS = 70, 512, 16  # a panel and a part of one
FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = {f"int{bits}{zeros}": (bits, zeros) for bits in (8, 6, 5, 4, 2) for zeros in ("", " with zeros")}


FUSED = [name for name in SETS if name != "portable" or "avx2" not in VARIANTS] or ["avx2"]
"""Portable kernels for x86 round a product before they add it; those for ARM do not."""


def random_weight(kind: str) -> Quantized | torch.Tensor:
    if kind in FLOATS:
        return torch.randn(OUT, IN).to(getattr(torch, kind)).float()
    if kind in DECODERS:
        return decode(kind, random_blocks(kind, OUT, IN))
    bits, zeros = INTEGERS[kind]
    return Quantized(
        bits,
        torch.randint(0, 2**bits, (OUT, IN), dtype=torch.uint8),
        torch.rand(OUT, IN // 32) / IN,
        torch.randint(0, 2**bits, (OUT, IN // 32), dtype=torch.uint8) if zeros else None,
    )


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", [*DECODERS, *INTEGERS, *FLOATS])
def test_bits_of_avx2_in_any_company(kind: str, name: str) -> None:
    """Rows 1 to 16 have the bits of AVX2, alone and among others, and so has each row of the weights."""
    sets = opened(NativeKernels, "avx2"), opened(NativeKernels, name)
    torch.manual_seed(0)
    weight, x = random_weight(kind), torch.randn(ROWS, IN) * torch.logspace(-3, 3, ROWS)[:, None]
    x[3] = 0
    expected, layer = (each.linear(weight, torch.arange(OUT).float(), torch.float32) for each in sets)
    assert isinstance(expected, NativeLinear)
    assert isinstance(layer, NativeLinear)
    for count in range(1, ROWS + 1):
        assert torch.equal(layer(x[:count]), expected(x)[:count]), count
        assert torch.equal(layer(x[-count:]), expected(x)[-count:]), count
    if kind in FLOATS:
        return
    numbers = torch.arange(OUT)
    assert torch.equal(PackedTable(layer).floats(numbers), PackedTable(expected).floats(numbers))
