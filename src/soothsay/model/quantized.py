"""Weights as small integers with scales, the form that formats are read into and kernels pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB = 2**20
"""Number of weights that are rounded at a time, to save memory."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight `[out, in]` in integers: `weight[o, i] = scales[o, g] * (values[o, i] - zeros[o, g])`.

    Groups are runs of `group_size` inputs; a single group is a scale per output channel.
    """

    bits: int  # 4 or 8
    values: Tensor  # [out, in] uint8, below 2 ** bits
    scales: Tensor  # [out, groups] float32
    zeros: Tensor | None = None  # [out, groups] uint8; None: symmetric, 2 ** (bits - 1) everywhere

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.values.shape

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """The weight in float32."""
        out, groups = self.scales.shape
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        values = self.values.view(out, groups, -1).float() - zeros
        return (values * self.scales[..., None]).view(self.values.shape)

    @staticmethod
    def cat(parts: Sequence[Quantized]) -> Quantized:
        """Weights joined along their rows. Raises `ValueError` if bits, groups or zero points differ."""
        if len(parts) == 1:
            return parts[0]
        kinds = {(part.bits, part.group_size, part.zeros is None) for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"weights that are quantized differently cannot be joined: {sorted(kinds)}")
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return Quantized(
            parts[0].bits,
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(zeros) if zeros else None,
        )


def round_to_nearest(weight: Tensor, bits: int, group_size: int | None = None) -> Quantized:
    """The nearest symmetric integers for a weight `[out, in]`.

    The largest value of a group maps to the end of the range, up to the scale's rounding to bfloat16. Without
    `group_size`, a row is a group.

    Raises `ValueError` if `in` is not a multiple of `group_size`.
    """
    size = weight.shape[1]
    group_size = group_size or size
    if size % group_size:
        raise ValueError(f"{size} inputs cannot be divided into groups of {group_size}")
    end, slab = 2 ** (bits - 1) - 1, max(SLAB // size, 1)
    values = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(len(weight), size // group_size)
    for begin in range(0, len(weight), slab):
        rows = slice(begin, begin + slab)
        groups = weight[rows].float().view(-1, size // group_size, group_size)
        scales[rows] = (groups.abs().amax(-1) / end).bfloat16().float()
        nearest = (groups / scales[rows].clamp_min(1e-30)[..., None]).round_().clamp_(-end, end) + (end + 1)
        values[rows] = nearest.flatten(1).to(torch.uint8)
    return Quantized(bits, values, scales)
