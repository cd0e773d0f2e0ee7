"""Copies between the host and a device: many tensors in one copy. On a CPU, tensors stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring tensors, of 8 bytes an element, to a device in one copy, which the host does not wait for."""
    if device.type == "cpu":
        return list(tensors)
    whole = torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])
    if device.type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(own.dtype).view(own.shape) for part, own in zip(parts, tensors, strict=True)]


def download(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """Bring tensors to the host in one copy, behind one wait.

    They are of float32, or of integers below 2^53, so that a double holds each number.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    whole = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    places = pairwise(accumulate((tensor.numel() for tensor in tensors), initial=0))
    return [
        whole[begin:end].to(tensor.dtype).view(tensor.shape).numpy()
        for (begin, end), tensor in zip(places, tensors, strict=True)
    ]
