"""What a format of quantized weights is, and what formats share.

A *module* here is a tensor name without its suffix, such as `model.layers.0.self_attn.q_proj`. Formats pack
integers of 4 or 8 bits into 32-bit words. They differ in the axis and the order in which they pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.weights.quantized import Quantized, QuantizedRows

T = TypeVar("T")

Reader = Callable[[str], Tensor]
"""Reads the tensor of a checkpoint that has this name."""

FLAGS = {True: True, False: False}
"""The values of a setting that is true or false."""


WIDTHS = {2: 2, 3: 4, 4: 4, 5: 5, 6: 6, 8: 8}
"""Bits of an integer in a file, and of one in memory."""

REORDERED = ", int8 in groups of 32 where inputs are reordered"
"""What the name of a format says of weights whose groups are not runs of inputs."""

STAY_PLAIN = (
    *(".router", ".kv_b", ".shared_gate"),
    *(f".attention.{part}" for part in ("gates", "low", "decays", "inner", "steps")),
)
"""Linear layers that are not rounded: routers, those of latent attention's heads, and what changes states."""


def usually_quantized(module: str) -> bool:
    """Whether checkpoints usually store the layer that we call `module` quantized."""
    return module != "head" and not module.endswith(STAY_PLAIN)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight is stored."""

    suffixes: tuple[str, ...]
    """Ends of the names of its tensors, after the module's and a dot."""

    decode: Callable[[Reader], QuantizedRows | Tensor]
    """Makes the weight of these tensors, which it reads by their suffixes: in integers; in float32 if it is
    floats, or if its groups are no runs. Raises `ValueError`, or an error of torch, if they make none."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint stores its quantized weights."""

    name: str
    """Bits, group size and origin of the format, for people."""

    bits: int
    """2, 4 or 8: the fewest bits to which the other weights of such a checkpoint may be rounded.

    Floats that `read` returns are rounded to these when they are loaded as integers."""

    mark: str
    """Suffix of the tensor that a quantized module has."""

    layout: Callable[[str], Layout]
    """The layout of a module."""

    usual: Callable[[str], bool] = usually_quantized
    """Whether checkpoints usually store the layer that we call so in this format."""

    quantized: Collection[str] | None = None
    """Names of the tensors that count as marks; None: all that the checkpoint has."""

    bytes_each: float | None = None
    """Memory of a weight on average, if layers have types of their own, which `name` lists."""

    are_fp8: bool = False
    """Weights are floats of 8 bits. As integers of 8 bits, they take as much memory."""

    def holds(self, names: frozenset[str], module: str) -> bool:
        """Whether a checkpoint with tensors `names` stores `module` quantized. If not, it has a `.weight`."""
        return f"{module}.{self.mark}" in (names if self.quantized is None else self.quantized)

    def tensors(self, module: str) -> list[str]:
        """Names of the tensors that `read` reads."""
        return [f"{module}.{suffix}" for suffix in self.layout(module).suffixes]

    def read(self, read: Reader, module: str) -> QuantizedRows | Tensor:
        """The weight of `module`; see `Layout.decode`."""
        return self.layout(module).decode(lambda suffix: read(f"{module}.{suffix}"))


def one_layout(
    name: str,
    bits: int,
    suffixes: Sequence[str],
    decode: Callable[[Reader], QuantizedRows | Tensor],
    mark: str = "",
    **own: Any,
) -> WeightFormat:
    """A format in which all weights have one layout. The mark is the first suffix if none is given."""
    layout = Layout(tuple(suffixes), decode)
    return WeightFormat(name, bits, mark or suffixes[0], lambda module: layout, **own)


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
            "compressed-tensors (pack-quantized of 2, 4 or 8 bits, int-quantized and float-quantized of 8, "
            "nvfp4, mxfp4), gptq and auto-round (2, 3, 4 or 8 bits), awq (gemm, 4 bits), bitsandbytes, hqq, "
            "bitnet, MLX, modelopt (NVFP4 and FP8), fp8 (e4m3) and mxfp4 (experts). Or take the model "
            "that this one was made from, and quantize it with soothsay quantize"
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
    """The integers in rows of words, with what fills the last one. The first is in the lowest bits.

    An integer may begin in one word and end in the next. `[n, k]`, words of any size, to `[n, m]` uint8.
    """
    common = math.gcd(bits, 8)
    data = words.flatten().view(torch.uint8).view(len(words), -1, bits // common)
    values = torch.empty(*data.shape[:2], 8 // common, dtype=torch.uint8)
    for k in range(8 // common):
        at, shift = divmod(k * bits, 8)
        values[..., k] = data[..., at] >> shift
        if shift + bits > 8:
            values[..., k] |= data[..., at + 1] << 8 - shift
    return values.bitwise_and_(2**bits - 1).flatten(1)


def grouped(
    bits: int,
    group_size: int | None,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> Quantized | Tensor:
    """The weight of these tensors. Integers of 3 bits are widened to 4.

    Args:
        bits: of an integer.
        group_size: inputs in a group; None: all.
        values: `[out, in]` uint8.
        scales: `[out, groups]`.
        zeros: `[out, groups]` uint8; None: 2 ** (bits - 1) everywhere.
        groups: `[in]`, the group of each input; None: groups are runs of inputs. If they are not, the weight
            is in float32, since kernels need runs.

    Raises `ValueError` if shapes do not fit each other.
    """
    out, size = values.shape
    count = 1 if group_size is None else size / group_size
    expected = (out, count)  # a fraction equals no shape
    for what, factors in (("scales", scales), ("zero points", zeros)):
        if factors is not None and tuple(factors.shape) != expected:
            raise ValueError(
                f"integers {[out, size]}, {what} {list(factors.shape)}, {kind(bits, group_size)}"
            )
    if groups is not None and not torch.equal(groups.long(), torch.arange(size) // (group_size or size)):
        groups = groups.long()
        if groups.shape != (size,) or groups.min() < 0 or groups.max() >= count:
            raise ValueError(f"its {list(groups.shape)} inputs are not in groups 0 to {count - 1:.0f}")
        middle = 2 ** (bits - 1) if zeros is None else zeros.float()[:, groups]
        return (values.float() - middle) * scales.float()[:, groups]
    if zeros is None:  # the middle moves with the width
        values = values + (2 ** (WIDTHS[bits] - 1) - 2 ** (bits - 1))
    zeros = None if zeros is None else zeros.contiguous()
    return Quantized(WIDTHS[bits], values.contiguous(), scales.float().contiguous(), zeros)


def in_rows(factors: Tensor, group_size: int, out: int, size: int) -> Tensor:
    """Factors of groups that run through all rows, as those of groups within rows.

    `[n]`, for each `group_size` weights of `[out, in]` -> `[out, groups]`.

    Raises `ValueError` if there are more or fewer groups.
    """
    group_size = min(group_size, out * size)
    if factors.shape != (-(-out * size // group_size),):
        raise ValueError(f"{list(factors.shape)} groups of {group_size} in a weight {[out, size]}")
    run = math.gcd(size, group_size)
    return factors.repeat_interleave(group_size // run)[: out * size // run].view(out, -1)


def kind(bits: int, group_size: int | None) -> str:
    """Bits, those in memory if they are others, and groups, for people."""
    groups = "a scale per channel" if group_size is None else f"groups of {group_size}"
    return f"int{bits}{'' if WIDTHS[bits] == bits else f' in {WIDTHS[bits]} bits'}, {groups}"
