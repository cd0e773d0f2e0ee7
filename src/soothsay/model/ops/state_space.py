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
from soothsay.model.ops.token_rule import Rule, State, TokenRule
from soothsay.model.specs.state_specs import StateSpaceSpec


class StateSpace(TokenRule):
    """The weights of the rule. The norm of outputs has a scale `[H * d_x]`."""

    def __init__(self, spec: StateSpaceSpec):
        size = spec.size if spec.normed else None
        super().__init__(spec.state, spec.heads, size, spec.norm_eps, bias="conv1d.bias", skips="D")
        self.spec, self.outputs = spec, spec.size
        self.bias = nn.Parameter(torch.zeros(spec.channels))
        """`[channels]` of the convolution."""
        self.skips = nn.Parameter(torch.ones(spec.heads))
        """`[H]` how much of its input goes to a head's output: D."""

    def rule(self, device: torch.device) -> Rule:
        """The rule of one token, with memory for what is summed."""
        return partial(_token, self, torch.empty(self.shape.matrices, device=device))


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
