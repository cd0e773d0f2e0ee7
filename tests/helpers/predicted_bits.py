"""Products whose bits a device must have: made in the interpreter with the arithmetic of its instructions.

Inputs come from integers, so that they are the same everywhere.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from soothsay.model.gpu.gpu_linear import GpuLinear
from soothsay.model.weights.quantized import Quantized

ROWS, OUTPUTS, INPUTS = 18, 64, 1024

PREDICTED = {  # compute capability 9.0
    "bfloat16": "281615d3d7f7bc2a",
    "float16": "ccbbaa4938073ab7",
    "int8": "abdef45bb4b9fd5a",
    "int4 with minimums": "90045b6be2db2f30",
}


def digest(kind: str, device: torch.device | str) -> str:
    """A digest of the bits of a product in float32 on a device."""
    made = _layer(kind, device)(_numbers(ROWS, INPUTS, 1).to(device))
    return hashlib.sha256(made.cpu().numpy().tobytes()).hexdigest()[:16]


def _layer(kind: str, device: torch.device | str) -> GpuLinear:
    if kind in ("bfloat16", "float16"):
        weight = _numbers(OUTPUTS, INPUTS, len(kind))
        return GpuLinear(weight.to(getattr(torch, kind)), None, torch.float32, device)
    bits = int(kind[3])
    values = (_hashed(OUTPUTS * INPUTS, 3) % 2**bits).to(torch.uint8).view(OUTPUTS, INPUTS)
    scales = (1 + _hashed(OUTPUTS * INPUTS // 32, 4) % 31).view(OUTPUTS, -1) / 1024
    minimums = -8 * scales.flip(0) if "minimums" in kind else None
    return GpuLinear(Quantized(bits, values, scales, None, minimums), None, torch.float32, device)


def _numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Numbers of many sizes and both signs, exact in float16 and in bfloat16."""
    hashed = _hashed(rows * columns, seed)
    exponents = hashed // 512 % 16 - 12
    return ((hashed % 512 - 256) / 256 * 2.0**exponents).bfloat16().float().view(rows, columns)


def _hashed(count: int, seed: int) -> Tensor:
    """Integers below 2**31, by a multiplicative hash."""
    mixed = (torch.arange(count) + seed * 1_000_003) * 2_654_435_761 % 2**32
    return (mixed ^ mixed >> 15) * 2_246_822_519 % 2**32 // 2
