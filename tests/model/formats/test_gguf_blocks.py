"""GGML's blocks: against gguf's own reading of them, and their products on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blocks import HALVES, random_blocks
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from kernels import SETS, opened

from soothsay.model.formats.gguf_blocks import DECODERS, BlockRows, decode, gguf_format, loaded
from soothsay.model.formats.gguf_tensors import Stored
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.ops.linear import Integer, quantize_rows

OUT, IN = 150, 768


def test_all_types_are_tested() -> None:
    assert set(HALVES) == set(DECODERS)


@pytest.mark.parametrize("kind", DECODERS)
def test_bits_equal_those_of_gguf(kind: str) -> None:
    data = random_blocks(kind, OUT, IN)
    expected = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind]))
    assert expected.abs().amax() > 0.05
    assert torch.equal(decode(kind, data).dequantize().view(torch.int32), expected.view(torch.int32))


def test_scales_of_any_exponent() -> None:
    data = random_blocks("MXFP4", 1, 32 * 250)
    data.view(250, 17)[:, 0] = torch.arange(250)
    expected = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType.MXFP4))
    assert torch.equal(decode("MXFP4", data).dequantize().view(torch.int32), expected.view(torch.int32))


def test_all_scales_of_nvfp4() -> None:
    """All 128 positive ones. The last is no number, and llama.cpp takes 0 for it."""
    data = random_blocks("NVFP4", 1, 64 * 32)
    data.view(32, 36)[:, :4] = torch.arange(128).view(32, 4)
    expected = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType.NVFP4)).float()
    assert torch.equal(decode("NVFP4", data).dequantize(), expected)


@pytest.mark.parametrize("heads", [0, 5])
def test_rows_are_those_of_the_tensor(heads: int) -> None:
    data = random_blocks("Q4_K", OUT, 256)
    table = BlockRows("Q4_K", torch.Size([OUT, 256]), data.numpy(), heads)
    whole = decode("Q4_K", data).dequantize()
    if heads:  # as llama.cpp's converter interleaves the halves of a head
        whole = whole.view(heads, -1, 2, 256).transpose(1, 2).reshape(OUT, 256)
    assert torch.equal(table.rows(0, OUT).dequantize(), whole)
    assert torch.equal(table.rows(31, 77).dequantize(), whole[31:77])
    some = torch.tensor([3, 149, 3, 0])
    assert torch.equal(table.take(some).dequantize(), whole[some])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", DECODERS)
def test_products(kind: str, name: str) -> None:
    """The product's error is that of activations in 8 bits, and a row's bits are its own."""
    kernels = opened(NativeKernels, name)
    torch.manual_seed(0)
    weight = decode(kind, random_blocks(kind, OUT, IN))
    x, bias = torch.randn(64, IN) * torch.logspace(-3, 3, 64)[:, None], torch.randn(OUT)
    layer = kernels.linear(weight, bias, torch.float32)
    assert isinstance(layer, NativeLinear)
    made, twin = layer(x), Integer(weight, bias, torch.float32)(x)
    assert ((made - twin).abs() <= 1e-6 * twin.abs().amax(-1, keepdim=True)).all()
    values, scales = quantize_rows(x, min(weight.group_size, 64))
    rounded = (values.double() * scales[..., None]).view(64, IN)
    exact = rounded @ weight.dequantize().double().t() + bias
    assert ((made - exact).abs() <= 2e-6 * exact.abs().amax(-1, keepdim=True)).all()
    true = x.double() @ weight.dequantize().double().t() + bias
    assert (made - true).abs().amax() <= 0.02 * true.abs().amax()
    for count in (1, 2, 3, 4, 7, 16, 17, 33):
        assert torch.equal(layer(x[:count]), made[:count]), count
        assert torch.equal(layer(x[-count:]), made[-count:]), count


def test_blocks_of_numbers_that_are_none_are_read() -> None:
    """A damaged file gives no more than wrong numbers."""
    for kind in DECODERS:
        data = torch.full_like(random_blocks(kind, 64, 256), 255)
        assert decode(kind, data).dequantize().shape == (64, 256)
        assert np.isnan(decode(kind, data).dequantize().numpy()).any() or kind in ("MXFP4", "NVFP4")


@pytest.mark.parametrize("kind", DECODERS)
def test_memory_of_loaded_weights_is_known(kind: str) -> None:
    """Widened integers count as they are kept: those of grids take 4 bits, and those of base 3 take 2."""
    weight = decode(kind, random_blocks(kind, 128, IN))
    layer = NativeKernels("portable").linear(weight, None, torch.float32)
    assert isinstance(layer, NativeLinear)
    held = sum(part.nbytes for part in vars(layer.parts[0]).values() if isinstance(part, torch.Tensor))
    bits, each = loaded(kind)
    assert held <= (1.05 if bits else 1.2) * each * weight.shape.numel()
    if bits is not None:
        assert bits == layer.parts[0].struct.bits > 8 * stored_bytes(kind)
    else:
        assert each == stored_bytes(kind)


def stored_bytes(kind: str) -> float:
    """Bytes of a weight in the file."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return size / weights


def test_types_that_are_widened_are_named() -> None:
    types = {"a.weight": "IQ2_XS", "b.weight": "Q4_0", "c.weight": "IQ2_XS"}
    assert gguf_format(types, lambda name: None, 1).name == "GGUF's IQ2_XS (in 4 bits), Q4_0"  # type: ignore[arg-type, return-value]


def test_each_expert_has_its_factor() -> None:
    """A stack of experts in NVFP4 may have a factor for each of them, or one for all."""
    data = random_blocks("NVFP4", 6, 64).numpy()
    stack = Stored("NVFP4", (3, 2, 64), 0, data.nbytes, Path("model"), factors=(1.0, 0.5, 3.0))
    plain = decode("NVFP4", torch.from_numpy(data)).dequantize().view(3, 2, 64)
    for number, factor in enumerate(stack.factors):
        for rows in (slice(0, 2), torch.arange(2)):
            made = stack.expert(number).blocks(lambda _: data.reshape(-1)).take(rows).dequantize()
            assert torch.equal(made, plain[number] * factor)
    common = replace(stack, factors=(2.0,)).expert(2).blocks(lambda _: data.reshape(-1))
    assert torch.equal(common.rows(0, 2).dequantize(), plain[2] * 2)
