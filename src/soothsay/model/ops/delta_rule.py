"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) behind a short convolution, in stock operations.

A token's queries, keys and values pass a causal convolution over the last tokens and SiLU. Each head has a
state, a matrix S `[d_k, d_v]` of zeros before the first token. A token with query q, key k, value v, and
gates a and b, changes it and reads it:

    decay = e^(-e^A softplus(a + offset))     delta = sigmoid(b) (v - decay S^T k)
    out = decay S^T q + (k . q) delta         S <- decay S + k delta^T

This is one rule for each token, and S is summed token by token. So a row's bits do not depend on the chunks
of a prompt, and the node of a tree has the bits of the same token in plain decoding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from soothsay.core.functions import rms_norm, sigmoid, silu, softplus, total
from soothsay.model.ops.token_rule import Rule, State, TokenRule
from soothsay.model.specs.state_specs import DeltaSpec

EPS = 1e-6
"""Added to the sum of squares of queries and keys before these are normed."""


class Recurrence(TokenRule):
    """The weights of the rule. A head's norm has a scale `[d_v]`."""

    scale: nn.Parameter

    def __init__(self, spec: DeltaSpec):
        super().__init__(spec.state, spec.value_heads, spec.value_size, spec.norm_eps)
        self.spec, self.outputs = spec, spec.values

    def rule(self, device: torch.device) -> Rule:
        """The rule of one token. It needs no memory of its own."""
        return partial(_token, self)


def _token(
    weights: Recurrence, state: State, qkvz: Tensor, gates: Tensor, free: Tensor | None
) -> tuple[Tensor, State]:
    """One token's output `[H_v * d_v]` float32, and the state after it."""
    c, x = weights.spec, qkvz.float()
    window = torch.cat([state.inputs, x[None, : c.channels]])
    q, k, v = torch.split(silu((window * weights.taps).sum(0)), [c.keys, c.keys, c.values])
    q = _shared(_unit(q.view(c.key_heads, c.key_size)), c) * c.key_size**-0.5
    k = _shared(_unit(k.view(c.key_heads, c.key_size)), c)
    b, a = gates.float().chunk(2)
    decay = torch.exp(-weights.log_rates.exp() * softplus(a + weights.offsets))[:, None]  # [H_v, 1]
    old = state.matrices
    delta = sigmoid(b)[:, None] * (v.view(c.value_heads, -1) - decay * (old * k[..., None]).sum(1))
    read = decay * (old * q[..., None]).sum(1) + (k * q).sum(1, keepdim=True) * delta  # [H_v, d_v]
    out = rms_norm(read, weights.scale, weights.eps)
    if len(x) > c.channels:
        out = out * silu(x[c.channels :]).view(c.value_heads, -1)
    new = old * decay[..., None] + k[..., None] * delta[:, None]
    return out.flatten(), State(new, window[1:])


def _shared(x: Tensor, c: DeltaSpec) -> Tensor:
    """A row of each key head for the value heads that share it: `[H_k, d_k] -> [H_v, d_k]`."""
    group = c.value_heads // c.key_heads
    return x.repeat(group, 1) if c.tiled else x.repeat_interleave(group, 0)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(total(x * x) + EPS)
