"""Runs the rows of a pass through a rule that reads a state and changes it, token by token.

The state of a layer is a matrix for each head, and the last inputs of a convolution. The rule of one token
sees shapes of one row only. So a row's bits do not depend on the chunks of a prompt, and the node of a tree
has the bits of the same token in plain decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from soothsay.core.state_shape import StateShape
from soothsay.core.states import LayerStates
from soothsay.core.strands import WITHIN, Strand, Strands
from soothsay.model.loaded_part import FloatPart


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
        size: of the norm of outputs; None: they are not normed.
        stored: further parameters, and their names in checkpoints.
    """

    outputs: int
    """Numbers of an output row."""

    def __init__(self, shape: StateShape, heads: int, size: int | None, eps: float, **stored: str):
        super().__init__("taps", **STORED, **stored)
        self.shape, self.eps = shape, eps
        taps = torch.empty(shape.taps, shape.channels)
        self.taps = nn.Parameter(taps if taps.is_meta else taps.normal_(std=shape.taps**-0.5))
        """`[taps, channels]` of the convolution, the token's own last."""
        self.log_rates = nn.Parameter(torch.zeros(heads))
        """`[H]` the logarithm of how fast a state decays: A."""
        self.offsets = nn.Parameter(torch.ones(heads))
        """`[H]` added to what lets a state decay."""
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
        out |= _nodes(strand, state, rows, gates, c, rule, states)
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
    strand: Strand,
    state: State,
    rows: Tensor,
    gates: Tensor,
    c: StateShape,
    rule: Rule,
    states: LayerStates | None,
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
            states.journal[strand.slot, node] = rows[row, : c.channels]
            states.gates[strand.slot, node] = gates[row]
        yield row, found
