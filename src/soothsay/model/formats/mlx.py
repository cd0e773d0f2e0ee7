"""Weights of MLX, Apple's library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soothsay.model.formats.four_bit_floats import FP4_VALUES, fp4_scales
from soothsay.model.formats.weight_format import WIDTHS, Reader, Settings, kind, unpack
from soothsay.model.weights.quantized import Kind, Quantized


@dataclass(frozen=True, slots=True)
class PackedRows:
    """A weight in words, of which rows are unpacked when they are needed: a table. See `QuantizedTable`."""

    bits: int  # of a stored integer
    data: Tensor  # [out, in * bits / 32] uint32
    scales: Tensor  # [out, groups], floats
    minimums: Tensor | None  # [out, groups]; None: integers are numbers of `FP4_VALUES`

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size([len(self.data), self.data.shape[1] * 32 // self.bits])

    @property
    def kind(self) -> Kind:
        """See `QuantizedRows`."""
        return self.rows(0, 1).kind

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


@dataclass(frozen=True, slots=True)
class Scheme:
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
        is_affine = widths is WIDTHS
        return cls(bits, settings.one_of("group_size", sizes, default=64), is_affine)

    @property
    def name(self) -> str:
        """For people."""
        if not self.is_affine:
            return f"FP4, groups of {self.group_size}"
        return kind(self.bits, self.group_size)


@dataclass(frozen=True, slots=True)
class MLX:
    """The format of MLX. Embeddings are quantized too."""

    path: Path
    usual: Scheme
    own: Mapping[str, Scheme]  # of single modules

    @classmethod
    def of(cls, settings: Settings) -> MLX:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        mode = settings.values.get("mode", "affine")
        parts = {name: value for name, value in settings.values.items() if isinstance(value, Mapping)}
        own = {
            name: Scheme.of(Settings({"mode": mode, **part}, settings.path)) for name, part in parts.items()
        }
        return cls(settings.path, Scheme.of(settings), own)

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        kinds = dict.fromkeys(scheme.name for scheme in (self.usual, *self.own.values()))
        return f"{' and '.join(kinds)} (MLX)"

    @property
    def bits(self) -> int:
        """See `WeightFormat`."""
        return min(WIDTHS[scheme.bits] for scheme in (self.usual, *self.own.values()))

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.scales" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["weight", "scales"] + ["biases"] * self._scheme(module).is_affine
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str) -> PackedRows:
        """See `WeightFormat`."""
        words, scales, *biases = (read(name) for name in self.tensors(module))
        scheme = self._scheme(module)
        size = words.shape[1] * 32 / scheme.bits
        expected = len(words), size / scheme.group_size
        shapes = [tuple(part.shape) for part in (scales, *biases)]
        if words.dtype != torch.uint32 or words.ndim != 2 or any(shape != expected for shape in shapes):
            raise ValueError(
                f"words {list(words.shape)} {words.dtype}, {shapes}, {scheme.group_size} a group"
            )
        if not biases:
            scales, group = fp4_scales(scales)
            if group != scheme.group_size:
                raise ValueError(f"groups of {scheme.group_size}")
        return PackedRows(scheme.bits, words, scales, biases[0] if biases else None)

    def _scheme(self, module: str) -> Scheme:
        return self.own.get(re.sub(r"\.experts\.\d+\.", ".switch_mlp.", module), self.usual)
