"""Weights that bitsandbytes has rounded: NF4, FP4, and integers of 8 bits with a scale for each row.

NF4, and the double quantization of its scales: Dettmers et al. 2023, QLoRA, arXiv 2305.14314.
"""

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import (
    FLAGS,
    Reader,
    Settings,
    WeightFormat,
    grouped,
    in_rows,
    one_layout,
    unpack,
)
from soothsay.model.weights.quantized import Quantized

STEPS = {"nf4": 112, "fp4": 120}
"""Where products need integers, the 16 values of a type are rounded to multiples of one in this many.

Of all numbers below 127, 112 leaves the least error of NF4: 0.0017 of a block's largest weight. All values of
FP4 but the smallest are multiples of 1 / 120.
"""

MAX_STATE = 4096
"""Limit of the JSON object beside a weight, in bytes. It has 10 entries."""


def bitsandbytes(settings: Settings) -> WeightFormat:
    """The format of bitsandbytes. Raises `ModelError` for an unknown setting."""
    if settings.one_of("load_in_8bit", FLAGS, default=False):
        return one_layout("INT8 (bitsandbytes)", 8, ("weight", "SCB"), _int8, mark="SCB")
    settings.one_of("load_in_4bit", {True: True})
    kind = settings.one_of("bnb_4bit_quant_type", {one: one for one in STEPS}, default="fp4")
    nested = settings.one_of("bnb_4bit_use_double_quant", FLAGS, default=False)
    suffixes = ["", f".quant_state.bitsandbytes__{kind}", ".quant_map", ".absmax"]
    suffixes += [".nested_quant_map", ".nested_absmax"] if nested else []  # scales are quantized too
    return one_layout(
        f"{kind.upper()} (bitsandbytes, values rounded to 1 / {STEPS[kind]})",
        4,
        [f"weight{suffix}" for suffix in suffixes],
        partial(_four_bits, kind, nested),
        mark="weight.absmax",
    )


def _int8(read: Reader) -> Quantized | Tensor:
    values, scales = read("weight").view(torch.uint8) ^ 128, read("SCB").float()[:, None] / 127
    return grouped(8, None, values, scales)


def _four_bits(kind: str, nested: bool, read: Reader) -> Quantized:
    """Blocks of weights run through all rows."""
    state = _State(read(f"weight.quant_state.bitsandbytes__{kind}"))
    table, largest = read("weight.quant_map"), read("weight.absmax")
    out, size = state.whole("shape", 0), state.whole("shape", 1)
    data = read("weight").contiguous().view(torch.uint8).flatten()
    if table.shape != (16,) or not table.abs().max() <= 1 or 2 * len(data) != out * size:
        raise ValueError(f"{len(data):,} bytes for {[out, size]}, values {list(table.shape)}")
    if nested:
        codes, scales = read("weight.nested_quant_map").float(), read("weight.nested_absmax").float()
        count = len(largest)
        blocks = in_rows(scales, state.whole("nested_blocksize"), 1, count).flatten()
        block = count // len(blocks)
        largest = codes[largest.long()] * blocks.repeat_interleave(block) + state.number("nested_offset")
    scales = in_rows(largest.float(), state.whole("blocksize"), out, size) / STEPS[kind]
    values = unpack(data[None], 4).view(-1, 2).flip(-1).view(out, size)  # the first in the upper half
    return Quantized(4, values, scales.contiguous(), table=table.float() * STEPS[kind])


class _State:
    """The JSON object beside a weight, as bytes in a tensor. Raises `ValueError` for what is none."""

    def __init__(self, data: Tensor):
        if data.dtype != torch.uint8 or data.numel() > MAX_STATE:
            raise ValueError(f"a quant_state of {data.numel():,} {data.dtype}")
        try:
            self._values = dict(json.loads(bytes(data.flatten().tolist())))
        except RecursionError:
            raise ValueError("a quant_state that is nested too deep") from None

    def whole(self, key: str, index: int | None = None) -> int:
        """A positive integer, or one in a list."""
        value: Any = self._values.get(key)
        if index is not None:
            value = value[index] if isinstance(value, list) and len(value) == 2 else None
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"quant_state has {key} {self._values.get(key)!r:.80}")
        return value

    def number(self, key: str) -> float:
        """A number."""
        value: Any = self._values.get(key)
        if type(value) not in (int, float):
            raise ValueError(f"quant_state has {key} {value!r:.80}")
        return float(value)
