"""The bundled model's weights, packed once in a process for each number format, and its tokenizer, read once.

Most tests load this model, and this is most of the time that loading takes. A model's other parts are its
own, so tests may replace its modules. Models that are trained share nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from soothsay.model.weights.checkpoint import SafetensorsCheckpoint
from soothsay.model.weights.hub import bundled_path
from soothsay.model.weights.weight_source import WeightSource
from soothsay.tokenizer import Tokenizer
from soothsay.train.sequences import TrainingKernels

SIBYL = bundled_path("sibyl")


@cache
def share() -> None:
    """Let all models of this process that are loaded from now on share them."""
    layers: dict[Any, tuple[nn.Module, set[str]]] = {}
    pack, read = WeightSource.linear, SafetensorsCheckpoint.tokenizer

    def linear(source: WeightSource, module: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
        kernels = source._kernels
        if source.names.checkpoint.path != SIBYL or source.chosen or isinstance(kernels, TrainingKernels):
            return pack(source, module, weight, bias)
        threads = getattr(kernels, "_granted", None)
        key = module, source.mode, kernels.name, threads, source.kv_dtype, str(source._device)
        if key not in layers:
            before = set(source.used)
            layers[key] = pack(source, module, weight, bias), source.used - before
        layer, used = layers[key]
        source.used |= used
        return layer

    @cache
    def read_once(path: Path) -> Tokenizer | None:
        return read(SafetensorsCheckpoint(path))

    WeightSource.linear = linear  # type: ignore[method-assign]
    SafetensorsCheckpoint.tokenizer = (  # type: ignore[method-assign]
        lambda one: read_once(SIBYL) if one.path == SIBYL else read(one)
    )
