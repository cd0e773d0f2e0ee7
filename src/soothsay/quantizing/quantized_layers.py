"""Turns the linear layers of a model into integers, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from soothsay.model.formats.compressed_tensors import Scheme
from soothsay.model.formats.weight_format import Reader
from soothsay.model.linear import Dense
from soothsay.model.numeric_mode import STAY_PLAIN
from soothsay.model.quantized import Quantized
from soothsay.model.rounding import gptq, round_fitted
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.tensor_names import TensorNames
from soothsay.model.transformer import Transformer
from soothsay.quantizing.calibration_run import CalibrationRun


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
    with torch.device("meta"):
        model = Transformer(config)
    return {
        name: module.weight.shape[1]
        for name, module in model.named_modules()
        if isinstance(module, Dense) and name.startswith("blocks.") and not name.endswith(STAY_PLAIN)
    }


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
        rows = slice(begin, begin := begin + len(part))
        pieces[name] = Quantized(quantized.bits, quantized.values[rows], quantized.scales[rows])
    total = _squares(weight, hessian)
    error = (_squares(weight - become, hessian) / total) ** 0.5 if total else 0.0
    return QuantizedLayer(module, pieces, become, error)


def _squares(weight: Tensor, hessian: Tensor | None) -> float:
    """Sum of squares of a layer's outputs, or of its weight if `hessian` is None; see `_quantize_layer`."""
    squares = (weight if hessian is None else weight @ hessian) * weight
    return max(0.0, float(squares.sum()))  # rounding can take a sum near zero below zero
