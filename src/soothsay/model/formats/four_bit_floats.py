"""Floats of 4 bits (E2M1) with scales for groups: MXFP4 and NVFP4, as integers with a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import Reader, unpack
from soothsay.model.weights.quantized import Quantized, table_of

FP4_VALUES = table_of(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values (E2M1), doubled."""


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """Half of the scales, so that they fit doubled values: uint8 (E8M0) to float32 of the same shape."""
    exponent = exponents.int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32)


def fp4_scales(scales: Tensor) -> tuple[Tensor, int]:
    """Half of the scales in float32, and the size of their groups, by the dtype. Raises `ValueError`."""
    if scales.dtype == torch.uint8:  # MXFP4: powers of two
        return mxfp4_scales(scales), 32
    if scales.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scales of {scales.dtype}")
    return scales.float() / 2, 16


@dataclass(frozen=True, slots=True)
class FP4:
    """A format of floats of 4 bits. Tensors are named by suffixes.

    Values are uint8, two in a byte, the first in its lower half: `[out, in / 2]`, or `[out, groups, 16]` in
    gpt-oss. Scales are `[out, groups]`: uint8 (E8M0) for 32 inputs (MXFP4), or E4M3 for 16 (NVFP4).
    """

    name: str
    values: str
    scales: str
    whole: str | None = None
    """A factor of the whole weight, one number."""

    is_divisor: bool = False
    """Scales are divided by the factor."""

    bits: int = 4

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.{self.whole or self.values}" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.{suffix}" for suffix in (self.values, self.scales, self.whole) if suffix]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        packed, stored, *whole = (read(name) for name in self.tensors(module))
        scales, group = fp4_scales(stored)
        values = packed.flatten(1)
        if values.shape != (len(stored), stored.shape[1] * group // 2) or packed.dtype != torch.uint8:
            raise ValueError(
                f"values {list(packed.shape)} {packed.dtype}, scales {list(stored.shape)} {stored.dtype}"
            )
        for factor in whole:
            one = factor.float().reshape(())
            scales = scales / one if self.is_divisor else scales * one
        return Quantized(4, unpack(values, 4), scales, table=FP4_VALUES)


EXPERTS = FP4("MXFP4 experts", "blocks", "scales")
"""The format that gpt-oss declares, for experts alone. Other layers are plain."""

PACKED = {
    "mxfp4-pack-quantized": FP4("MXFP4 (compressed-tensors)", "weight_packed", "weight_scale"),
    "nvfp4-pack-quantized": FP4(
        "NVFP4 (compressed-tensors)", "weight_packed", "weight_scale", "weight_global_scale", is_divisor=True
    ),
}
"""By the `format` of compressed-tensors."""

MODELOPT = FP4("NVFP4 (ModelOpt)", "weight", "weight_scale", "weight_scale_2")
"""The format of NVIDIA's Model Optimizer."""
