"""The accepted rows of draft trees. Layers with a state advance by these rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.core.cache import Move
from soothsay.core.strands import Strand, Strands, marked
from soothsay.core.transfer import send


@dataclass(frozen=True)
class Accepted:
    """The accepted rows of trees."""

    strands: Strands
    rows: tuple[Tensor, Tensor]  # [N] int64 each: the slot of the request, and the node of its tree

    @classmethod
    def of(cls, moves: Sequence[Move], device: torch.device) -> Accepted:
        """The roots and accepted nodes of `moves`. Raises `ValueError` for a request without a state."""
        strands, nodes, slots = list[Strand](), list[int](), list[int]()
        for move in moves:
            if move.state is None:
                raise ValueError("a request without a slot for its state cannot advance")
            own, start = move.nodes, move.start - 1
            marks = marked(move.marks, start, len(own))
            strands.append(Strand(len(nodes), len(own), 0, (), move.state, start == 0, marks))
            nodes += own
            slots += [move.state] * len(own)
        owners, own_nodes = send([slots, nodes], device)
        return cls(Strands(tuple(strands)), (owners, own_nodes))
