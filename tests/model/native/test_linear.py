"""The native product against its twin in stock operations, and each row against itself in other company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.ops.linear import Integer, quantize_rows, stock_linear
from soothsay.model.weights.quantized import Mixed, Quantized, dequantized, joined, round_to_nearest

SHAPES = [(64, 32), (200, 512), (130, 2064), (7, 16)]  # outputs, inputs: whole panels and parts of them
GROUPS = [  # bits, inputs of a scale
    *((bits, group) for bits in (8, 6, 4, 2) for group in (None, 16)),
    *((4, 32), (4, 64), (4, 128), (5, 32)),
]
CASES = [(*shape, *kind) for shape in SHAPES for kind in GROUPS if shape[1] % (kind[1] or 1) == 0]


def random_weight(out: int, size: int, bits: int, group: int | None, zeros: bool) -> Quantized:
    groups = size // group if group else 1
    return Quantized(
        bits,
        torch.randint(0, 2**bits, (out, size), dtype=torch.uint8),
        torch.rand(out, groups) / size,
        torch.randint(0, 2**bits, (out, groups), dtype=torch.uint8) if zeros else None,
    )


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(("out", "size", "bits", "group"), CASES)
def test_integers_agree_with_the_twin(
    kernels: NativeKernels, out: int, size: int, bits: int, group: int | None, zeros: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = random_weight(out, size, bits, group, zeros), torch.randn(out)
    x = torch.randn(19, size) * torch.logspace(-3, 3, 19)[:, None]
    x[3] = 0
    native = kernels.linear(weight, bias, torch.float32)
    assert isinstance(native, NativeLinear)
    expected = Integer(weight, bias, torch.float32)(x)
    assert ((native(x) - expected).abs() <= 1e-6 * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("bits", "group"), GROUPS)
def test_the_largest_integers_are_added_exactly(kernels: NativeKernels, bits: int, group: int | None) -> None:
    """Sums of 16 bits hold as many products of these as are added to them."""
    groups = 256 // group if group else 1
    integers = torch.full((64, 256), 2**bits - 1, dtype=torch.uint8)
    weight = Quantized(bits, integers, torch.ones(64, groups), torch.zeros(64, groups, dtype=torch.uint8))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, 256)
    expected = (2**bits - 1) * x.double().sum(-1, keepdim=True).expand(2, 64)
    for rows in (1, 2):
        made = kernels.linear(weight, None, torch.float32)(x[:rows]).double()
        torch.testing.assert_close(made, expected[:rows], rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
def test_scales_in_half_precision_change_nothing(
    kernels: NativeKernels, bits: int, group: int | None, rows: int
) -> None:
    """Down to the least that it holds. The same scales 2**-60 times as large are kept in float32."""
    torch.manual_seed(0)
    weight, x = random_weight(200, 512, bits, group, zeros=False), torch.randn(rows, 512)
    scales = (weight.scales * 2.0 ** -torch.arange(24)[torch.randint(24, weight.scales.shape)]).half().float()
    scales[0, 0], scales[1, 0], scales[2, 0], scales[3, 0] = 2.0**-24, 65_504, -0.25, 0
    made = {}
    for factor, dtype in ((1.0, torch.float16), (2.0**-60, torch.float32)):
        linear = kernels.linear(replace(weight, scales=scales * factor), None, torch.float32)
        assert isinstance(linear, NativeLinear)
        held = linear.parts[0].scales
        assert held is not None
        assert held.dtype is dtype
        made[dtype] = linear(x) / factor
    assert torch.equal(*made.values())
    assert made[torch.float16].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_and_outputs_of_either_dtype(kernels: NativeKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = random_weight(100, 256, 8, None, zeros=False)
    x = torch.randn(5, 256, dtype=dtype)
    expected = Integer(weight, None, torch.float32)(x)
    made = kernels.linear(weight, None, torch.float32)(x)
    assert ((made - expected).abs() <= 1e-6 * expected.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(kernels.linear(weight, None, torch.bfloat16)(x), made.bfloat16())


@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_bfloat16(kernels: NativeKernels, out: int, size: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(out, size).bfloat16(), torch.randn(out), torch.randn(19, size)
    native = kernels.linear(weight, bias, torch.float32)
    assert isinstance(native, NativeLinear)
    expected = x.bfloat16().double() @ weight.double().t() + bias
    torch.testing.assert_close(native(x.bfloat16()).double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(native(x), native(x.bfloat16())) == kernels.multiplies_bfloat16


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_floats_are_kept_in_the_fewest_bytes(
    kernels: NativeKernels, out: int, size: int, kept: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(out, size).to(kept).float(), torch.randn(out), torch.randn(19, size)
    weight[0, 0] = 1 + 2**-7 if kept == torch.bfloat16 else 1 + 2**-10  # the finest that both halves have
    native = kernels.linear(weight, bias, torch.float32)
    assert isinstance(native, NativeLinear)
    assert native.parts[0].data.numel() == -(-out // 64) * 64 * size * kept.itemsize
    expected = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(native(x).double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(native(x.bfloat16()), native(x.bfloat16().float()))
    assert torch.equal(kernels.linear(weight, bias, torch.bfloat16)(x), native(x).bfloat16())


@pytest.mark.parametrize("number", [2.0**-24, 65504.0, 65536.0, 1e30, torch.inf, -torch.inf, torch.nan])
def test_no_number_changes(kernels: NativeKernels, number: float) -> None:
    """The least and the largest of half precision, and what it lacks."""
    weight = torch.full((64, 32), 1 + 2**-10)
    weight[5, 7] = number
    x = torch.zeros(1, 32)
    x[0, 7] = 1
    made = kernels.linear(weight, None, torch.float32)(x)[0, 5]
    torch.testing.assert_close(made, weight[5, 7], rtol=0, atol=0, equal_nan=True)


def in_halves(weight: Quantized, minimums: bool) -> Quantized:
    """As in most formats of GGUF: kernels read such scales where they are."""
    scales = weight.scales.half().float()
    return replace(weight, scales=scales, minimums=-scales.flip(0) if minimums else None)


def in_two_levels(weight: Quantized, span: int, minimums: bool) -> Quantized:
    """With units of `span` groups, as in GGUF's K formats."""
    small = torch.randint(-31, 32, weight.scales.shape, dtype=torch.int8)
    units = (torch.rand(small.shape[0], small.shape[1] // span) / 1e4 + 1e-4).half().float()
    return replace(
        weight,
        scales=small,
        minimums=small.flip(0) if minimums else None,
        units=units,
        minimum_units=units.flip(0) if minimums else None,
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        *("float32", "float16", "bfloat16 of floats", "bfloat16"),
        *("int8", "int4", "int4 with zeros", "int4 in halves", "Q4_1", "Q4_K", "Q6_K"),
    ],
)
def test_a_row_has_the_same_bits_in_any_company(kernels: NativeKernels, kind: str, threads: int) -> None:
    """And they are right, where the twin computes with the same integers."""
    torch.manual_seed(0)
    weight: torch.Tensor | Quantized
    if "float" in kind:
        weight = torch.randn(192, 2080).to(getattr(torch, kind.split()[0]))
        weight = weight if kind == "bfloat16" else weight.float()
    else:
        bits, group = {"int8": (8, None), "Q6_K": (6, 16)}.get(kind, (4, 32))
        weight = random_weight(192, 2080, bits, group, zeros=kind.endswith("zeros"))
        if kind in ("int4 in halves", "Q4_1"):
            weight = in_halves(weight, minimums=kind == "Q4_1")
        if kind in ("Q4_K", "Q6_K"):
            weight = in_two_levels(weight, 5, minimums=kind == "Q4_K")
    linear = kernels.linear(weight, None, torch.float32)
    x = torch.randn(70, 2080)
    alone = torch.cat([linear(row[None]) for row in x])
    if isinstance(weight, Quantized):
        expected = Integer(weight, None, torch.float32)(x)
        assert ((alone - expected).abs() <= 1e-5 * expected.abs().amax(-1, keepdim=True)).all()
    torch.set_num_threads(threads)
    try:
        for count in (2, 3, 5, 6, 7, 12, 13, 31, 64, 70):
            first = 70 - count
            assert torch.equal(linear(x[first:]), alone[first:]), count
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_at_all(kernels: NativeKernels, bits: int) -> None:
    linear = kernels.linear(random_weight(70, 64, bits, None, zeros=False), None, torch.float32)
    assert linear(torch.empty(0, 64)).shape == (0, 70)


def test_rows_are_quantized_by_group() -> None:
    x = torch.tensor([[0.0, 0, 0, 0, 1.0, -2.0, 0.5, 2.0], [127.0, 63.5, -0.5, 1.5, 0, 0, 0, -1e-3]])
    values, scales = quantize_rows(x, 4)
    assert values.tolist() == [[[0, 0, 0, 0], [64, -127, 32, 127]], [[127, 64, 0, 2], [0, 0, 0, -127]]]
    assert torch.allclose(scales, torch.tensor([[0, 2 / 127], [1, 1e-3 / 127]]))


def test_rounding_to_the_nearest() -> None:
    weight = torch.tensor([[1.0, -7.0, 0.4, 3.6], [0, 0, 0, 0]])
    quantized = round_to_nearest(weight, 4)
    assert quantized.values.tolist() == [[9, 1, 8, 12], [8, 8, 8, 8]]
    assert quantized.dequantize().tolist() == [[1, -7, 0, 4], [0, 0, 0, 0]]
    assert round_to_nearest(weight, 4, 2).scales.tolist() == [[1.0, 0.515625], [0, 0]]  # 3.6 / 7 in bfloat16
    elsewhere = round_to_nearest(weight.to("meta"), 4)  # stays on its device
    assert elsewhere.values.is_meta
    assert elsewhere.scales.is_meta
    with pytest.raises(ValueError, match="groups of 3"):
        round_to_nearest(weight, 4, 3)


def test_groups_are_cut_to_where_activations_are_rounded() -> None:
    """An outlier among the inputs costs the others in its group of 64 their precision, and no more."""
    torch.manual_seed(0)
    weight, x = random_weight(8, 256, 8, None, zeros=True), torch.randn(1, 256)
    x[0, 7] = 1e4
    assert torch.equal(weight.in_small_groups().dequantize(), weight.dequantize())
    before, after, plain = x.clone(), x.clone(), weight.dequantize().t()
    before[0, 64:], after[0, :64] = 0, 0
    layer = Integer(weight, None, torch.float32)
    assert ((layer(x) - layer(before)) - after @ plain).abs().max() < 0.02 * (after @ plain).abs().max()


@pytest.mark.parametrize("rows", [1, 3])
def test_integers_of_a_single_input(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = round_to_nearest(torch.randn(64, 1), 8), torch.randn(rows, 1)
    expected = x @ weight.dequantize().t()
    assert ((Integer(weight, None, torch.float32)(x) - expected).abs() <= 0.01 * expected.abs().amax()).all()


@pytest.mark.parametrize("rows", [1, 19])
def test_weights_of_different_kinds_make_one_layer(kernels: NativeKernels, rows: int) -> None:
    torch.manual_seed(0)
    parts = [
        random_weight(100, 256, 4, 32, zeros=False),
        random_weight(30, 256, 6, 16, zeros=False),
        random_weight(64, 256, 8, 64, zeros=True),
    ]
    both, x, bias = joined(parts), torch.randn(rows, 256), torch.randn(194)
    assert both.shape == (194, 256)
    expected = torch.cat([kernels.linear(part, None, torch.float32)(x) for part in parts], 1) + bias
    native = kernels.linear(both, bias, torch.float32)
    assert isinstance(native, NativeLinear)
    assert torch.equal(native(x), expected)
    stock = stock_linear(both, bias, torch.float32)(x)
    assert ((stock - expected).abs() <= 1e-6 * expected.abs().amax(-1, keepdim=True)).all()
    assert torch.equal(dequantized(both, torch.float32), torch.cat([part.dequantize() for part in parts]))


def test_a_weight_of_parts_of_one_kind_is_read_across_them() -> None:
    parts = [random_weight(rows, 64, 4, 32, zeros=True) for rows in (5, 3, 9)]
    whole, one = joined(parts), Quantized.cat(parts)
    assert not isinstance(whole, Mixed)
    for begin, end in ((0, 17), (0, 1), (4, 6), (5, 8), (7, 17), (6, 7)):
        assert torch.equal(whole.rows(begin, end).dequantize(), one.dequantize()[begin:end])


def test_weights_quantized_in_different_ways_are_not_joined() -> None:
    weight = torch.randn(4, 32)
    parts = [round_to_nearest(weight, 4, 16), round_to_nearest(weight, 4, 32)]
    with pytest.raises(ValueError, match="quantized differently"):
        Quantized.cat(parts)
    both = Quantized.cat([parts[0], parts[0]])
    assert torch.equal(both.dequantize(), torch.cat([parts[0].dequantize()] * 2))
