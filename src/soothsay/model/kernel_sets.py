"""Where a model runs, and which set of kernels computes it."""

import os
import warnings
from importlib.util import find_spec

import torch

from soothsay.errors import ModelError
from soothsay.model.native.library import check_kernels
from soothsay.model.native.native_kernels import NativeKernels, load_native
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.specs.model_spec import ModelSpec

CAPABILITY = (8, 0)
"""The least compute capability of GPUs that our kernels run on: Ampere's, which has bfloat16."""


def usable_device(name: torch.device | str) -> torch.device:
    """The device of a name, as PyTorch names it.

    "auto" is what the environment variable `SOOTHSAY_DEVICE` says, or else the CPU: a GPU has to be named
    until our kernels have run on one.

    Raises `ModelError` for a device that PyTorch cannot use here.
    """
    if name == "auto":
        name = os.environ.get("SOOTHSAY_DEVICE") or "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ModelError(f"device={name!r} is no device: give 'auto', 'cpu', 'cuda' or 'cuda:1'") from None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ModelError(
            f"device={name!r} cannot be used here ({reason}); choose 'cpu', or install PyTorch for "
            "this device"
        ) from None


def gpu_problem(device: torch.device | str) -> str | None:
    """Why our kernels for GPUs cannot run on a device; None: they can."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        least, own = (".".join(map(str, capability)) for capability in (CAPABILITY, found))
        return f"{torch.cuda.get_device_name(device)} has compute capability {own}, and {least} is the least"
    return None


def best_kernels(spec: ModelSpec, device: torch.device | str = "cpu") -> Kernels:
    """The fastest kernels for a model: native ones on a CPU, or those of a GPU, if they fit; else stock ones.

    Warns if stock operations run because no native ones were compiled; or on another device than a CPU, where
    bits may depend on the number of rows.
    """
    if (device := torch.device(device)).type == "cpu":
        native = load_native()
        if native is None:
            warnings.warn(
                "there are no native kernels, since there was no C++ compiler at installation: PyTorch's own "
                "operations run, which are slower",
                stacklevel=4,
            )
        return StockKernels() if native is None or not native.fit(spec) else native
    problem = gpu_problem(device)
    if problem is None:
        from soothsay.model.gpu.gpu_kernels import GpuKernels

        if GpuKernels.fit(spec):
            return GpuKernels(device)
        problem = "this model has layers that our kernels for GPUs do not have"
    if device.type != "meta":
        warnings.warn(
            f"{problem}: PyTorch's own operations run on {device}, and answers may depend on the draft tree "
            "there",
            stacklevel=4,
        )
    return StockKernels()


def chosen_kernels(name: str, spec: ModelSpec, device: torch.device | str = "cpu") -> Kernels:
    """The kernels of a name for a model.

    Args:
        name: "auto": see `best_kernels`; "stock", PyTorch's own operations; or an instruction set.
        spec: of the model.
        device: where it runs.

    Raises `ModelError` if there are none of this name here, or if they cannot compute the model.
    """
    check_kernels(name)
    if name == "auto":
        return best_kernels(spec, device)
    if name == "stock":
        return StockKernels()
    if torch.device(device).type != "cpu":
        raise ModelError(f"the kernels {name!r} run on CPUs, not on {device}: choose auto or stock")
    if not NativeKernels.fit(spec):
        raise ModelError(f"the kernels {name!r} lack a part of this model: choose auto or stock")
    return NativeKernels(name)
