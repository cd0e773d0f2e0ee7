"""What the bits of a model's logits depend on besides its weights, in words."""

from __future__ import annotations

import torch
from torch import nn

from soothsay import __version__
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, Packed


def described_mode(
    layers: nn.Module, kernels: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype, bits: int | None
) -> str:
    """The numeric mode of some layers. Weights are not in it.

    The number of threads is in it only where the bits depend on it: where PyTorch multiplies.

    Args:
        layers: that compute.
        kernels: by which they do.
        dtype: of activations.
        kv_dtype: of the KV pool.
        bits: of weights in integers; None: all are plain.
    """
    linears = {type(module) for module in layers.modules() if isinstance(module, (Dense, Packed))}
    pytorch = f"PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"
    parts = [kernels.name, pytorch, f"activations {str(dtype).removeprefix('torch.')}"]
    if kv_dtype != dtype:
        parts.append(f"KV pool {str(kv_dtype).removeprefix('torch.')}")
    if bits is not None:
        parts.append(f"int{bits} weights")
    if linears:
        parts.append(f"{torch.get_num_threads()} threads")
    return ", ".join([*parts, f"soothsay {__version__}"])
