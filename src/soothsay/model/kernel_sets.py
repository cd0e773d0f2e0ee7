"""Which set of kernels computes a model. A set for another device is chosen here."""

from __future__ import annotations

import torch

from soothsay.errors import ModelError
from soothsay.model.native.library import VARIANTS
from soothsay.model.native.native_kernels import NativeKernels, load_native
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.specs.model_spec import ModelSpec


def best_kernels(spec: ModelSpec, device: torch.device | str = "cpu") -> Kernels:
    """The fastest kernels for a model: native ones on a CPU if they fit, else stock operations."""
    native = load_native() if torch.device(device).type == "cpu" else None
    return StockKernels() if native is None or not native.fit(spec) else native


def named_kernels(name: str) -> Kernels | None:
    """The kernels of a name: an instruction set, or "stock"; None for "auto". Raises `ModelError`."""
    if name in ("auto", "stock"):
        return StockKernels() if name == "stock" else None
    if name not in VARIANTS:
        raise ModelError(f"there are no kernels {name!r}; choose from auto, stock, {', '.join(VARIANTS)}")
    try:
        return NativeKernels(name)
    except OSError as error:
        raise ModelError(str(error)) from None
