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

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.states import LayerStates
from soothsay.core.strand import WITHIN, Strand
from soothsay.core.strands import Strands
from soothsay.states_config import DeltaConfig

EPS = 1e-6
"""Added to the sum of squares of queries and keys before these are normed."""


class Recurrence(nn.Module):
    """The weights of the rule, random ones at first. Float32."""

    def __init__(self, config: DeltaConfig, eps: float):
        super().__init__()
        self.config, self.eps = config, eps
        taps = torch.empty(config.taps, config.channels)
        self.taps = nn.Parameter(taps if taps.is_meta else taps.normal_(std=config.taps**-0.5))
        """`[taps, channels]` of the convolution, the token's own last."""
        self.log_rates = nn.Parameter(torch.zeros(config.value_heads))
        """`[H_v]` the logarithm of how fast a state decays: A."""
        self.offsets = nn.Parameter(torch.ones(config.value_heads))
        """`[H_v]` added to the gate that lets a state decay."""
        self.scale = nn.Parameter(torch.ones(config.value_size))
        """`[d_v]` of the norm of a head's output."""


class _State(NamedTuple):
    """What a token finds."""

    matrices: Tensor  # [H_v, d_k, d_v] float32
    inputs: Tensor  # [taps - 1, channels] float32, of the tokens before


def delta_rule(
    qkvz: Tensor, gates: Tensor, weights: Recurrence, states: LayerStates | None, strands: Strands
) -> Tensor:
    """Run the rows of a pass through one layer's rule. See `Kernels.delta_rule`."""
    c, out = weights.config, dict[int, Tensor]()
    for strand in strands.listed:
        if states is None and strand.slot != WITHIN:
            raise ValueError("a pass without a pool has no states of requests")
        state = _first(strand, c, states)
        for i in range(strand.advancing):
            row = strand.first + i
            out[row], state = _token(state, qkvz[row], gates[row], weights)
            for count, slot in strand.marks:
                if count == i + 1:
                    _keep(states, slot, state)
        if strand.slot != WITHIN and strand.advancing:
            _keep(states, strand.slot, state)
        for row, found in _nodes(strand, state, qkvz, gates, weights, states):
            out[row] = found
    return torch.stack([out[row] for row in range(len(qkvz))])


def _first(strand: Strand, c: DeltaConfig, states: LayerStates | None) -> _State:
    """The state before a strand's first row, or before the root of a tree whose root has been computed."""
    if states is None or strand.is_new:
        device = None if states is None else states.matrices.device
        zeros = torch.zeros(c.value_heads, c.key_size, c.value_size, device=device)
        return _State(zeros, torch.zeros(c.taps - 1, c.channels, device=device))
    return _State(states.matrices[strand.slot].clone(), states.inputs[strand.slot].float())


def _keep(states: LayerStates | None, slot: int, state: _State) -> None:
    assert states is not None
    states.matrices[slot] = state.matrices
    states.inputs[slot] = state.inputs.to(states.inputs.dtype)


def _nodes(
    strand: Strand,
    state: _State,
    qkvz: Tensor,
    gates: Tensor,
    weights: Recurrence,
    states: LayerStates | None,
) -> Iterator[tuple[int, Tensor]]:
    """The rows and outputs of a tree's nodes. What they were computed from goes to the journal."""
    after, c = {-1: state}, weights.config
    begin = strand.first + strand.advancing - strand.first_node
    for node, parent in enumerate(strand.parents):
        if node < strand.first_node:  # computed by an earlier pass
            assert states is not None
            own, gate = states.journal[strand.slot, node], states.gates[strand.slot, node]
            _, after[node] = _token(after[parent], own, gate, weights)
            continue
        row = begin + node
        found, after[node] = _token(after[parent], qkvz[row], gates[row], weights)
        if states is not None and strand.slot != WITHIN:
            states.journal[strand.slot, node] = qkvz[row, : c.channels]
            states.gates[strand.slot, node] = gates[row]
        yield row, found


def _token(state: _State, qkvz: Tensor, gates: Tensor, weights: Recurrence) -> tuple[Tensor, _State]:
    """One token's output `[H_v * d_v]` float32, and the state after it.

    Every shape is that of one row, so the bits do not depend on other rows.
    """
    c, x = weights.config, qkvz.float()
    window = torch.cat([state.inputs, x[None, : c.channels]])
    q, k, v = torch.split(F.silu((window * weights.taps).sum(0)), [c.keys, c.keys, c.values])
    q = _shared(_unit(q.view(c.key_heads, c.key_size)), c) * c.key_size**-0.5
    k = _shared(_unit(k.view(c.key_heads, c.key_size)), c)
    b, a = gates.float().chunk(2)
    decay = torch.exp(-weights.log_rates.exp() * F.softplus(a + weights.offsets))[:, None]  # [H_v, 1]
    old = state.matrices
    delta = torch.sigmoid(b)[:, None] * (v.view(c.value_heads, -1) - decay * (old * k[..., None]).sum(1))
    read = decay * (old * q[..., None]).sum(1) + (k * q).sum(1, keepdim=True) * delta  # [H_v, d_v]
    out = F.rms_norm(read, weights.scale.shape, weights.scale, weights.eps)
    if len(x) > c.channels:
        out = out * F.silu(x[c.channels :]).view(c.value_heads, -1)
    new = old * decay[..., None] + k[..., None] * delta[:, None]
    return out.flatten(), _State(new, window[1:])


def _shared(x: Tensor, c: DeltaConfig) -> Tensor:
    """A row of each key head for the value heads that share it: `[H_k, d_k] -> [H_v, d_k]`."""
    group = c.value_heads // c.key_heads
    return x.repeat(group, 1) if c.tiled else x.repeat_interleave(group, 0)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
