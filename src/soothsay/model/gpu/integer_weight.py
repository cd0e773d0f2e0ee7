"""Weights in integers, in the order in which a GPU's kernels read them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.model.gpu.launching import launch
from soothsay.model.gpu.source import linear as source
from soothsay.model.gpu.tiles import Tile, span_of
from soothsay.model.weights.quantized import Quantized, QuantizedRows, slabs

PANEL, STEP = source.PANEL.value, source.STEP.value

GROUPS = 16, 32, 64
"""Inputs of a group, as the kernels know them."""


class IntegerWeight(nn.Module):
    """A weight in integers of 4 or 8 bits, packed slab by slab, without a second copy.

    See `multiply_integers`. Integers of 2 bits take 4; those of 5 and 6 bits and of tables take 8. That
    changes no bit of a product.
    """

    kind = "integer"
    packed: Tensor
    factors: Tensor
    units: Tensor | None

    def __init__(self, weight: QuantizedRows, device: torch.device | str):
        super().__init__()
        self.shape = outputs, inputs = weight.shape
        first = weight.rows(0, 1).in_small_groups()
        self.bits = 4 if first.bits <= 4 and first.table is None else 8
        self.group, self.steps = first.group_size, -(-inputs // STEP)
        self.span = span_of(self.kind, outputs, inputs)
        panels, dtype = -(-outputs // PANEL), torch.uint8 if self.bits == 4 else torch.int8
        shape = panels, self.steps, PANEL * STEP * self.bits // 8
        packed, kept = torch.empty(shape, dtype=dtype, device=device), []
        for begin, end in slabs(weight, PANEL):
            rows = weight.rows(begin, end).in_small_groups()
            packed[begin // PANEL : -(-end // PANEL)] = self._pack(rows, device)
            kept.append(rows.without_values())
        whole = Quantized.cat(kept)
        self.offset: int = source.NO_OFFSET.value
        if whole.minimums is not None or whole.zeros is not None:
            self.offset = source.MINIMUMS.value if whole.zeros is None else source.ZEROS.value
        units = _units(whole, inputs)
        factors = _factors(whole, as_stored=units is not None)
        self.unit_steps = 0 if units is None else self.steps // units.shape[1]
        self.width = 8 * factors.itemsize
        self.register_buffer("packed", packed)
        self.register_buffer("factors", _words(factors, self.steps, STEP // self.group).to(device))
        self.register_buffer("units", None if units is None else _words(units, units.shape[1], 1).to(device))

    @staticmethod
    def fit(weight: QuantizedRows) -> bool:
        """Whether the kernels multiply this weight."""
        rows = weight.rows(0, 1).in_small_groups()
        signed = rows.minimums is None or (rows.bits < 8 and rows.zeros is None)
        return signed and rows.group_size in GROUPS

    def multiply(
        self,
        x: Tensor,
        out: Tensor,
        bias: Tensor | None,
        tile: Tile,
        grid: tuple[int, int, int],
        each: int,
    ) -> None:
        """Quantize rows `[M, in]` and multiply them into `out`; see `multiply_integers`."""
        launch(
            source.multiply_integers,
            grid,
            *self.quantized(x, grid[0] * tile.rows),
            *(self.packed, self.factors, self.units, bias, out),
            *(len(x), self.shape[0], self.steps, self.span // STEP, each),
            warps=tile.warps,
            stages=tile.stages,
            BITS=self.bits,
            GROUP=self.group,
            OFFSET=self.offset,
            WIDTH=self.width,
            WORDS=self.factors.shape[2],
            UNIT_STEPS=self.unit_steps,
            BLOCK_M=tile.rows,
            STAGES=tile.stages,
        )

    def quantized(self, x: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
        """Integers, scales and sums of `[M, in]`, padded to a multiple of 8 rows; see `quantize_rows`."""
        size = self.steps * STEP
        values = torch.empty(padded, size, dtype=torch.int8, device=x.device)
        scales, sums = torch.empty(2, size // self.group, padded, device=x.device)
        launch(
            source.quantize_rows,
            (padded // 8, -(-size // 256)),
            *(x, values, scales, sums, *x.shape, self.steps),
            GROUP=self.group,
            OFFSET=self.offset,
            BLOCK_M=8,
            BLOCK_K=256,
        )
        return values, scales, sums

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32, as `Quantized.dequantize` has them: `[n]` int64, to `[n, in]`.

        A row that is missing is NaN.
        """
        out = torch.empty(len(rows), self.shape[1], device=rows.device)
        if len(rows):
            launch(
                source.read_integers,
                (len(rows), -(-self.steps // 4)),
                *(rows, self.packed, self.factors, self.units, out, *self.shape, self.steps),
                BITS=self.bits,
                GROUP=self.group,
                OFFSET=self.offset,
                WIDTH=self.width,
                WORDS=self.factors.shape[2],
                UNIT_STEPS=self.unit_steps,
                BLOCK=4 * STEP,
            )
        return out

    def _pack(self, rows: Quantized, device: torch.device | str) -> Tensor:
        """Integers of some rows in panels: `[panels, steps, PANEL * STEP * bits / 8]`."""
        values = (rows.values if rows.table is None else rows.integers()).to(device)
        values = F.pad(values, (0, self.steps * STEP - values.shape[1], 0, -len(values) % PANEL))
        runs = values.view(-1, PANEL, self.steps, 2, STEP // 2).transpose(1, 2) - _base(rows)
        if self.bits == 4:
            return (runs[..., 0, :] & 15 | runs[..., 1, :] << 4).flatten(2)
        return runs.to(torch.int8).transpose(2, 3).flatten(2)


def _base(rows: Quantized) -> int:
    """What is taken from values so that they are signed, and from zeros."""
    return 0 if rows.table is not None or rows.minimums is not None else 1 << rows.bits - 1


def _factors(whole: Quantized, as_stored: bool) -> Tensor:
    """Scales of groups, and minimums or zeros: `[out, groups, 1 or 2]`, as small as is exact."""
    scales, offsets = (whole.scales, whole.minimums) if as_stored else whole.factors()
    offsets = offsets if whole.zeros is None else whole.zeros.float() - _base(whole)
    factors = torch.stack([scales] if offsets is None else [scales, offsets], -1)
    if as_stored:
        return (factors.short() + 128).to(torch.uint8)
    return factors.half() if _are_half(factors) else factors


def _units(whole: Quantized, inputs: int) -> Tensor | None:
    """Factors of scales and of minimums `[out, blocks, 2]` float16; None: scales are to hold them."""
    if whole.units is None or inputs // whole.units.shape[1] % STEP != 0:
        return None
    scales, minimums = whole.units, whole.minimum_units
    units = torch.stack([scales, torch.zeros_like(scales) if minimums is None else minimums], -1)
    return units.half() if _are_half(units) else None


def _are_half(values: Tensor) -> bool:
    """Whether numbers are the same in float16."""
    return torch.equal(values.half().float(), values) and bool(values.isfinite().all())


def _words(factors: Tensor, steps: int, groups: int) -> Tensor:
    """Factors in panels: `[out, n, columns]` to `[panels, steps, words, PANEL]` int32. n: `groups` a step."""
    outputs, n, _ = factors.shape
    factors = F.pad(factors, (0, 0, 0, steps * groups - n, 0, -outputs % PANEL))
    of_steps = factors.view(-1, PANEL, steps, groups * factors.shape[2])
    whole = F.pad(of_steps, (0, -of_steps.shape[3] % (4 // factors.itemsize))).contiguous()
    return whole.view(torch.int32).permute(0, 2, 3, 1).contiguous()
