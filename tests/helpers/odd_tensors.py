"""Tensors that no file of weights should hold."""

from __future__ import annotations

import torch

ODD_TENSORS = (
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(3, 0),
    torch.zeros(1, 1, 1, 1),
    torch.zeros(2, dtype=torch.bool),
    torch.full((8,), 2**62),
    torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
)
