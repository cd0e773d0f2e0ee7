"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) behind a short convolution, in stock operations.

A token's x, B and C pass a causal convolution over the last tokens, with a bias, and SiLU. Each head has a
state, a matrix S `[d_state, d_x]` of zeros before the first token. Heads of one group share B and C. A token
with a step t changes the state and reads it:

    step = softplus(t + offset)     S <- e^(-e^A step) S + B (step x)^T     out = S^T C + D x

Outputs are multiplied by SiLU of gates z, and then normed, all heads of a group together. In some models the
norm comes first, or there is none.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from soothsay.core.functions import rms_norm, silu, softplus
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.model.loaded_part import FloatPart
from soothsay.model.ops.delta_rule import STORED
from soothsay.model.ops.token_rule import State, run_rows
from soothsay.model.specs.state_specs import StateSpaceSpec


class StateSpace(FloatPart):
    """The weights of the rule, random ones at first. Float32."""

    def __init__(self, spec: StateSpaceSpec):
        super().__init__("taps", **STORED, bias="conv1d.bias", skips="D")
        self.spec, self.eps = spec, spec.norm_eps
        taps = torch.empty(spec.taps, spec.channels)
        self.taps = nn.Parameter(taps if taps.is_meta else taps.normal_(std=spec.taps**-0.5))
        """`[taps, channels]` of the convolution, the token's own last."""
        self.bias = nn.Parameter(torch.zeros(spec.channels))
        """`[channels]` of the convolution."""
        self.log_rates = nn.Parameter(torch.zeros(spec.heads))
        """`[H]` the logarithm of how fast a state decays: A."""
        self.offsets = nn.Parameter(torch.ones(spec.heads))
        """`[H]` added to a token's steps."""
        self.skips = nn.Parameter(torch.ones(spec.heads))
        """`[H]` how much of its input goes to a head's output: D."""
        self.scale = nn.Parameter(torch.ones(spec.size)) if spec.normed else None
        """`[H * d_x]` of the norm of outputs."""


@torch.no_grad()
def state_space(
    xbcz: Tensor, steps: Tensor, weights: StateSpace, states: LayerStates | None, strands: Strands
) -> Tensor:
    """Run the rows of a pass through one layer's rule. See `Kernels.state_space`."""
    products = torch.empty(weights.spec.state.matrices, device=xbcz.device)
    rule = partial(_token, weights, products)
    return run_rows(xbcz, steps, weights.spec.state, rule, states, strands)


def _token(
    weights: StateSpace, products: Tensor, state: State, xbcz: Tensor, steps: Tensor, free: Tensor | None
) -> tuple[Tensor, State]:
    """One token's output `[H * d_x]` float32, and the state after it.

    Matrices have megabytes. New memory for each token would cost more than the arithmetic, so `products` is
    memory for what is summed, and the new matrices are written to `free`.
    """
    c, row = weights.spec, xbcz.float()
    window = torch.cat([state.inputs, row[None, : c.channels]])
    mixed = silu((window * weights.taps).sum(0) + weights.bias)
    x, b, read = torch.split(mixed, [c.size, c.groups * c.state_size, c.groups * c.state_size])
    x = x.view(c.heads, 1, c.head_size)
    b, read = (each.view(c.groups, c.state_size, 1).repeat_interleave(c.group, 0) for each in (b, read))
    step = softplus(steps.float() + weights.offsets)
    decay = torch.exp(-weights.log_rates.exp() * step)
    new = torch.mul(state.matrices, decay[:, None, None], out=free)  # [H, d_state, d_x]
    new += torch.mul(step[:, None, None] * x, b, out=products)
    out = torch.mul(new, read, out=products).sum(1)
    out = (out + weights.skips[:, None] * x[:, 0]).flatten()
    if len(row) > c.channels:
        out = _finished(out, silu(row[c.channels :]), weights)
    return out, State(new, window[1:])


def _finished(out: Tensor, gates: Tensor, weights: StateSpace) -> Tensor:
    """Multiply the outputs of all heads by their gates, and norm them: `[H * d_x]`."""
    c = weights.spec
    if weights.scale is None:
        return out * gates
    out = (out if c.norm_first else out * gates).view(c.groups, -1)
    out = rms_norm(out, weights.scale.view(out.shape), weights.eps).flatten()
    return out * gates if c.norm_first else out
