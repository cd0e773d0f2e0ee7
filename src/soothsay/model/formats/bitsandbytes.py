"""Weights that bitsandbytes has rounded: NF4, FP4, and integers of 8 bits with a scale for each row.

NF4, and the double quantization of its scales: Dettmers et al. 2023, QLoRA, arXiv 2305.14314.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import FLAGS, Reader, Settings, checked, in_rows, unpack
from soothsay.model.weights.quantized import Quantized

STEPS = {"nf4": 112, "fp4": 120}
"""Where products need integers, the 16 values of a type are rounded to multiples of one in this many.

Of all numbers below 127, 112 leaves the least error of NF4: 0.0017 of a block's largest weight. All values of
FP4 but the smallest are multiples of 1 / 120.
"""

MAX_STATE = 4096
"""Limit of the JSON object beside a weight, in bytes. It has 10 entries."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The format of bitsandbytes. Blocks of 4-bit weights run through all rows."""

    path: Path
    kind: str  # nf4, fp4 or int8
    nested: bool  # scales are quantized too

    @classmethod
    def of(cls, settings: Settings) -> BitsAndBytes:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        if settings.one_of("load_in_8bit", FLAGS, default=False):
            return cls(settings.path, "int8", nested=False)
        settings.one_of("load_in_4bit", {True: True})
        kind = settings.one_of("bnb_4bit_quant_type", {one: one for one in STEPS}, default="fp4")
        return cls(settings.path, kind, settings.one_of("bnb_4bit_use_double_quant", FLAGS, default=False))

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        rounded = "" if self.kind == "int8" else f", values rounded to 1 / {STEPS[self.kind]}"
        return f"{self.kind.upper()} (bitsandbytes{rounded})"

    @property
    def bits(self) -> int:
        """See `WeightFormat`."""
        return 8 if self.kind == "int8" else 4

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.{'SCB' if self.kind == 'int8' else 'weight.absmax'}" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        if self.kind == "int8":
            return [f"{module}.weight", f"{module}.SCB"]
        suffixes = [f".quant_state.bitsandbytes__{self.kind}", ".quant_map", ".absmax"]
        suffixes += [".nested_quant_map", ".nested_absmax"] if self.nested else []
        return [f"{module}.weight{suffix}" for suffix in ("", *suffixes)]

    def read(self, read: Reader, module: str) -> Quantized | Tensor:
        """See `WeightFormat`."""
        packed, *rest = (read(name) for name in self.tensors(module))
        if self.kind == "int8":
            values, scales = packed.view(torch.uint8) ^ 128, rest[0].float()[:, None] / 127
            return checked(f"{self.path}: {module}", 8, None, values, scales, None)
        state, table, largest, *nested = rest
        stated = _State(state)
        out, size = stated.whole("shape", 0), stated.whole("shape", 1)
        data = packed.contiguous().view(torch.uint8).flatten()
        if table.shape != (16,) or not table.abs().max() <= 1 or 2 * len(data) != out * size:
            raise ValueError(f"{len(data):,} bytes for {[out, size]}, values {list(table.shape)}")
        if nested:
            codes, scales = (tensor.float() for tensor in nested)
            count = len(largest)
            blocks = in_rows(scales, stated.whole("nested_blocksize"), 1, count).flatten()
            block = count // len(blocks)
            largest = codes[largest.long()] * blocks.repeat_interleave(block) + stated.number("nested_offset")
        scales = in_rows(largest.float(), stated.whole("blocksize"), out, size) / STEPS[self.kind]
        values = unpack(data[None], 4).view(-1, 2).flip(-1).view(out, size)  # the first in the upper half
        return Quantized(4, values, scales.contiguous(), table=table.float() * STEPS[self.kind])


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
