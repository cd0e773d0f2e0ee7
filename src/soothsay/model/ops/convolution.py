"""A causal convolution over the last tokens of a row's own path, channel by channel, in stock operations.

A row's window are the tokens before it: the nodes above it in a tree, then committed tokens. They are picked
by number, and the products are added tap by tap. So a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.core.states import LayerStates
from soothsay.core.strands import WITHIN, Strands


def convolve(x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
    """Run the rows of a pass through one layer's convolution. See `Kernels.convolve`."""
    if states is None and any(strand.slot != WITHIN for strand in strands.listed):
        raise ValueError("a pass without a pool has no states of requests")
    found = strands.windows(len(taps), x.device)
    parts = [x.new_zeros(1, x.shape[1])]
    if states is not None:
        parts += [states.inputs[found.slots].flatten(0, 1), states.journal[found.kept]]
    inputs = torch.cat([*parts, x])
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap, places in zip(taps, found.rows.t(), strict=True):
        out = out + inputs[places].float() * tap
    if states is not None:
        states.inputs[found.end_slots] = inputs[found.ends]
        states.journal[found.noted] = x[found.noted_rows]
    return out
