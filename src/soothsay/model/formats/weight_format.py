"""What a format of quantized weights is, and what formats share.

A *module* here is a tensor name without its suffix, such as `model.layers.0.self_attn.q_proj`. Formats pack
integers of 4 or 8 bits into 32-bit words. They differ in the axis and the order in which they pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.weights.quantized import Quantized, QuantizedRows

T = TypeVar("T")

Reader = Callable[[str], Tensor]
"""Reads the tensor of a checkpoint that has this name."""

FLAGS = {True: True, False: False}
"""The values of a setting that is true or false."""


class WeightFormat(Protocol):
    """How a checkpoint stores its quantized weights."""

    @property
    def name(self) -> str:
        """Bits, group size and origin of the format, for people."""

    @property
    def bits(self) -> int:
        """4 or 8: the fewest bits to which the other weights of such a checkpoint may be rounded.

        Floats that the format itself has (FP8) are rounded to these when they are loaded as integers.
        """

    def holds(self, names: frozenset[str], module: str) -> bool:
        """Whether a checkpoint with tensors `names` stores `module` quantized. If not, it has a `.weight`."""

    def tensors(self, module: str) -> list[str]:
        """Names of the tensors that `read` reads."""

    def read(self, read: Reader, module: str) -> QuantizedRows | Tensor:
        """The weight of `module`, in integers. In float32 if the format is one of floats.

        Raises `ModelError` if shapes do not fit each other, or if a group is not a run of inputs.
        """


@dataclass(frozen=True, slots=True)
class Settings:
    """A `quantization_config`, or a part of it."""

    values: Mapping[str, Any]
    path: Path

    def one_of(self, key: str, known: Mapping[Any, T], default: Any = None) -> T:
        """What `known` has for the value at `key`. Raises `ModelError` for a value that it does not have."""
        value = self.values.get(key, default)
        if isinstance(value, str | int | None) and value in known:
            return known[value]
        raise self.refusal(f"{key} {value!r}")

    def part(self, key: str) -> Settings:
        """The settings at `key`, empty if there are none. Raises `ModelError` for another value."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.refusal(f"{key} {value!r:.80}, which is no object")
        return Settings(value, self.path)

    def group_size(self, key: str = "group_size") -> int | None:
        """Number of inputs that share a scale; None: all of them."""
        size = self.values.get(key)
        if size is None or size == -1:
            return None
        if not isinstance(size, int) or not 1 <= size < 2**31:
            raise self.refusal(f"{key} {size!r}")
        return size

    def refusal(self, what: str) -> ModelError:
        """The error for a setting that is not supported."""
        return ModelError(
            f"{self.path} is quantized in a way that soothsay does not read: {what}. It reads "
            "compressed-tensors (pack-quantized of 4 or 8 bits, int-quantized and float-quantized of 8), "
            "gptq (4 or 8 bits), awq (gemm, 4 bits), fp8 (e4m3) and mxfp4 (experts). Or take the model that "
            "this one was made from, and quantize it with soothsay quantize"
        )


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack integers along a row, the first in a word's lowest bits, the last word filled with zeros.

    `[n, m]` uint8 -> `[n, ceil(m * bits / 32)]` int32.
    """
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    words = values.flatten().view(torch.int32)  # every machine that torch runs on is little-endian
    return words.view(len(values), values.shape[1] // 4)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The reverse of `pack`, with its filling: `[n, k]` int32 -> `[n, k * 32 / bits]` uint8."""
    values = words.flatten().view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1)
    return values.view(len(words), words.shape[1] * 32 // bits)


def checked(
    where: str, bits: int, group_size: int | None, values: Tensor, scales: Tensor, zeros: Tensor | None
) -> Quantized:
    """A `Quantized` of these tensors. Raises `ModelError` if their shapes do not fit each other."""
    out, size = values.shape
    expected = (out, 1 if group_size is None else size / group_size)  # a fraction equals no shape
    shapes = {"scales": scales.shape} | ({} if zeros is None else {"zero points": zeros.shape})
    for what, shape in shapes.items():
        if tuple(shape) != expected:
            raise ModelError(
                f"{where}: integers {[out, size]} and {what} {list(shape)} do not make a weight "
                f"of {kind(bits, group_size)}; the file is damaged, or config.json belongs to another model"
            )
    zeros = None if zeros is None else zeros.contiguous()
    return Quantized(bits, values.contiguous(), scales.float().contiguous(), zeros)


def require_runs(groups: Tensor, group_size: int | None, where: str, setting: str) -> None:
    """Check that each group is a run of inputs, in order.

    Args:
        groups: `[in]`, the group of each input.
        group_size: inputs in a group; None: all.
        where: path and module, for the error message.
        setting: the setting that allows other groups, for the error message.

    Raises `ModelError` if they are not.
    """
    runs = torch.arange(len(groups)) // (group_size or len(groups))
    if not torch.equal(groups.long(), runs):
        raise ModelError(
            f"{where} was quantized with {setting}: its groups are not runs of inputs, which soothsay's "
            "kernels need. Take a version made without it, or quantize the model with soothsay quantize"
        )


def kind(bits: int, group_size: int | None) -> str:
    """Bits and groups, for people."""
    return f"int{bits}, " + ("a scale per channel" if group_size is None else f"groups of {group_size}")
