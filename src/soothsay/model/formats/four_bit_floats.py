"""Floats of 4 bits (E2M1) with scales for groups: MXFP4 and NVFP4, as integers with a table."""

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import Reader, one_layout, unpack
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


def fp4_weight(
    read: Reader, values: str, scales: str, whole: str = "", *, divides: bool = False
) -> Quantized:
    """A weight of floats of 4 bits, of tensors with these suffixes.

    Args:
        read: reads a tensor.
        values: uint8, two in a byte, the first in its lower half: `[out, in / 2]`, or `[out, groups, 16]` in
            gpt-oss.
        scales: `[out, groups]`: uint8 (E8M0) for 32 inputs (MXFP4), or E4M3 for 16 (NVFP4).
        whole: a factor of the whole weight, one number; empty: there is none.
        divides: scales are divided by the factor.

    Raises `ValueError` if shapes do not fit each other.
    """
    packed, stored = read(values), read(scales)
    factors, group = fp4_scales(stored)
    flat = packed.flatten(1)
    if flat.shape != (len(stored), stored.shape[1] * group // 2) or packed.dtype != torch.uint8:
        raise ValueError(
            f"values {list(packed.shape)} {packed.dtype}, scales {list(stored.shape)} {stored.dtype}"
        )
    if whole:
        one = read(whole).float().reshape(())
        factors = factors / one if divides else factors * one
    return Quantized(4, unpack(flat, 4), factors, table=FP4_VALUES)


EXPERTS = one_layout(
    "MXFP4 experts",
    4,
    ("blocks", "scales"),
    lambda read: fp4_weight(read, "blocks", "scales"),
    usual=lambda module: ".experts." in module,
)
"""The format that gpt-oss declares, for experts alone. Other layers are plain."""

_PACKED = "weight_packed", "weight_scale"
PACKED = {
    "mxfp4-pack-quantized": one_layout(
        "MXFP4 (compressed-tensors)", 4, _PACKED, lambda read: fp4_weight(read, *_PACKED)
    ),
    "nvfp4-pack-quantized": one_layout(
        "NVFP4 (compressed-tensors)",
        4,
        (*_PACKED, "weight_global_scale"),
        lambda read: fp4_weight(read, *_PACKED, "weight_global_scale", divides=True),
        mark="weight_global_scale",
    ),
}
"""By the `format` of compressed-tensors."""
