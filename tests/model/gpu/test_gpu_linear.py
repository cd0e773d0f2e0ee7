"""Linear layers of a GPU in the interpreter, against their twins, and each row against itself elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import interpreter
import numpy as np
import predicted_bits
import pytest
import torch
from torch import Tensor

from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.errors import ModelError
from soothsay.model.gpu import tiles
from soothsay.model.gpu.gpu_linear import GpuLinear, gpu_linear
from soothsay.model.gpu.integer_weight import IntegerWeight
from soothsay.model.gpu.tiles import Tile
from soothsay.model.ops.linear import Integer, Parts
from soothsay.model.weights import quantized
from soothsay.model.weights.quantized import Joined, Mixed, Quantized, joined, round_to_nearest

FLOATS = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split 1,024 inputs into eight."""
    monkeypatch.setattr(tiles, "LEAST_INPUTS", 128)


def layer(weight: Tensor | Quantized, bias: Tensor | None = None) -> GpuLinear:
    return GpuLinear(weight, bias, torch.float32, "cpu")


def integers(kind: str, out: int, size: int) -> Quantized:
    """A random weight in one of the forms that formats have."""
    bits, group = KINDS[kind]
    groups = size // group
    weight = Quantized(
        bits,
        torch.randint(0, 2**bits, (out, size), dtype=torch.uint8),
        (torch.rand(out, groups) / size).half().float(),
    )
    if "zeros" in kind:
        return replace(weight, zeros=torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8))
    if "minimums" in kind:
        weight = replace(weight, minimums=-weight.scales.flip(0))
    if "units" in kind:
        small = torch.randint(-31, 32, weight.scales.shape, dtype=torch.int8)
        units = (torch.rand(out, size * 2 // 512) / 1e4 + 1e-4).half().float()
        minimums = None if weight.minimums is None else (small.flip(0), units.flip(0))
        own, minimum_units = (None, None) if minimums is None else minimums
        return replace(weight, scales=small, minimums=own, units=units, minimum_units=minimum_units)
    if "table" in kind:
        return replace(weight, table=torch.randint(-128, 128, (16,), dtype=torch.int8))
    return replace(weight, scales=torch.rand(out, groups)) if "exact" in kind else weight


KINDS = {  # name -> bits, inputs of a group
    "int8": (8, 32),
    "int8, rows": (8, 64),
    "int8, zeros": (8, 64),
    "int4": (4, 32),
    "int4, exact scales": (4, 32),
    "int4, zeros": (4, 64),
    "int4, groups of 16": (4, 16),
    "Q4_1: minimums": (4, 32),
    "Q4_K: minimums and units": (4, 32),
    "Q5_K: minimums and units": (5, 32),
    "Q6_K: units": (6, 16),
    "Q2_K: minimums and units": (2, 16),
    "IQ4_NL: table": (4, 32),
}


def rows(count: int, size: int) -> Tensor:
    """Rows of many sizes, one of them 0, and one with a group of 0."""
    x = torch.randn(count, size) * torch.logspace(-3, 3, count)[:, None]
    x[count // 2] = 0
    x[0, 32:64] = 0
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_integers_have_the_bits_of_the_stock_layer(kind: str) -> None:
    torch.manual_seed(0)
    size = 512 if "units" in kind else 256
    weight, bias, x = integers(kind, 65, size), torch.randn(65), rows(9, size)
    assert GpuLinear.fit(weight)
    made = layer(weight, bias)
    assert torch.equal(made(x), Integer(weight, bias, torch.float32)(x))
    assert torch.equal(made(x.bfloat16()), Integer(weight, bias, torch.float32)(x.bfloat16()))


@pytest.mark.parametrize("kind", ["int8", "int4, groups of 16", "Q4_1: minimums"])
def test_inputs_that_do_not_fill_a_step(kind: str) -> None:
    torch.manual_seed(0)
    weight, x = integers(kind, 64, 96), rows(5, 96)
    assert torch.equal(layer(weight)(x), Integer(weight, None, torch.float32)(x))


@pytest.mark.parametrize("kind", ["int8", "Q4_K: minimums and units"])
def test_splits_of_integers_are_added_in_order(kind: str, short_splits: None) -> None:
    torch.manual_seed(0)
    weight, bias, x = integers(kind, 64, 1024), torch.randn(64), rows(3, 1024)
    made = layer(weight, bias)
    assert made.splits == 8
    own, expected = folded(weight), torch.zeros(3, 64)
    for begin in range(0, 1024, 128):
        split = slice(begin, begin + 128)
        groups = slice(begin // 32, begin // 32 + 4)
        part = replace(
            own,
            values=own.values[:, split],
            scales=own.scales[:, groups],
            minimums=None if own.minimums is None else own.minimums[:, groups],
        )
        expected += Integer(part, None, torch.float32)(x[:, split])
    assert torch.equal(made(x), expected + bias)


def folded(weight: Quantized) -> Quantized:
    """With scales and minimums in float32."""
    scales, minimums = weight.factors()
    return replace(weight, scales=scales, minimums=minimums, units=None, minimum_units=None)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("out", "size"), [(97, 1280), (64, 80), (33, 1024 + 96)])
def test_floats_are_added_in_order_of_inputs(
    dtype: torch.dtype, out: int, size: int, short_splits: None
) -> None:
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(out, size) / size**0.5).to(dtype), torch.randn(out), rows(5, size)
    made = layer(weight, bias)
    a, b = x.to(dtype).float().numpy(), weight.float().numpy().T
    expected = np.zeros((5, out), np.float32)
    for begin in range(0, size, made.weight.span):
        split = slice(begin, begin + made.weight.span)
        expected = expected + interpreter.plain(a[:, split], b[split], np.zeros((5, out), np.float32))
    assert torch.equal(made(x), torch.from_numpy(expected) + bias)
    exact = x.to(dtype).double() @ weight.double().t() + bias
    bound = (x.to(dtype).double().abs() @ weight.double().abs().t() + bias.abs()) * size * 2.0**-24
    assert ((made(x) - exact).abs() <= bound).all()


def company(kind: str) -> GpuLinear:
    weight = torch.randn(65, 256).to(getattr(torch, kind)) if "float" in kind else integers(kind, 65, 256)
    return layer(weight, torch.randn(65))


@pytest.mark.parametrize(
    ("kind", "dots"),
    [
        *((kind, "plain") for kind in ("bfloat16", "float32", "int8", "Q4_K: minimums and units")),
        *((kind, "hopper") for kind in ("bfloat16", "float16")),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(
    kind: str, dots: str, short_splits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others, in another order; in other tiles, whose programs have one split or all."""
    torch.manual_seed(0)
    made, x = company(kind), rows(66, 256)
    assert made.splits == 2
    with interpreter.dots(dots):
        among = made(x)
        for count in (1, 8, 9, 17, 33, 65):
            first = 66 - count
            assert torch.equal(made(x[first:]), among[first:]), count
        assert torch.equal(made(x.flip(0)).flip(0), among)
        for tile in (Tile(16, 64, 32, 1, 1, 99), Tile(32, 32, 64, 8, 2, 1), Tile(128, 128, 128, 4, 3, 1)):
            outputs = tile.outputs if "float" in kind else 64
            monkeypatch.setitem(tiles.TILES, made.weight.kind, [replace(tile, outputs=outputs)])
            assert torch.equal(made(x[:33]), among[:33]), tile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", *KINDS])
def test_any_number_of_rows(kind: str, short_splits: None) -> None:
    torch.manual_seed(0)
    made, x = company(kind), rows(66, 256)
    among = made(x)
    for count in range(1, 65):
        assert torch.equal(made(x[1 : count + 1]), among[1 : count + 1]), count


@pytest.mark.parametrize("kind", predicted_bits.PREDICTED)
def test_the_bits_of_a_device_are_predicted(kind: str) -> None:
    with interpreter.dots("hopper"):
        assert predicted_bits.digest(kind, "cpu") == predicted_bits.PREDICTED[kind]


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_outputs_are_rounded_once(kind: str, short_splits: None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 512).bfloat16() if kind == "bfloat16" else integers(kind, 64, 512)
    bias, x = torch.randn(64), rows(3, 512)
    rounded = GpuLinear(weight, bias, torch.bfloat16, "cpu")
    exact = layer(weight, bias)
    assert exact.splits == 4
    assert rounded(x).dtype == rounded.dtype == torch.bfloat16
    assert torch.equal(rounded(x), exact(x).bfloat16())
    total = torch.zeros(3, 64)
    for part in exact.split_sums(x):
        total += part
    assert torch.equal(total + bias, exact(x))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_no_rows_at_all(kind: str) -> None:
    assert company(kind)(torch.empty(0, 256)).shape == (0, 65)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_integers_are_read_as_floats(kind: str) -> None:
    torch.manual_seed(0)
    weight = integers(kind, 130, 512)
    table = layer(weight).table
    assert table is not None
    assert table.shape == weight.shape
    read = table.floats(torch.tensor([129, 0, 64, -1, 130]))
    assert torch.equal(read[:3], weight.dequantize()[[129, 0, 64]])
    assert read[3:].isnan().all()
    ends: Any = SimpleNamespace(head=layer(weight))  # heads take their rows exactly, too
    assert torch.equal(TargetEnds.head_rows(ends, torch.tensor([129, 0])), read[:2])


def test_a_weight_is_packed_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slabs of several weights that are one, in place of a copy of all."""
    torch.manual_seed(0)
    parts = [integers("Q4_1: minimums", out, 96) for out in (200, 30)]
    whole = layer(Quantized.cat(parts)).weight
    monkeypatch.setattr(quantized, "SLAB", 64 * 96)
    inside = GpuLinear(Joined(tuple(parts)), None, torch.float32, "cpu").weight
    for name, buffer in whole.named_buffers():
        assert torch.equal(inside.get_buffer(name), buffer), name


def test_factors_take_few_bytes() -> None:
    """Two bytes for a scale if that is exact; and one, with a unit of many groups, in GGUF's K types."""
    for kind, width in (("int4", 16), ("int4, exact scales", 32), ("Q4_K: minimums and units", 8)):
        weight = layer(integers(kind, 64, 512)).weight
        assert isinstance(weight, IntegerWeight)
        assert weight.width == width, kind
    of_weights = 64 * 512 // 2
    assert sum(b.nbytes for b in layer(integers("int4", 64, 512)).buffers()) == of_weights * 9 // 8


def test_parts_of_different_kinds() -> None:
    torch.manual_seed(0)
    first, second = integers("Q4_K: minimums and units", 40, 512), integers("Q6_K: units", 24, 512)
    weight, bias, x = joined([first, second]), torch.randn(64), rows(3, 512)
    assert isinstance(weight, Mixed)
    assert GpuLinear.fit(weight)
    made = gpu_linear(weight, bias, torch.float32, "cpu")
    assert isinstance(made, Parts)
    each = (Integer(first, bias[:40], torch.float32)(x), Integer(second, bias[40:], torch.float32)(x))
    assert torch.equal(made(x), torch.cat(each, -1))


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(64, 40),
        torch.zeros(64, 64, dtype=torch.float64),
        round_to_nearest(torch.ones(64, 24), 8),
        replace(integers("int4, zeros", 64, 64), minimums=torch.zeros(64, 1)),
        replace(integers("int8, rows", 64, 64), minimums=torch.zeros(64, 1)),
    ],
    ids=["inputs", "dtype", "groups", "zeros and minimums", "8 bits and minimums"],
)
def test_weights_that_do_not_fit(weight: Tensor | Quantized) -> None:
    assert not GpuLinear.fit(weight)
    with pytest.raises(ModelError, match=r"no kernel of a GPU multiplies a weight \[64, "):
        gpu_linear(weight, None, torch.float32, "cpu")


@pytest.mark.parametrize("kind", ["float", "integer"])
def test_splits_come_from_the_shape(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough programs for a device from small layers, and no more than need be from large ones."""
    spans = {shape: tiles.span_of(kind, *shape) for shape in ((64, 576), (4096, 14336), (128256, 4096))}
    wanted = tiles.TILES[kind][0].enough
    for (outputs, inputs), span in spans.items():
        splits = -(-inputs // span)
        assert span % tiles.SPAN_UNIT == 0
        assert splits == 1 or span >= tiles.LEAST_INPUTS
        assert splits == 1 or outputs // 64 * splits < 2 * wanted
    assert spans[128256, 4096] == 4096
    assert 64 * -(-14336 // spans[4096, 14336]) >= wanted
    monkeypatch.setitem(tiles.MEASURED, (kind, 64, 576), 3)
    assert tiles.span_of(kind, 64, 576) == 256
