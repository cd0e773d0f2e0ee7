"""Weights of MLX, Apple's library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from soothsay.model.formats.four_bit_floats import FP4_VALUES, fp4_scales
from soothsay.model.formats.weight_format import WIDTHS, Layout, Reader, Settings, WeightFormat, kind, unpack
from soothsay.model.weights.quantized import Quantized, QuantizedTable


@dataclass(frozen=True, slots=True)
class PackedRows(QuantizedTable):
    """A weight in words, of which rows are unpacked when they are needed: a table. See `QuantizedTable`."""

    bits: int  # of a stored integer
    data: Tensor  # [out, in * bits / 32] uint32
    scales: Tensor  # [out, groups], floats
    minimums: Tensor | None  # [out, groups]; None: integers are numbers of `FP4_VALUES`

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size([len(self.data), self.data.shape[1] * 32 // self.bits])

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        return self.take(slice(begin, end))

    def take(self, rows: Tensor | slice) -> Quantized:
        """Some rows: `[n]` int64, their numbers."""
        values = unpack(self.data.view(torch.int32)[rows], self.bits)
        scales, minimums = self.scales[rows].float(), self.minimums
        if minimums is None:
            return Quantized(4, values, scales, table=FP4_VALUES)
        return Quantized(WIDTHS[self.bits], values, scales, minimums=minimums[rows].float())

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32: `[n]` int64, their numbers, to `[n, in]`."""
        return self.take(rows).dequantize()


class Scheme(NamedTuple):
    """How a weight is stored: `weight` `[out, in * bits / 32]` uint32, and its factors.

    `scales` and `biases` are `[out, groups]`: `weight = scale * integer + bias`.
    """

    bits: int
    group_size: int
    is_affine: bool  # else floats of 4 bits, MXFP4 or NVFP4, without biases

    @classmethod
    def of(cls, settings: Settings) -> Scheme:
        """Read the settings of all weights or of one. Raises `ModelError` for an unknown one."""
        modes = {"affine": WIDTHS, "mxfp4": [4], "nvfp4": [4]}
        widths = settings.one_of("mode", modes, default="affine")
        bits = settings.one_of("bits", {width: width for width in widths}, default=4)
        sizes = {size: size for size in (16, 32, 64, 128)}
        return cls(bits, settings.one_of("group_size", sizes, default=64), widths is WIDTHS)

    @property
    def name(self) -> str:
        """For people."""
        if not self.is_affine:
            return f"FP4, groups of {self.group_size}"
        return kind(self.bits, self.group_size)

    def decode(self, read: Reader) -> PackedRows:
        """See `Layout`."""
        words, scales, *biases = map(read, self.layout.suffixes)
        size = words.shape[1] * 32 / self.bits
        expected = len(words), size / self.group_size
        shapes = [tuple(part.shape) for part in (scales, *biases)]
        if words.dtype != torch.uint32 or words.ndim != 2 or any(shape != expected for shape in shapes):
            raise ValueError(f"words {list(words.shape)} {words.dtype}, {shapes}, {self.group_size} a group")
        if not biases:
            scales, group = fp4_scales(scales)
            if group != self.group_size:
                raise ValueError(f"groups of {self.group_size}")
        return PackedRows(self.bits, words, scales, biases[0] if biases else None)

    @property
    def layout(self) -> Layout:
        """The tensors of a weight."""
        return Layout(("weight", "scales", *["biases"] * self.is_affine), self.decode)


def mlx(settings: Settings) -> WeightFormat:
    """The format of MLX. Embeddings are quantized too. Raises `ModelError` for an unknown setting."""
    mode, usual = settings.values.get("mode", "affine"), Scheme.of(settings)
    own = {  # of single modules
        name: Scheme.of(Settings({"mode": mode, **part}, settings.path))
        for name, part in settings.values.items()
        if isinstance(part, Mapping)
    }
    schemes = [usual, *own.values()]
    kinds = dict.fromkeys(scheme.name for scheme in schemes)

    def layout(module: str) -> Layout:
        return own.get(re.sub(r"\.experts\.\d+\.", ".switch_mlp.", module), usual).layout

    bits = min(WIDTHS[scheme.bits] for scheme in schemes)
    return WeightFormat(f"{' and '.join(kinds)} (MLX)", bits, "scales", layout)
