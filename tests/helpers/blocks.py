"""Random rows of GGML's blocks."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

HALVES = {
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]},
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]},
    **{"IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []},
}
"""Types, and where their blocks have numbers in half precision, in bytes."""


def random_blocks(kind: str, rows: int, size: int, seed: int = 0, deviation: float = 0.1) -> Tensor:
    """Rows of `size` weights of about this standard deviation: `[rows, bytes]` uint8.

    All bits are at random but those of floating point numbers.
    """
    rng = np.random.default_rng(seed)
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows * size // block, block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        data[:, 0] = rng.integers(118, 124, len(data))
    factor = 1.0
    for _ in range(2):
        for place in HALVES[kind]:
            numbers = np.random.default_rng(place).uniform(-0.02, 0.02, len(data)) * factor
            data[:, place : place + 2] = numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)
        factor = deviation / dequantize(data, GGMLQuantizationType[kind]).std()
    if kind == "MXFP4":
        data[:, 0] = data[:, 0].astype(int) + round(np.log2(factor))
    return torch.from_numpy(data).view(rows, -1)
