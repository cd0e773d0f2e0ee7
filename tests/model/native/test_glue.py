"""What stands between the matrix products: native kernels against stock operations, and bits that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TINY, adapted, mixtures
from torch import Tensor

from soothsay.core.cache import INTEGERS, read_values, row_size
from soothsay.model import kernel_sets
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.kernel_sets import best_kernels
from soothsay.model.native.native_kernels import NativeKernels, load_native
from soothsay.model.native.native_linear import ACTIVATIONS as NATIVE_ACTIVATIONS
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.ops.operands import HeadForm
from soothsay.model.specs.attention_spec import HeadRotation, LatentSpec, RopeSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

STOCK = StockKernels()
DTYPES = [torch.float32, torch.bfloat16]
KEPT = [(dtype, kept) for dtype in DTYPES for kept in (dtype, torch.int16, torch.int8)]
"""Element types of layers' outputs and of the KV pool."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_norm(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-6)
    norm.weight.data = torch.rand(size) + 0.5
    return norm.requires_grad_(False)


def close(result: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums; in bfloat16, up to one rounding."""
    assert result.dtype == expected.dtype
    bound = 1e-5 if result.dtype is torch.float32 else 2**-7
    assert ((result.float() - expected.float()).abs() <= bound * expected.float().abs().clamp(min=1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_add_and_norm(kernels: NativeKernels, dtype: torch.dtype, post: bool) -> None:
    x, delta = torch.randn(300, 400) * 5, (torch.randn(300, 400) * 3).to(dtype)
    norm, second = random_norm(400), random_norm(400) if post else None
    close(kernels.norm(x, norm, dtype), STOCK.norm(x, norm, dtype))
    close(kernels.add(x, delta, second), STOCK.add(x, delta, second))
    before = x.clone()
    for result, expected in zip(
        kernels.add_norm(x, delta, second, norm, dtype),
        STOCK.add_norm(x, delta, second, norm, dtype),
        strict=True,
    ):
        close(result, expected)
    assert torch.equal(x, before), "taps still look at it"
    alone = kernels.add_norm(x[7:8], delta[7:8], second, norm, dtype)
    together = kernels.add_norm(x, delta, second, norm, dtype)
    assert all(torch.equal(a[0], b[7]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("queries", "keys", "d"), [(6, 2, 64), (4, 4, 32), (8, 1, 128), (2, 1, 256)])
def test_rotate_and_store(
    kernels: NativeKernels,
    dtype: torch.dtype,
    kept: torch.dtype,
    normed: bool,
    queries: int,
    keys: int,
    d: int,
) -> None:
    rows, slots = 90, torch.randperm(200)[:90]
    qkv = torch.randn(rows, queries + 2 * keys, d).to(dtype)
    qkv[:2] *= torch.tensor([0.0, 1e-17])[:, None, None]  # without length, or nearly
    rope = Rope(HeadRotation(RopeSpec(), d))(torch.randint(0, 4000, (rows,)))
    norms = (random_norm(d), random_norm(d)) if normed else None
    pools = [torch.zeros(2 * keys, 200, row_size(d, kept), dtype=kept) for _ in range(2)]
    centre = torch.randn(keys, d) if kept is torch.int8 else None
    result = kernels.rotate_store(qkv, rope, pools[0], slots, HeadForm(0.3, norms, centre=centre))
    close(result, STOCK.rotate_store(qkv, rope, pools[1], slots, HeadForm(0.3, norms, centre=centre)))
    if kept in INTEGERS:  # which may differ by one
        whole = keys if kept is torch.int16 else 2 * keys  # rows of integers
        if kept is torch.int16:
            close(read_values(pools[0][keys:]), read_values(pools[1][keys:]))
        assert (pools[0][:whole, :, :d].int() - pools[1][:whole, :, :d].int()).abs().max() <= 1
        close(*(pool[:whole, :, d:].contiguous().view(torch.float32) for pool in pools))
    else:
        close(pools[0], pools[1])
    one = [part[5:6].contiguous() for part in rope]
    pool = torch.zeros_like(pools[0])
    alone = kernels.rotate_store(
        qkv[5:6].contiguous(), (one[0], one[1]), pool, slots[5:6].clone(), HeadForm(0.3, norms, centre=centre)
    )
    assert torch.equal(alone[0], result[5])
    assert torch.equal(pool[:, slots[5]], pools[0][:, slots[5]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_gated(kernels: NativeKernels, dtype: torch.dtype, activation: str) -> None:
    gate_up = (torch.randn(70, 2 * 176) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([100.0, -100.0, 1e4, -1e4])  # exponentials must not overflow
    result = kernels.gated(gate_up, activation)
    close(result, STOCK.gated(gate_up, activation))
    assert torch.equal(kernels.gated(gate_up[3:4], activation)[0], result[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_that_are_a_part_of_a_wider_product(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, wide = torch.randn(70, 96), torch.randn(70, 3 * 96).to(dtype)
    before = x.clone()
    for gates in (wide[:, 96:192], wide[:, :96].contiguous()):
        close(kernels.sigmoid_gate(x, gates), STOCK.sigmoid_gate(x, gates))
    assert torch.equal(x, before)


def test_rows_that_buffers_have_room_for() -> None:
    for size, fits in ((1024, True), (1056, False)):
        assert NativeKernels.fit(adapted(TINY, head_dim=size)) is fits
        latent = LatentSpec(4, size - 64, HeadRotation(RopeSpec(), 64), plain=32, value=32, scale=1.0)
        assert NativeKernels.fit(adapted(TINY, mixers={0: latent, 1: latent})) is fits


def test_a_model_takes_load_native_where_they_fit(
    tiny: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model(open_checkpoint("sibyl")).spec
    native = load_native()
    assert best_kernels(config).name == (native or STOCK).name
    misfits: tuple[dict[str, Any], ...] = (
        {"head_dim": 24},
        {"hidden_size": 388},
        {"intermediate_size": 1000},
        {"experts": mixtures(4, 2, 40, layers=(0,))},
    )
    for misfit in misfits:
        assert isinstance(best_kernels(adapted(config, **misfit)), StockKernels)
    assert isinstance(best_kernels(config, "meta"), StockKernels)
    monkeypatch.setattr(kernel_sets, "load_native", lambda: None)
    with pytest.warns(UserWarning, match="there are no native kernels"):
        assert isinstance(best_kernels(config), StockKernels)
    assert isinstance(tiny().kernels, StockKernels), "what trains has to be differentiable"
