"""Layers that keep states, in stock operations: convolutions, the gated delta rule, Mamba and Mamba-2.

The state of a layer is a matrix for each head, and the last inputs of a convolution. `run_rows` runs the rows
of a pass through a rule that reads a state and changes it, token by token: the rule of one token sees shapes
of one row only. So a row's bits do not depend on the chunks of a prompt, and the node of a tree has the bits
of the same token in plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from soothsay.core.functions import rms_norm, sigmoid, silu, softplus, total
from soothsay.core.state_shape import StateShape
from soothsay.core.states import LayerStates
from soothsay.core.strands import WITHIN, Strand, Strands, Windows
from soothsay.model.loaded_part import FloatPart
from soothsay.model.specs.state_specs import DeltaSpec, KimiDeltaSpec, SelectiveSpec, StateSpaceSpec


class State(NamedTuple):
    """What a token finds."""

    matrices: Tensor  # of `StateShape.matrices`, float32
    inputs: Tensor  # [taps - 1, channels] float32, of the tokens before


Rule = Callable[[State, Tensor, Tensor, Tensor | None], tuple[Tensor, State]]
"""From the state, a token's row and its gates to its output, float32, and the state after it. The row may end
with its first `channels` numbers; then the output is of no use. The last argument is memory that the matrices
after it may be written to, maybe that of the matrices before it; None: they need memory of their own."""


STORED = {"taps": "conv1d.weight", "log_rates": "A_log", "offsets": "dt_bias", "scale": "norm.weight"}
"""Parameters of a rule, and their names in checkpoints."""


class TokenRule(FloatPart, ABC):
    """The weights of a rule, random ones at first. Float32.

    Args:
        shape: of its state.
        heads: H, of which each has a state.
        decays: of a head's state.
        size: of the norm of outputs; None: they are not normed.
        stored: parameters that `STORED` has not, or under other names.
    """

    outputs: int
    """Numbers of an output row."""

    def __init__(
        self, shape: StateShape, heads: int, decays: int, size: int | None, eps: float, **stored: str
    ):
        super().__init__("taps", **{**STORED, **stored})
        self.shape, self.eps = shape, eps
        taps = torch.empty(shape.taps, shape.channels)
        self.taps = nn.Parameter(taps if taps.is_meta else taps.normal_(std=shape.taps**-0.5))
        """`[taps, channels]` of the convolution, the token's own last."""
        self.log_rates = nn.Parameter(torch.zeros(heads))
        """`[H]` the logarithm of how fast a state decays: A."""
        self.offsets = nn.Parameter(torch.ones(heads * decays))
        """`[H * decays]` added to what lets a state decay."""
        self.scale = None if size is None else nn.Parameter(torch.ones(size))
        """`[size]` factors of the norm of outputs; None: they are not normed."""

    @abstractmethod
    def rule(self, device: torch.device) -> Rule:
        """The rule, for one pass on a device."""


@torch.no_grad()
def run_rows(
    rows: Tensor, gates: Tensor, weights: TokenRule, states: LayerStates | None, strands: Strands
) -> Tensor:
    """Run the rows of a pass through one layer's rule.

    Args:
        rows: `[N, channels + more]`, the inputs of the convolution first: these go to the journal.
        gates: `[N, gates]`.
        weights: the layer's.
        states: the layer's; None: states live within the pass.
        strands: the rows of each request.

    Returns:
        The outputs `[N, ...]` float32.
    """
    out, c, rule = dict[int, Tensor](), weights.shape, weights.rule(rows.device)
    for strand in strands.listed:
        if states is None and strand.slot != WITHIN:
            raise ValueError("a pass without a pool has no states of requests")
        state = _first(strand, c, states)
        for i in range(strand.advancing):
            row = strand.first + i
            out[row], state = rule(state, rows[row], gates[row], state.matrices)
            for count, slot in strand.marks:
                if count == i + 1:
                    _keep(states, slot, state)
        if strand.slot != WITHIN and strand.advancing:
            _keep(states, strand.slot, state)
        out |= _nodes(strand, state, rows, gates, rule, states)
    return torch.stack([out[row] for row in range(len(rows))])


def _first(strand: Strand, c: StateShape, states: LayerStates | None) -> State:
    """The state before a strand's first row, or before the root of a tree whose root has been computed."""
    if states is None or strand.is_new:
        device = None if states is None else states.matrices.device
        zeros = torch.zeros(c.matrices, device=device)
        return State(zeros, torch.zeros(c.taps - 1, c.channels, device=device))
    return State(states.matrices[strand.slot].clone(), states.inputs[strand.slot].float())


def _keep(states: LayerStates | None, slot: int, state: State) -> None:
    assert states is not None
    states.matrices[slot] = state.matrices
    states.inputs[slot] = state.inputs.to(states.inputs.dtype)


def _nodes(
    strand: Strand, state: State, rows: Tensor, gates: Tensor, rule: Rule, states: LayerStates | None
) -> Iterator[tuple[int, Tensor]]:
    """The rows and outputs of a tree's nodes. What they were computed from goes to the journal."""
    after, last = {-1: state}, {parent: node for node, parent in enumerate(strand.parents)}
    begin = strand.first + strand.advancing - strand.first_node
    for node, parent in enumerate(strand.parents):
        before = after[parent]
        free = before.matrices if last[parent] == node else None  # the last child may overwrite them
        if node < strand.first_node:  # computed by an earlier pass
            assert states is not None
            own, gate = states.journal[strand.slot, node], states.gates[strand.slot, node]
            _, after[node] = rule(before, own, gate, free)
            continue
        row = begin + node
        found, after[node] = rule(before, rows[row], gates[row], free)
        if states is not None and strand.slot != WITHIN:
            states.journal[strand.slot, node] = rows[row, : states.journal.shape[-1]]
            states.gates[strand.slot, node] = gates[row]
        yield row, found


def _convolution(
    x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands
) -> tuple[Windows, Tensor, Tensor]:
    """The windows of all rows, the inputs that they show, and the convolution of these."""
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
    return found, inputs, out


class StateOps:
    """The rules of layers that keep states. Kernels may compute them in another way."""

    def token_rule(
        self, rows: Tensor, gates: Tensor, rule: TokenRule, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """A rule for each token: `Recurrence`, `StateSpace` or `SelectiveScan`.

        Rows that advance a state are taken into `states`. Nodes of a tree go to the journal there.

        Args:
            rows: `[N, channels + outputs]`: inputs of the convolution, then the gates of outputs, which may
                be left out where outputs are not used.
            gates: `[N, gates]`, by which states change.
            rule: the layer's.
            states: the layer's; None: states live within the pass.
            strands: the rows of each request.

        Returns:
            `[N, outputs]` float32; of no use without gates of outputs.
        """
        return run_rows(rows, gates, rule, states, strands)

    def convolve(self, x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
        """A causal convolution over the last tokens of a row's own path, channel by channel.

        A row's window are the tokens before it: the nodes above it in a tree, then committed tokens. They are
        picked by number, and the products are added tap by tap. So a row's bits do not depend on the rows
        beside it. States and the journal change as in `token_rule`.

        Args:
            x: `[N, channels]`, its inputs.
            taps: `[taps, channels]` float32, the token's own last.
            states: the layer's; None: states live within the pass.
            strands: the rows of each request.

        Returns:
            `[N, channels]` float32.
        """
        found, inputs, out = _convolution(x, taps, states, strands)
        if states is not None:
            states.inputs[found.end_slots] = inputs[found.ends]
            states.journal[found.noted] = x[found.noted_rows]
        return out

    def convolved(
        self, x: Tensor, rule: SelectiveScan, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """What the rule will see of its inputs: their convolution with its bias, after SiLU.

        States and the journal stay. `[N, channels]` to the same shape, float32.
        """
        return silu(_convolution(x, rule.taps, states, strands)[2] + rule.bias)

    def gated_convolve(
        self, bcx: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """`c * convolve(b * x)` float32, of `[N, 3 * channels]`: b, c and x."""
        b, c, inner = bcx.chunk(3, dim=-1)
        return c.float() * self.convolve(b * inner, taps, states, strands)


EPS = 1e-6
"""Added to the sum of squares of queries and keys before these are normed."""


KIMI_STORED = {
    "taps": "q_conv1d.weight k_conv1d.weight v_conv1d.weight",
    "scale": "o_norm.weight",
}


class Recurrence(TokenRule):
    """The weights of the gated delta rule (Yang et al. 2024, arXiv 2412.06464) behind a short convolution.

    A token's queries, keys and values pass a causal convolution over the last tokens and SiLU. Each head has
    a state, a matrix S `[d_k, d_v]` of zeros before the first token. A token with query q, key k, value v
    and gates a and b changes it and reads it:

        decay = e^(-e^A softplus(a + offset))     delta = sigmoid(b) (v - (decay S)^T k)
        out = (decay S)^T q + (k . q) delta       S <- decay S + k delta^T

    In Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692), each row of S has a decay of its own. A head's
    norm has a scale `[d_v]`.
    """

    scale: nn.Parameter

    def __init__(self, spec: DeltaSpec):
        stored = KIMI_STORED if isinstance(spec, KimiDeltaSpec) else {}
        super().__init__(spec.state, spec.value_heads, spec.decays, spec.value_size, spec.norm_eps, **stored)
        self.spec, self.outputs = spec, spec.values

    def rule(self, device: torch.device) -> Rule:
        """The rule of one token. It needs no memory of its own."""
        return partial(_delta_token, self)


OPENING = {"silu": silu, "sigmoid": sigmoid}
"""Functions of gates of outputs."""


def _delta_token(
    weights: Recurrence, state: State, qkvz: Tensor, gates: Tensor, free: Tensor | None
) -> tuple[Tensor, State]:
    """One token's output `[H_v * d_v]` float32, and the state after it."""
    c, x = weights.spec, qkvz.float()
    window = torch.cat([state.inputs, x[None, : c.channels]])
    q, k, v = torch.split(silu((window * weights.taps).sum(0)), [c.keys, c.keys, c.values])
    q = _shared(_unit(q.view(c.key_heads, c.key_size)), c) * c.key_size**-0.5
    k = _shared(_unit(k.view(c.key_heads, c.key_size)), c)
    b, a = torch.split(gates.float(), [c.value_heads, c.value_heads * c.decays])
    steps = softplus(a + weights.offsets).view(c.value_heads, -1)
    decay = torch.exp(-weights.log_rates.exp()[:, None] * steps)  # [H_v, 1] or [H_v, d_k]
    kept = state.matrices * decay[..., None]
    delta = sigmoid(b)[:, None] * (v.view(c.value_heads, -1) - (kept * k[..., None]).sum(1))
    read = (kept * q[..., None]).sum(1) + (k * q).sum(1, keepdim=True) * delta  # [H_v, d_v]
    out = rms_norm(read, weights.scale, weights.eps)
    if len(x) > c.channels:
        out = out * OPENING[c.opening](x[c.channels :]).view(c.value_heads, -1)
    return out.flatten(), State(kept + k[..., None] * delta[:, None], window[1:])


def _shared(x: Tensor, c: DeltaSpec) -> Tensor:
    """A row of each key head for the value heads that share it: `[H_k, d_k] -> [H_v, d_k]`."""
    group = c.value_heads // c.key_heads
    return x.repeat(group, 1) if c.tiled else x.repeat_interleave(group, 0)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(total(x * x) + EPS)


class StateSpace(TokenRule):
    """The weights of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060) behind a short convolution.

    A token's x, B and C pass a causal convolution over the last tokens, with a bias, and SiLU. Each head has
    a state, a matrix S `[d_state, d_x]` of zeros before the first token. Heads of one group share B and C. A
    token with a step t changes the state and reads it:

        step = softplus(t + offset)     S <- e^(-e^A step) S + B (step x)^T     out = S^T C + D x

    Outputs are multiplied by SiLU of gates z, and then normed, all heads of a group together. In some models
    the norm comes first, or there is none. The norm has a scale `[H * d_x]`.
    """

    def __init__(self, spec: StateSpaceSpec):
        size = spec.size if spec.normed else None
        super().__init__(spec.state, spec.heads, 1, size, spec.norm_eps, bias="conv1d.bias", skips="D")
        self.spec, self.outputs = spec, spec.size
        self.bias = nn.Parameter(torch.zeros(spec.channels))
        """`[channels]` of the convolution."""
        self.skips = nn.Parameter(torch.ones(spec.heads))
        """`[H]` how much of its input goes to a head's output: D."""

    def rule(self, device: torch.device) -> Rule:
        """The rule of one token, with memory for what is summed."""
        return partial(_state_space_token, self, torch.empty(self.shape.matrices, device=device))


def _state_space_token(
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


class SelectiveScan(TokenRule):
    """The weights of Mamba (Gu and Dao 2023, arXiv 2312.00752) behind a short convolution.

    A token's x passes a causal convolution over the last tokens, with a bias, and SiLU. Its t, B and C are
    products of that. Each channel has a state s `[d_state]`, with a decay for each of its numbers:

        step = softplus(t + offset)     s <- e^(-e^A step) s + step x B     out = s . C + D x

    Outputs are multiplied by SiLU of gates z.
    """

    def __init__(self, spec: SelectiveSpec):
        stored = {"offsets": "dt_proj.bias", "bias": "conv1d.bias", "skips": "D"}
        super().__init__(spec.state, spec.size, 1, None, 0.0, **stored)
        self.spec, self.outputs = spec, spec.size
        self.log_rates = nn.Parameter(torch.zeros(spec.size, spec.state_size))
        """`[size, d_state]` the logarithm of how fast a state decays: A."""
        self.bias = nn.Parameter(torch.zeros(spec.size))
        """`[size]` of the convolution."""
        self.skips = nn.Parameter(torch.ones(spec.size))
        """`[size]` how much of its input goes to a channel's output: D."""

    @cached_property
    def rates(self) -> Tensor:
        """`[d_state, size]`: e^A."""
        return self.log_rates.exp().t().contiguous()

    def rule(self, device: torch.device) -> Rule:
        """The rule of one token. It needs no memory of its own."""
        return partial(_selective_token, self)


def _selective_token(
    weights: SelectiveScan, state: State, xz: Tensor, gates: Tensor, free: Tensor | None
) -> tuple[Tensor, State]:
    """One token's output `[size]` float32, and the state after it."""
    c, row = weights.spec, xz.float()
    window = torch.cat([state.inputs, row[None, : c.size]])
    x = silu((window * weights.taps).sum(0) + weights.bias)
    steps, b, read = torch.split(gates.float(), [c.size, c.state_size, c.state_size])
    step = softplus(steps + weights.offsets)
    matrices = state.matrices.transpose(0, 1).flatten(1)  # [d_state, size]
    new = matrices * torch.exp(-weights.rates * step) + b[:, None] * (step * x)
    out = (new * read[:, None]).sum(0) + weights.skips * x
    if len(row) > c.size:
        out = out * silu(row[c.size :])
    return out, State(new.view(c.state_size, -1, c.width).transpose(0, 1).contiguous(), window[1:])
