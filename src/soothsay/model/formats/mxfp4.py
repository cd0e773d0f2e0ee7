"""Experts in MXFP4 (Open Compute Project's Microscaling formats, 2023), as gpt-oss has them.

Groups of 32 inputs share a power of two. A weight is one of 16 values, which are integers when doubled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import Reader, Settings
from soothsay.model.quantized import Quantized

HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values (E2M1), doubled."""

GROUP = 32


def scales(exponents: Tensor) -> Tensor:
    """Half of the scales, so that they fit doubled values: uint8 (E8M0) to float32 of the same shape."""
    exponent = exponents.int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32)


@dataclass(frozen=True, slots=True)
class MXFP4:
    """The format that gpt-oss declares, for experts alone. Other layers are plain.

    A matrix has `blocks` `[out, groups, 16]` uint8, two values a byte, the first in its lower half, and
    `scales` `[out, groups]` uint8.
    """

    bits: int = 4
    name: str = "MXFP4 experts"

    @classmethod
    def of(cls, settings: Settings) -> MXFP4:
        """The format. It has no settings that matter: tensors say what is quantized."""
        return cls()

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.blocks" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.blocks", f"{module}.scales"]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        blocks, exponents = (read(name) for name in self.tensors(module))
        shapes = tuple(blocks.shape), (*exponents.shape, GROUP // 2)
        if shapes[0] != shapes[1] or blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
            found = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in (blocks, exponents)]
            raise ValueError(f"blocks {found[0]}, scales {found[1]}")
        values = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        table = torch.tensor(HALVES, dtype=torch.int8)
        return Quantized(4, values, scales(exponents), table=table)
