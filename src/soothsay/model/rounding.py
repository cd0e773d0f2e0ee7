"""Rounding of weights to integers that keeps a layer's outputs on real inputs.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds the weights input by input. The weights of later inputs
compensate each error, as far as calibration text shows that the inputs are correlated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.model.quantized import Quantized

DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to the diagonal, since some inputs are not distinguished
by the calibration text."""

BLOCK = 128
"""Number of inputs whose errors are passed to later inputs in one product."""

CLIPS = tuple(1 - step / 40 for step in range(20))
"""Shares of a group's range that are tried as the end of the scale. Clipping the largest weights can improve
the others."""


def gptq(weight: Tensor, hessian: Tensor, bits: int, group_size: int | None = None) -> Quantized:
    """Symmetric integers for a weight, with scales that bfloat16 holds.

    Args:
        weight: `[out, in]`.
        hessian: `[in, in]` float32, `X^T X` for the layer's inputs `X`, times any factor.
        bits: 4 or 8.
        group_size: inputs that share a scale, a divisor of `in` and `BLOCK`; None: all.
    """
    size = len(hessian)
    group_size = group_size or size
    root = _root_of_inverse(hessian)
    importance = root.diagonal() ** -2  # cost of an error after compensation
    rest = weight.float().t().contiguous()  # [in, out]: the weights of an input are adjacent
    values = torch.empty_like(rest, dtype=torch.uint8)
    scales = rest.new_empty(size // group_size, rest.shape[1])
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        errors = rest.new_empty(end - begin, rest.shape[1])
        for i in range(begin, end):
            if i % group_size == 0:
                group = slice(i, i + group_size)
                scales[i // group_size] = fit_scales(rest[group], importance[group], bits)
            scale = scales[i // group_size]
            values[i] = _nearest(rest[i], scale, bits)
            errors[i - begin] = (rest[i] - _value(values[i], scale, bits)) / root[i, i]
            rest[i + 1 : end].addr_(root[i, i + 1 : end], errors[i - begin], alpha=-1)
        rest[end:].addmm_(root[begin:end, end:].t(), errors, alpha=-1)
    return Quantized(bits, values.t().contiguous(), scales.t().contiguous())


def round_fitted(weight: Tensor, bits: int, group_size: int | None = None) -> Quantized:
    """The nearest symmetric integers for a weight `[out, in]`, with fitted scales.

    Scales are those of `gptq` for uncorrelated inputs of equal size.
    """
    parts = []
    for begin in range(0, len(weight), BLOCK):  # in parts, since trying scales takes many times their memory
        rows = weight[begin : begin + BLOCK].float()
        groups = rows.view(len(rows), -1, group_size or rows.shape[1]).permute(1, 2, 0).contiguous()
        scales = fit_scales(groups, torch.ones(groups.shape[1]), bits)  # [groups, out]
        values = _nearest(groups, scales[:, None], bits).permute(2, 0, 1).reshape(rows.shape)
        parts.append(Quantized(bits, values.contiguous(), scales.t().contiguous()))
    return Quantized.cat(parts)


def fit_scales(groups: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Scales of least squared error for weights `[..., n, out]`, errors weighted by `importance` `[n]`.

    Returns `[..., out]`, rounded to bfloat16.
    """
    largest = groups.abs().amax(-2, keepdim=True).clamp_min_(1e-30)
    best, least = torch.empty_like(largest), torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scales = (largest * (clip / (2 ** (bits - 1) - 1))).bfloat16().float()
        errors = _value(_nearest(groups, scales, bits), scales, bits) - groups
        error = (errors.square_() * importance[:, None]).sum(-2, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best[..., 0, :]


def _nearest(weights: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Integers from 0 to `2 ** bits - 1`, uint8."""
    middle = 2 ** (bits - 1)
    values: Tensor = (weights / scales).round_() + middle
    return values.clamp_(0, 2 * middle - 1).to(torch.uint8)


def _value(integers: Tensor, scales: Tensor, bits: int) -> Tensor:
    signed: Tensor = integers.float() - 2 ** (bits - 1)
    return signed * scales


def _root_of_inverse(hessian: Tensor) -> Tensor:
    """Upper triangular `U` with `U^T U` the inverse of the damped Hessian.

    Row i has the compensation of an error of weight i by later weights (the paper's Cholesky form).
    """
    damped = hessian.to(torch.float64, copy=True)  # in float32, outliers make it look indefinite
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = diagonal.mean() or 1.0  # an input that was always 0 is independent
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.float()
