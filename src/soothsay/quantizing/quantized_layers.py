"""Turns the linear layers of a model into integers, one after the other, while text runs through it.

GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds the weights input by input. The weights of later inputs
compensate each error, as far as calibration text shows that the inputs are correlated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.model.decoder.blocks import Block, unrecord
from soothsay.model.formats.compressed_tensors import Scheme
from soothsay.model.formats.weight_format import STAY_PLAIN, Reader
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer, linear_shapes
from soothsay.model.weights.quantized import Quantized
from soothsay.model.weights.tensor_names import TensorNames

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


ROWS = 2048
"""Largest number of tokens that go through a block in one call."""


class CalibrationRun:
    """Calibration text and held-out text on their way through a model.

    Calibration text shows what inputs the layers get. Held-out text measures perplexity: once through the
    blocks as they were, once through the blocks as they become. For each block in order: call `measure`,
    change the block's layers, and call `advance`.

    Args:
        model: its blocks are changed by the caller.
        text: `[n, tokens]` int64.
        held_out: share of the samples that are held out, rounded down: one in `held_out` + 1.
    """

    def __init__(self, model: Transformer, text: Tensor, held_out: int):
        held = len(text) // (held_out + 1)
        self.blocks = [cast(Block, block) for block in model.blocks]
        unrecord(model)
        self._text = _SampleStates(model, text[held:])
        self._before, self._after = _SampleStates(model, text[:held]), _SampleStates(model, text[:held])

    def measure(self, block: Block, paths: Iterable[str]) -> dict[str, Tensor]:
        """Sum `X^T X` over the inputs `X` of the layers at `paths` in `block`.

        Call it before the block is changed.

        Returns:
            `[inputs, inputs]` float32 by path. A layer that the text never reaches, such as an expert that no
            token is sent to, is missing.
        """
        self._before.advance(block)
        sums: dict[str, Tensor] = {}

        def add(path: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].float()
            if path not in sums:
                sums[path] = x.new_zeros(x.shape[1], x.shape[1])
            sums[path].addmm_(x.t(), x)

        hooks = [block.get_submodule(path).register_forward_pre_hook(partial(add, path)) for path in paths]
        for _ in self._text.through(block):
            pass
        for hook in hooks:
            hook.remove()
        return sums

    def advance(self, block: Block) -> None:
        """Move on to the next block. `block` is the current one, with its layers changed."""
        self._text.advance(block)
        self._after.advance(block)

    def perplexity(self) -> tuple[float, float] | None:
        """Perplexity of the held-out text with the blocks as they were, and as they are. None without text.

        Call it after the last block.
        """
        if not len(self._before.samples):
            return None
        return self._before.perplexity(), self._after.perplexity()


class _SampleStates:
    """Samples, and their hidden states at the input of the next block."""

    def __init__(self, model: Transformer, samples: Tensor):
        self.model, self.samples = model, samples
        step = max(1, ROWS // samples.shape[1])
        requests = [Rows(ids, 0) for ids in samples.numpy()]
        self.batches = [model.pack(requests[i : i + step]) for i in range(0, len(requests), step)]
        self.states = [model.stream.enter(model.embed(batch)) for batch in self.batches]
        """`[rows, H]` of each batch."""

    def through(self, block: Block) -> Iterator[Tensor]:
        """The outputs of `block`, batch by batch."""
        rope = self.model.ropes[block.rope_number]
        for batch, state in zip(self.batches, self.states, strict=True):
            yield block(state, rope(batch.positions), batch, None)

    def advance(self, block: Block) -> None:
        """Replace the states by the outputs of `block`."""
        for i, state in enumerate(self.through(block)):
            self.states[i] = state

    def perplexity(self) -> float:
        """Perplexity of the samples. Valid after the last block."""
        model, loss = self.model, 0.0
        states = torch.cat(self.states).view(*self.samples.shape, -1)
        for ids, state in zip(self.samples, states, strict=True):
            logits = model.logits(model.final(state[:-1].contiguous()))
            loss += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        return exp(loss / self.samples[:, 1:].numel())


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer in integers. It may be several tensors of the checkpoint, such as q, k and v."""

    module: str  # our name, such as blocks.0.attention.qkv
    parts: Mapping[str, Quantized]  # by the tensors' names in the checkpoint
    weight: Tensor  # [out, in] float32 of all parts together, dequantized
    error: float  # relative; see `QuantizationReport`

    @property
    def kind(self) -> str:
        """The module's name without numbers and `blocks`, such as `attention.qkv`."""
        return ".".join(part for part in self.module.split(".")[1:] if not part.isdigit())


def layers_to_quantize(config: ModelSpec) -> dict[str, int]:
    """Our names of the layers that become integers, in order, and the number of inputs of each."""
    inner = ((name, size) for name, (_, size) in linear_shapes(config).items() if name.startswith("blocks."))
    return {name: size for name, size in inner if not name.endswith(STAY_PLAIN)}


def round_layers(names: TensorNames, scheme: Scheme, modules: Sequence[str]) -> Iterator[QuantizedLayer]:
    """Round each layer by itself."""
    for module in modules:
        with names.checkpoint.open() as read:
            yield _quantize_layer(names, read, scheme, module, None)


def compensate_layers(
    names: TensorNames, scheme: Scheme, modules: Sequence[str], run: CalibrationRun
) -> Iterator[QuantizedLayer]:
    """Quantize each layer by GPTQ. Its inputs come from the layers before it, as quantized as they are.

    Changes the model of `run`.
    """
    for number, block in enumerate(run.blocks):
        prefix = f"blocks.{number}."
        paths = [module.removeprefix(prefix) for module in modules if module.startswith(prefix)]
        hessians = run.measure(block, paths)
        with names.checkpoint.open() as read:
            for path in paths:
                layer = _quantize_layer(names, read, scheme, prefix + path, hessians.pop(path, None))
                bias = cast(Tensor | None, block.get_submodule(path).bias)
                order = names.row_order(f"{prefix}{path}")
                weight = layer.weight if order is None else layer.weight[order]
                block.set_submodule(path, Dense(weight.to(block.dtype), bias))
                yield layer
        run.advance(block)


def _quantize_layer(
    names: TensorNames, read: Reader, scheme: Scheme, module: str, hessian: Tensor | None
) -> QuantizedLayer:
    """Quantize one layer. `hessian` is `X^T X` of its inputs `X`. None: the inputs are unknown, so round."""
    parts = {name.removesuffix(".weight"): read(name) for name in names.require(module)}
    weight = torch.cat([part.float() for part in parts.values()])
    if hessian is None:
        quantized = round_fitted(weight, scheme.bits, scheme.group_size)
    else:
        quantized = gptq(weight, hessian, scheme.bits, scheme.group_size)
    become, pieces, begin = quantized.dequantize(), {}, 0
    for name, part in parts.items():
        pieces[name] = quantized.rows(begin, begin := begin + len(part))
    total = _squares(weight, hessian)
    error = (_squares(weight - become, hessian) / total) ** 0.5 if total else 0.0
    return QuantizedLayer(module, pieces, become, error)


def _squares(weight: Tensor, hessian: Tensor | None) -> float:
    """Sum of squares of a layer's outputs, or of its weight if `hessian` is None; see `_quantize_layer`."""
    squares = (weight if hessian is None else weight @ hessian) * weight
    return max(0.0, float(squares.sum()))  # rounding can take a sum near zero below zero
