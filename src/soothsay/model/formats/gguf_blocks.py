"""GGML's types of quantized blocks, as integers with scales.

A row of a tensor is a run of blocks of 32 to 256 weights: scales, and integers of 2 to 8 bits, the upper bits
apart from the lower ones. All types have the form of `Quantized`, so nothing is rounded again.

IQ1 to IQ3 take vectors of 8 or 4 magnitudes from a grid. They have at most 16 values with their signs, so
they are integers of 4 bits with a table.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from soothsay.model.formats.four_bit_floats import FP4_VALUES, mxfp4_scales
from soothsay.model.formats.weight_format import Layout, WeightFormat
from soothsay.model.weights.quantized import Kind, Quantized, table_of

NON_LINEAR = table_of(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The integers of IQ4_NL and IQ4_XS."""


Decode = Callable[[Tensor], Quantized]
"""Takes blocks apart: `[blocks, bytes]` uint8. A block is a row of the result."""


def decode(kind: str, data: Tensor) -> Quantized:
    """The weights of rows of a type in `DECODERS`: `[rows, bytes]` uint8."""
    return DECODERS[kind](data.reshape(-1, _size(kind)[1])).each(lambda part: part.reshape(len(data), -1))


def _size(kind: str) -> tuple[int, int]:
    """The weights of a block, and its bytes."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return weights, size


@cache
def loaded(kind: str) -> tuple[int | None, float]:
    """Bits to which a type's integers are widened, None: they are not. Bytes of a weight with its scales."""
    weights, size = _size(kind)
    block = decode(kind, torch.zeros(1, size, dtype=torch.uint8)).in_small_groups()
    if block.bits <= 8 * size / weights:
        return None, size / weights
    scale = block.scales.itemsize if block.table is None else 4  # units of grids are seldom in half precision
    return block.bits, block.bits / 8 + scale / block.group_size


@dataclass(frozen=True)
class BlockRows:
    """A tensor of blocks in a mapped file, read row by row. See `QuantizedRows`."""

    type: str  # one of `DECODERS`
    shape: torch.Size  # [out, in]
    data: npt.NDArray[np.uint8]  # [out, bytes of a row]
    heads: int = 0  # number of heads whose rows are interleaved for llama.cpp's rotation; 0: none
    factor: float = 1.0  # of all scales

    @property
    def kind(self) -> Kind:
        """See `QuantizedRows`."""
        return self.rows(0, 1).kind

    def rows(self, begin: int, end: int) -> Quantized:
        """See `QuantizedRows`."""
        return self.take(torch.arange(begin, end) if self.heads else slice(begin, end))

    def take(self, rows: Tensor | slice) -> Quantized:
        """Some rows: `[n]` int64, their numbers, or a run where none are interleaved."""
        if self.heads and isinstance(rows, Tensor):
            # row (head, half, i) of ours is (head, i, half) of the file
            size = self.shape[0] // self.heads
            head, half, i = rows // size, rows % size // (size // 2), rows % (size // 2)
            rows = head * size + 2 * i + half
        taken = self.data[rows if isinstance(rows, slice) else rows.numpy()]
        made = decode(self.type, torch.from_numpy(taken))
        return made if self.factor == 1 else made.each(lambda scales: scales * self.factor, ["scales"])

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


def _fields(numbers: Tensor, shifts: range, mask: int) -> Tensor:
    """The parts of each number that begin at these bits: `[n, m]` -> `[n, m * len(shifts)]` int32."""
    return (numbers.int()[..., None] >> torch.tensor([*shifts], dtype=torch.int32) & mask).flatten(1)


def _iq4_xs(data: Tensor) -> Quantized:
    low, high = _fields(data[:, 4:8], range(0, 8, 4), 15), _fields(data[:, 2:4], range(0, 8, 2), 3)
    scales = (low | high << 4).to(torch.int8) - 32
    values = _cut(data[:, 8:], 4, 16)
    return Quantized(4, values, scales, units=_halves(data[:, :2]), table=NON_LINEAR)


def _mxfp4(data: Tensor) -> Quantized:
    return Quantized(4, _cut(data[:, 1:], 4, 16), mxfp4_scales(data[:, :1]), table=FP4_VALUES)


def _nvfp4(data: Tensor) -> Quantized:
    scales = (data[:, :4] & 127).view(torch.float8_e4m3fn).float().nan_to_num(0) / 2
    return Quantized(4, _cut(data[:, 4:], 4, 8), scales, table=FP4_VALUES)


@cache
def _grid(kind: str) -> tuple[Tensor, Tensor]:
    """The vectors of a grid `[points]`, and the table of what their bytes stand for.

    A vector is an int64 or int32 of 8 or 4 bytes: the number of a magnitude, to which a sign adds 8.
    """
    points = getattr(quants, kind)
    points.init_grid()
    magnitudes = torch.tensor(points.grid_map, dtype=torch.float32)
    codes = torch.searchsorted(magnitudes, torch.from_numpy(points.grid[0, 0])).to(torch.uint8)
    plus = magnitudes.int().tolist()
    minus = [-value for value in plus]
    if kind in ("IQ1_S", "IQ1_M"):  # an eighth is added or subtracted in place of signs
        plus, minus = [8 * value + 1 for value in plus], [8 * value - 1 for value in plus]
    filling = [0] * (8 - len(plus))
    table = table_of(*plus, *filling, *minus, *filling)
    return codes.view(torch.int64 if codes.shape[1] == 8 else torch.int32).flatten(), table


@cache
def _signs() -> Tensor:
    """`[256]` int64: for each byte of signs 8 bytes, of which those of a minus are 8."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (bits << 3).to(torch.uint8).view(torch.int64).flatten()


def _even(signs: Tensor) -> Tensor:
    """Bytes of signs from 7 bits. The last sign makes the number of minuses even."""
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    return signs | ((parity ^ parity >> 1) & 1) << 7


def _of_grid(kind: str, points: Tensor, signs: Tensor, steps: Tensor, units: Tensor) -> Quantized:
    """Blocks of 256: numbers in the grid, bytes of signs `[n, 32]`, and odd scales 2 * `steps` + 1."""
    grid, table = _grid(kind)
    values = grid[points.long()].view(torch.int64) | _signs()[signs.long()]
    return Quantized(
        4, values.view(torch.uint8), (2 * steps + 1).to(torch.int8), None, None, units, table=table
    )


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as int32: `[n, bytes]` uint8. A copy, since a part of a block may not be aligned."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype).int()


def _iq2_xxs(data: Tensor) -> Quantized:
    words = _words(data[:, 2:], torch.int32)
    points, rest = data[:, 2:].reshape(-1, 8, 8)[..., :4].flatten(1), words[:, 1::2]
    signs = _even(_fields(rest, range(0, 28, 7), 127))
    return _of_grid("IQ2_XXS", points, signs, rest >> 28 & 15, _halves(data[:, :2]) / 8)


def _iq2_xs(data: Tensor) -> Quantized:
    words, steps = _words(data[:, 2:66], torch.int16), _fields(data[:, 66:], range(0, 8, 4), 15)
    return _of_grid("IQ2_XS", words & 511, _even(words >> 9 & 127), steps, _halves(data[:, :2]) / 8)


def _iq2_s(data: Tensor) -> Quantized:
    points = data[:, 2:34].int() | _fields(data[:, 66:74], range(0, 8, 2), 3) << 8
    steps = _fields(data[:, 74:], range(0, 8, 4), 15)
    return _of_grid("IQ2_S", points, data[:, 34:66], steps, _halves(data[:, :2]) / 8)


def _iq3_xxs(data: Tensor) -> Quantized:
    rest = _words(data[:, 66:], torch.int32)
    signs = _even(_fields(rest, range(0, 28, 7), 127))
    return _of_grid("IQ3_XXS", data[:, 2:66], signs, rest >> 28 & 15, _halves(data[:, :2]) / 4)


def _iq3_s(data: Tensor) -> Quantized:
    points = data[:, 2:66].int() | _fields(data[:, 66:74], range(8), 1) << 8
    steps = _fields(data[:, 106:], range(0, 8, 4), 15)
    return _of_grid("IQ3_S", points, data[:, 74:106], steps, _halves(data[:, :2]))


def _iq1_s(data: Tensor) -> Quantized:
    words = _words(data[:, 34:], torch.int16)
    points = data[:, 2:34].int() | _fields(words, range(0, 12, 3), 7) << 8
    signs = _fields(words, range(15, 16), 1).repeat_interleave(4, 1) * 255
    return _of_grid("IQ1_S", points, signs, words >> 12 & 7, _halves(data[:, :2]) / 8)


def _iq1_m(data: Tensor) -> Quantized:
    words = _words(data[:, 48:], torch.int16)
    unit = ((words >> 12 & 15) << torch.arange(0, 16, 4)).sum(1, keepdim=True).to(torch.int16)
    points = data[:, :32].int() | _fields(data[:, 32:48], range(0, 8, 4), 7) << 8
    signs = _fields(data[:, 32:48], range(3, 8, 4), 1) * 255
    return _of_grid(
        "IQ1_M", points, signs, _fields(words, range(0, 12, 3), 7), _halves(unit.view(torch.uint8)) / 8
    )


def _trits(data: Tensor, count: int) -> Tensor:
    """Digits of base 3, the first ones of all bytes, then the second ones. A byte is a fraction of 256."""
    powers = 3 ** torch.arange(count)[:, None]
    return (((data[:, None] * powers & 255) * 3) >> 8).to(torch.uint8).flatten(1)


def _tq1_0(data: Tensor) -> Quantized:
    digits = _trits(data[:, :32], 5), _trits(data[:, 32:48], 5), _trits(data[:, 48:52], 4)
    return Quantized(2, torch.cat(digits, 1) + 1, _halves(data[:, 52:]))


def _tq2_0(data: Tensor) -> Quantized:
    return Quantized(2, _cut(data[:, :64], 2, 32), _halves(data[:, 64:]), torch.ones_like(data[:, :1]))


_ALL = (
    *(_q4_0, _q4_1, _q5_0, _q5_1, _q8_0, _q2_k, _q3_k, _q4_k, _q5_k, _q6_k),
    *(_iq4_nl, _iq4_xs, _mxfp4, _nvfp4, _tq1_0, _tq2_0),
    *(_iq1_s, _iq1_m, _iq2_xxs, _iq2_xs, _iq2_s, _iq3_xxs, _iq3_s),
)
DECODERS: dict[str, Decode] = {one.__name__[1:].upper(): one for one in _ALL}
"""By GGML's names."""


def gguf_format(
    types: Mapping[str, str], open: Callable[[str], BlockRows], bytes_each: float
) -> WeightFormat:
    """The blocks of a GGUF file.

    Args:
        types: by the tensor's name.
        open: returns the tensor of a name.
        bytes_each: of a weight, on average.
    """
    # the types of the blocks, the most common first, and the bits of those that are widened
    widened = {kind: loaded(kind)[0] for kind, _ in Counter(types.values()).most_common()}
    named = (f"{kind} (in {bits} bits)" if bits else kind for kind, bits in widened.items())
    return WeightFormat(
        f"GGUF's {', '.join(named)}",
        8,
        "weight",
        lambda module: Layout(("weight",), lambda read: open(f"{module}.weight")),
        usual=lambda module: True,
        quantized=types,
        bytes_each=bytes_each,
    )
