"""Weights of HQQ (half-quadratic quantization), as its library and transformers save them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from soothsay.model.formats.weight_format import WIDTHS, Reader, Settings, in_rows, kind
from soothsay.model.weights.quantized import Quantized


@dataclass(frozen=True, slots=True)
class HQQ:
    """Integers in groups that run through all rows, with zero points that are floats.

    `W_q` `[groups / n, group_size]` has n integers in each uint8, or 10 of 3 bits in each int32: groups of
    the first n-th of the weight in the upper bits, then those of the second. `scale` and `zero` are
    `[groups, 1]`, and `shape` is that of the weight.
    """

    path: Path
    stored: int  # bits of an integer
    group_size: int | None  # None: a row

    @classmethod
    def of(cls, settings: Settings) -> HQQ:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        parts = settings.part("quant_config")
        for name in ("scale_quant_params", "zero_quant_params"):
            if parts.values.get(name):
                raise settings.refusal(f"hqq with {name}")
        weights = parts.part("weight_quant_params")
        weights.one_of("axis", {1: 1})  # groups of axis 0 are columns
        bits = weights.one_of("nbits", {bits: bits for bits in (2, 3, 4, 8)})
        return cls(settings.path, bits, weights.group_size())

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{kind(self.stored, self.group_size)} (HQQ)"

    @property
    def bits(self) -> int:
        """See `WeightFormat`."""
        return WIDTHS[self.stored]

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.W_q" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.{suffix}" for suffix in ("W_q", "scale", "zero", "shape")]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        packed, scale, zero, shape = (read(name) for name in self.tensors(module))
        out, size = (int(number) for number in shape)
        words = packed.view(torch.int32 if self.stored == 3 else torch.uint8)  # may be saved as floats
        count = 10 if self.stored == 3 else 8 // self.stored
        group = self.group_size or size
        groups = out * size // group
        shapes = tuple(words.shape), tuple(scale.shape), tuple(zero.shape)
        if shapes != ((-(-groups // count), group), (groups, 1), (groups, 1)):
            raise ValueError(f"{shapes} for {[out, size]}")
        shifts = range(self.stored * (count - 1), -1, -self.stored)
        fields = [(words >> shift & 2**self.stored - 1).to(torch.uint8) for shift in shifts]
        values = torch.cat(fields)[:groups].view(out, size)
        scales = scale.float()
        factors = [in_rows(part.flatten(), group, out, size) for part in (scales, -zero.float() * scales)]
        return Quantized(self.bits, values, factors[0], minimums=factors[1])
