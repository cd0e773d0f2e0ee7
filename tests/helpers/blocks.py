"""Random rows of GGML's blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

HALVES = {
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]},
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]},
    **{"IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [], "TQ1_0": [52], "TQ2_0": [64]},
    **{"IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0]},
}
"""Types, and where their blocks have numbers in half precision, in bytes."""


def random_blocks(kind: str, rows: int, size: int, seed: int = 0, deviation: float = 0.1) -> Tensor:
    """Rows of `size` weights of about this standard deviation: `[rows, bytes]` uint8.

    All bits are at random but those of floating point numbers.
    """
    rng = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows * size // block, block_bytes), dtype=np.uint8)
    factor = 1.0
    for _ in range(2):
        _set_factors(kind, data, factor)
        factor = deviation / dequantize(data, GGMLQuantizationType[kind]).std()
    return torch.from_numpy(data).view(rows, -1)


def _set_factors(kind: str, data: npt.NDArray[np.uint8], factor: float) -> None:
    """Write random numbers in the places of floating point numbers, proportional to `factor`."""
    for place in HALVES[kind]:
        data[:, place : place + 2] = _halves(len(data), place, factor)
    if kind == "MXFP4":
        exponents = np.random.default_rng(0).integers(118, 124, len(data))
        data[:, 0] = exponents + round(np.log2(factor))
    elif kind == "NVFP4":
        scales = torch.rand(len(data), 4, generator=torch.Generator().manual_seed(0)) * factor
        data[:, :4] = scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    elif kind == "IQ1_M":  # a fourth of the number in the upper bits of each word
        words, number = data[:, 48:].view(np.uint16), _halves(len(data), 0, factor).view(np.uint16)
        words[:] = words & 0x0FFF | (number >> np.arange(0, 16, 4, dtype=np.uint16)) << 12


def _halves(count: int, seed: int, factor: float) -> npt.NDArray[np.uint8]:
    """Numbers in half precision: `[count, 2]`."""
    numbers = np.random.default_rng(seed).uniform(-0.02, 0.02, count) * factor
    return numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)
