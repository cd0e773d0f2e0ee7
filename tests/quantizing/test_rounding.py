"""GPTQ against a plain statement of what it does, and against rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soothsay.model.weights.quantized import Quantized
from soothsay.quantizing import quantized_layers as module
from soothsay.quantizing.quantized_layers import fit_scales, gptq, round_fitted


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, size: int, seed: int = 1) -> Tensor:
    """Inputs that go together, as a network's do: a few directions and a little noise."""
    return random(rows, 8, seed=seed) @ random(8, size, seed=seed + 1) + 0.3 * random(
        rows, size, seed=seed + 2
    )


def output_error(weight: Tensor, quantized: Quantized, inputs: Tensor) -> float:
    """Root mean square, relative to the outputs."""
    return float((inputs @ (weight - quantized.dequantize()).t()).norm() / (inputs @ weight.t()).norm())


def one_by_one(weight: Tensor, hessian: Tensor, bits: int, group_size: int) -> Tensor:
    """Round the weights of one input, and give to all later ones what least squares says, solved anew each
    time."""
    size, middle = len(hessian), 2 ** (bits - 1)
    hessian = hessian.double() + torch.eye(size) * 0.01 * hessian.diagonal().mean()
    rest, done = weight.double().clone(), torch.zeros_like(weight)
    importance = torch.tensor([1 / torch.linalg.inv(hessian[i:, i:])[0, 0] for i in range(size)])
    for i in range(size):
        if i % group_size == 0:
            group = slice(i, i + group_size)
            scales = fit_scales(rest[:, group].t().float(), importance[group].float(), bits).double()
        integers = (rest[:, i] / scales).round().clamp(-middle, middle - 1)
        done[:, i] = (integers * scales).float()
        error = rest[:, i] - integers * scales
        later = slice(i + 1, size)
        rest[:, later] += error[:, None] * torch.linalg.solve(hessian[later, later], hessian[later, i])
    return done


@pytest.mark.parametrize(
    ("bits", "group_size", "size"), [(4, 32, 160), (4, 128, 256), (4, 160, 160), (8, 64, 192)]
)
def test_each_input_makes_up_for_those_before(bits: int, group_size: int, size: int) -> None:
    weight, x = random(12, size), correlated(400, size)
    hessian = x.t() @ x
    quantized = gptq(weight, hessian, bits, None if group_size == size else group_size)
    assert quantized.scales.shape == (12, size // group_size)
    expected = one_by_one(weight, hessian, bits, group_size)
    # where a weight stands between two integers, float32 and float64 may part, and all later ones with them
    same = (quantized.dequantize() - expected).abs().amax(1) < 1e-5
    assert same.float().mean() > 0.8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, None])
def test_outputs_come_closer_than_by_rounding(bits: int, group_size: int | None) -> None:
    weight, x, unseen = random(64, 256), correlated(1000, 256), correlated(200, 256)
    rounded = round_fitted(weight, bits, group_size)
    made_up = gptq(weight, x.t() @ x, bits, group_size)
    assert output_error(weight, made_up, x) < 0.5 * output_error(weight, rounded, x)
    assert output_error(weight, made_up, unseen) < 0.6 * output_error(weight, rounded, unseen)


@pytest.mark.parametrize("group_size", [32, None])
def test_without_correlation_it_is_rounding(group_size: int | None) -> None:
    weight = random(300, 160)
    rounded, made_up = round_fitted(weight, 4, group_size), gptq(weight, 7 * torch.eye(160), 4, group_size)
    assert torch.equal(rounded.values, made_up.values)
    assert torch.equal(rounded.scales, made_up.scales)
    assert rounded.group_size == made_up.group_size == (group_size or 160)
    for quantized in (rounded, made_up, round_fitted(weight[:20], 4, group_size)):
        assert quantized.values.is_contiguous()
        assert quantized.scales.is_contiguous()


def test_without_inputs_it_is_rounding() -> None:
    weight = random(30, 64)
    made_up = gptq(weight, torch.zeros(64, 64), 4, 32)
    assert torch.equal(made_up.values, round_fitted(weight, 4, 32).values)


def test_inputs_that_never_came_are_rounded() -> None:
    weight, x = random(16, 64), correlated(100, 64)
    x[:, [3, 40]] = 0
    hessian = x.t() @ x
    before = hessian.clone()
    quantized = gptq(weight, hessian, 4, 32)
    assert torch.equal(hessian, before)
    scales = quantized.scales[:, [0, 1]]
    assert ((quantized.dequantize() - weight)[:, [3, 40]].abs() <= scales * 4.1).all()  # at worst, cut off
    assert output_error(weight, quantized, x) < 0.1


def test_fewer_samples_than_inputs() -> None:
    weight, x = random(16, 128), 100 * random(5, 128)
    x[:, 7] *= 1e4  # one input outweighs all others, as in real models
    quantized = gptq(weight, x.t() @ x, 4, 32)
    assert quantized.dequantize().isfinite().all()
    assert output_error(weight, quantized, x) < output_error(weight, round_fitted(weight, 4, 32), x)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales(bits: int) -> None:
    weight = random(200, 64)
    weight[3, :32] = 0
    weight[4] *= 1e-6
    weight[5, 0] = 8.0  # far from the others
    quantized = round_fitted(weight, bits, 32)
    assert torch.equal(quantized.scales, quantized.scales.bfloat16().float())
    assert (quantized.scales > 0).all()
    assert quantized.values.dtype == torch.uint8
    assert int(quantized.values.max()) < 2**bits
    assert (quantized.dequantize()[3, :32] == 0).all()
    groups, largest = weight.view(200, 2, 32), 2 ** (bits - 1) - 1
    whole = (groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest).bfloat16().float()
    plain = ((groups / whole).round() * whole - groups).square().sum(-1)
    ours = (quantized.dequantize() - weight).view(200, 2, 32).square().sum(-1)
    assert (ours <= plain * 1.0001).all()
    assert bits == 8 or ours.sum() < 0.9 * plain.sum()


def test_what_counts_more_is_met_better() -> None:
    weight = random(50, 32).t()
    importance = torch.ones(32)
    importance[4] = 1000
    even, uneven = fit_scales(weight, torch.ones(32), 4), fit_scales(weight, importance, 4)

    def error(scales: Tensor) -> Tensor:
        return (((weight / scales).round().clamp(-8, 7) * scales - weight) ** 2)[4].sum()

    assert error(uneven) < 0.5 * error(even)


def test_large_weights_go_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(50, 64)
    whole = round_fitted(weight, 4, 32)
    monkeypatch.setattr(module, "BLOCK", 16)
    parts = round_fitted(weight, 4, 32)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales, parts.scales)
