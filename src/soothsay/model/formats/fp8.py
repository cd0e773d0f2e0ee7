"""Weights in FP8 (E4M3: Micikevicius et al. 2022, arXiv 2209.05433), with scales.

DeepSeek-V3 and the FP8 versions of Qwen3 have a scale for each block of 128 x 128 weights. LLM Compressor
writes a scale for each output, or one for the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from soothsay.model.formats.weight_format import Reader, Settings


@dataclass(frozen=True, slots=True)
class FP8:
    """Floats of 8 bits, and factors of their blocks.

    Kernels multiply integers and not floats of 8 bits, so weights are dequantized and rounded to integers of
    8 bits in groups of 32 inputs. They take as much memory. The error is small beside FP8's own: 0.6% of a
    weight matrix's norm, and 2.6% (both measured on normally distributed weights).
    """

    path: Path
    scale: str = "weight_scale_inv"
    """Suffix of the factors' name: `[ceil(out / rows), ceil(in / columns)]`, `[out, 1]`, or one number."""

    block: tuple[int, int] | None = None
    """Rows and columns of a block; None: one factor for each row, or for all."""

    bits: int = 8
    name: str = "FP8"

    @classmethod
    def of(cls, settings: Settings) -> FP8:
        """Read the configuration of DeepSeek and Qwen. Raises `ModelError` for an unknown setting."""
        settings.one_of("fmt", {"e4m3": 1, "float8_e4m3fn": 1}, default="e4m3")
        written_by_autofp8 = "ignored_layers" in settings.values
        return cls(
            settings.path,
            "weight_scale" if written_by_autofp8 else "weight_scale_inv",
            _block(settings, "weight_block_size"),
        )

    @classmethod
    def of_compressed_tensors(cls, settings: Settings) -> FP8:
        """Read the configuration of compressed-tensors. Raises `ModelError` for an unknown setting."""
        blocks = set()
        groups = settings.part("config_groups")
        for name in groups.values:
            scheme = groups.part(name).part("weights")
            scheme.one_of("type", {"float": 1})
            scheme.one_of("num_bits", {8: 8})
            scheme.one_of("symmetric", {True: True}, default=True)
            by_block = scheme.one_of("strategy", {"tensor": False, "channel": False, "block": True})
            blocks.add(_block(scheme, "block_structure") if by_block else None)
        if len(blocks) != 1:
            raise settings.refusal(f"compressed-tensors of floats with {len(blocks)} sizes of blocks")
        return cls(settings.path, "weight_scale", blocks.pop())

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.{self.scale}" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.weight", f"{module}.{self.scale}"]

    def read(self, read: Reader, module: str) -> Tensor:
        """The weight of `module`, `[out, in]` float32."""
        values, scales = (read(name) for name in self.tensors(module))
        if values.dtype != torch.float8_e4m3fn or values.ndim != 2:
            raise ValueError(f"a weight of {values.dtype}, {list(values.shape)}, and not a matrix in e4m3")
        if scales.dtype == torch.uint8:  # exponents of two
            scales = scales.view(torch.float8_e8m0fnu)
        if not scales.is_floating_point():
            raise ValueError(f"scales of {scales.dtype}")
        factors = scales.float()
        if scales.numel() == 1:
            return values.float() * factors.reshape(1, 1)
        out, size = values.shape
        rows, columns = self.block or (1, size)
        expected = -(-out // rows), -(-size // columns)
        if factors.reshape(len(factors), -1).shape != expected:
            raise ValueError(
                f"scales {list(scales.shape)} for {list(values.shape)}, {list(expected)} are needed"
            )
        factors = factors.reshape(expected).repeat_interleave(columns, 1)[:, :size]
        weight = values.float()
        weight *= factors.repeat_interleave(rows, 0)[:out] if rows > 1 else factors
        return weight


def _block(settings: Settings, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block. Raises `ModelError` for values that are none."""
    size = settings.values.get(key)
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(n) is int and 0 < n < 2**31 for n in size)
    ):
        raise settings.refusal(f"{key} {size!r:.80}")
    return size[0], size[1]
