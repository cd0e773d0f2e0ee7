"""GGML's types of quantized blocks, as integers with scales.

A row of a tensor is a run of blocks of 32 or 256 weights: scales, and integers of 2 to 8 bits, the upper bits
apart from the lower ones. All types have the form of `Quantized`, so nothing is rounded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from soothsay.model.formats.declared import MXFP4_VALUES, mxfp4_scales
from soothsay.model.formats.weight_format import Reader
from soothsay.model.weights.quantized import Kind, Quantized, table_of

NON_LINEAR = table_of(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The integers of IQ4_NL and IQ4_XS."""


Decode = Callable[[Tensor], Quantized]
"""Takes blocks apart: `[blocks, bytes]` uint8. A block is a row of the result."""


def decode(kind: str, data: Tensor) -> Quantized:
    """The weights of rows of a type in `DECODERS`: `[rows, bytes]` uint8."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return DECODERS[kind](data.reshape(-1, size)).each(lambda part: part.reshape(len(data), -1))


@dataclass(frozen=True)
class BlockRows:
    """A tensor of blocks in a mapped file, read row by row. See `QuantizedRows`."""

    type: str  # one of `DECODERS`
    shape: torch.Size  # [out, in]
    data: npt.NDArray[np.uint8]  # [out, bytes of a row]
    heads: int = 0  # number of heads whose rows are interleaved for llama.cpp's rotation; 0: none

    @property
    def kind(self) -> Kind:
        """See `QuantizedRows`."""
        return self.rows(0, 1).kind

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        if self.heads:
            return self.take(torch.arange(begin, end))
        return decode(self.type, torch.from_numpy(self.data[begin:end]))

    def take(self, rows: Tensor) -> Quantized:
        """Some rows: `[n]` int64, their numbers."""
        if self.heads:  # row (head, half, i) of ours is (head, i, half) of the file
            size = self.shape[0] // self.heads
            head, half, i = rows // size, rows % size // (size // 2), rows % (size // 2)
            rows = head * size + 2 * i + half
        return decode(self.type, torch.from_numpy(self.data[rows.numpy()]))

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32: `[n]` int64, their numbers, to `[n, in]`."""
        return self.take(rows).dequantize()


def _halves(data: Tensor) -> Tensor:
    """Numbers in half precision: `[n, 2 m]` uint8 -> `[n, m]` float32."""
    return data.contiguous().view(torch.float16).float()


def _cut(data: Tensor, bits: int, run: int) -> Tensor:
    """Integers above each other: those in the lowest bits of `run` bytes, then those in the next bits."""
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int32)  # four bytes at once
    runs = words.view(len(data), -1, run // 4)
    cut = torch.empty(*runs.shape[:2], 8 // bits, run // 4, dtype=torch.int32)
    for field in range(8 // bits):
        torch.bitwise_right_shift(runs, bits * field, out=cut[:, :, field])
    return cut.bitwise_and_(0x01010101 * ((1 << bits) - 1)).view(len(data), -1).view(torch.uint8)


def _q4_0(data: Tensor) -> Quantized:
    return Quantized(4, _cut(data[:, 2:], 4, 16), _halves(data[:, :2]))


def _q4_1(data: Tensor) -> Quantized:
    return Quantized(4, _cut(data[:, 4:], 4, 16), _halves(data[:, :2]), minimums=_halves(data[:, 2:4]))


def _fifth(low: Tensor, high: Tensor) -> Tensor:
    """Integers of 5 bits in blocks of 32, from their lower four bits, and a word with all fifth bits."""
    bits = high[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _cut(low, 4, 16) | bits.view(len(high), 32) << 4


def _q5_0(data: Tensor) -> Quantized:
    return Quantized(5, _fifth(data[:, 6:], data[:, 2:6]), _halves(data[:, :2]))


def _q5_1(data: Tensor) -> Quantized:
    return Quantized(
        5, _fifth(data[:, 8:], data[:, 4:8]), _halves(data[:, :2]), minimums=_halves(data[:, 2:4])
    )


def _q8_0(data: Tensor) -> Quantized:
    return Quantized(8, data[:, 2:] ^ 128, _halves(data[:, :2]))


def _q2_k(data: Tensor) -> Quantized:
    factors, units = data[:, :16], _halves(data[:, 80:])
    scales, minimums = (factors & 15).view(torch.int8), (factors >> 4).view(torch.int8)
    return Quantized(2, _cut(data[:, 16:80], 2, 32), scales, None, minimums, units[:, :1], -units[:, 1:])


def _q3_k(data: Tensor) -> Quantized:
    packed = data[:, 96:108]
    scales = _cut(packed[:, :8], 4, 8) | _cut(packed[:, 8:], 2, 4) << 4
    values = _cut(data[:, 32:96], 2, 32) | _cut(data[:, :32], 1, 32) << 2  # 4 more than the weight's integer
    return Quantized(4, values + 4, scales.view(torch.int8) - 32, units=_halves(data[:, 108:]))


def _factors_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minimums of 6 bits from 12 bytes: `[n, 12]` -> `[n, 8]` int8 each."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 1)
    return scales.view(torch.int8), minimums.view(torch.int8)


def _with_minimums(bits: int, data: Tensor, values: Tensor) -> Quantized:
    units = _halves(data[:, :4])
    scales, minimums = _factors_of_k(data[:, 4:16])
    return Quantized(bits, values, scales, None, minimums, units[:, :1], -units[:, 1:])


def _q4_k(data: Tensor) -> Quantized:
    return _with_minimums(4, data, _cut(data[:, 16:], 4, 32))


def _q5_k(data: Tensor) -> Quantized:
    return _with_minimums(5, data, _cut(data[:, 48:], 4, 32) | _cut(data[:, 16:48], 1, 32) << 4)


def _q6_k(data: Tensor) -> Quantized:
    values = _cut(data[:, :128], 4, 64) | _cut(data[:, 128:192], 2, 32) << 4
    return Quantized(6, values, data[:, 192:208].view(torch.int8), units=_halves(data[:, 208:]))


def _iq4_nl(data: Tensor) -> Quantized:
    return Quantized(4, _cut(data[:, 2:], 4, 16), _halves(data[:, :2]), table=NON_LINEAR)


def _iq4_xs(data: Tensor) -> Quantized:
    low = torch.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], 2).view(-1, 8)
    high = (data[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).view(-1, 8)
    scales = (low | high << 4).view(torch.int8) - 32
    values = _cut(data[:, 8:], 4, 16)
    return Quantized(4, values, scales, units=_halves(data[:, :2]), table=NON_LINEAR)


def _mxfp4(data: Tensor) -> Quantized:
    return Quantized(4, _cut(data[:, 1:], 4, 16), mxfp4_scales(data[:, :1]), table=MXFP4_VALUES)


_ALL = (
    *(_q4_0, _q4_1, _q5_0, _q5_1, _q8_0, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k),
    *(_iq4_nl, _iq4_xs, _mxfp4),
)
DECODERS: dict[str, Decode] = {one.__name__[1:].upper(): one for one in _ALL}
"""By GGML's names."""


@dataclass(frozen=True)
class GGUFFormat:
    """The blocks of a GGUF file. See `WeightFormat`."""

    types: Mapping[str, str]  # by the tensor's name
    open: Callable[[str], BlockRows]  # the tensor of this name
    bytes_each: float  # of a weight, on average

    bits: int = 8

    @property
    def name(self) -> str:
        """The types of the blocks, the most common first."""
        return f"GGUF's {', '.join(kind for kind, _ in Counter(self.types.values()).most_common())}"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.weight" in self.types

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.weight"]

    def read(self, read: Reader, module: str) -> BlockRows:
        """See `WeightFormat`."""
        return self.open(f"{module}.weight")
