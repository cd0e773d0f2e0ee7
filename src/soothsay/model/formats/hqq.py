"""Weights of HQQ (half-quadratic quantization), as its library and transformers save them."""

from __future__ import annotations

import torch

from soothsay.model.formats.weight_format import (
    WIDTHS,
    Reader,
    Settings,
    WeightFormat,
    in_rows,
    kind,
    one_layout,
)
from soothsay.model.weights.quantized import Quantized


def hqq(settings: Settings) -> WeightFormat:
    """Integers in groups that run through all rows, with zero points that are floats.

    `W_q` `[groups / n, group_size]` has n integers in each uint8, or 10 of 3 bits in each int32: groups of
    the first n-th of the weight in the upper bits, then those of the second. `scale` and `zero` are
    `[groups, 1]`, and `shape` is that of the weight.

    Raises `ModelError` for an unknown setting.
    """
    parts = settings.part("quant_config")
    for name in ("scale_quant_params", "zero_quant_params"):
        if parts.values.get(name):
            raise settings.refusal(f"hqq with {name}")
    weights = parts.part("weight_quant_params")
    weights.one_of("axis", {1: 1})  # groups of axis 0 are columns
    bits = weights.one_of("nbits", {bits: bits for bits in (2, 3, 4, 8)})
    group_size = weights.group_size()  # None: a row

    def decode(read: Reader) -> Quantized:
        packed, scale, zero = read("W_q"), read("scale"), read("zero")
        out, size = (int(number) for number in read("shape"))
        words = packed.view(torch.int32 if bits == 3 else torch.uint8)  # may be saved as floats
        count = 10 if bits == 3 else 8 // bits
        group = group_size or size
        groups = out * size // group
        shapes = tuple(words.shape), tuple(scale.shape), tuple(zero.shape)
        if shapes != ((-(-groups // count), group), (groups, 1), (groups, 1)):
            raise ValueError(f"{shapes} for {[out, size]}")
        shifts = range(bits * (count - 1), -1, -bits)
        fields = [(words >> shift & 2**bits - 1).to(torch.uint8) for shift in shifts]
        values = torch.cat(fields)[:groups].view(out, size)
        scales = scale.float()
        factors = [in_rows(part.flatten(), group, out, size) for part in (scales, -zero.float() * scales)]
        return Quantized(WIDTHS[bits], values, factors[0], minimums=factors[1])

    return one_layout(
        f"{kind(bits, group_size)} (HQQ)", WIDTHS[bits], ("W_q", "scale", "zero", "shape"), decode
    )
