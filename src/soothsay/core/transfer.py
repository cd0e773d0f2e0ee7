"""Copies between the host and a device: many tensors in one copy. On a CPU, tensors stay as they are."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ALIGNED = 16
"""Bytes whose multiples tensors begin at: kernels read so many at once."""


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring tensors to a device in one copy, which the host does not wait for."""
    if device.type == "cpu" or not tensors:
        return list(tensors)
    places = [*accumulate((-(-own.nbytes // ALIGNED) * ALIGNED for own in tensors), initial=0)]
    whole = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for here, own in zip(_parts(whole, places, tensors), tensors, strict=True):
        here.copy_(own)
    return _parts(whole.to(device, non_blocking=True), places, tensors)


def _parts(whole: Tensor, places: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of some bytes that have room for tensors, which begin at places."""
    begins = zip(places, tensors, strict=False)
    return [whole[at : at + own.nbytes].view(own.dtype).view(own.shape) for at, own in begins]


def send(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Bring numbers to a device as `torch.tensor` does, in a copy that the host does not wait for."""
    return upload([torch.tensor(numbers, dtype=dtype)], device)[0]


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
