"""A small recurrent cell that makes a one-pass drafter's guesses depend on the tokens of their path.

One pass predicts all depths before any draft token is chosen, so its guesses do not know of each other. The
cell walks along a path: at each depth it reads the pass's output, the token that was chosen last and its own
state, and corrects the output. xPress (2026) refines so with a low rank; ReDrafter (Cheng et al. 2024, arXiv
2403.09919) drafts by a recurrent cell alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.model.linear import Dense

UNITS = 16
"""Sizes of cells, and of layers beside them, are multiples of this, which suits all vector instructions."""


class Refiner(nn.Module):
    """`state = silu(read(output) + token(embedding) + carry(state above))`, `output += out(state)`.

    Tokens come as embeddings of the target, so the cell has no rows of its own for them. Along paths it costs
    little: `read` is computed once for each depth, `token` once for each token of a shortlist.

    Args:
        hidden_size: H, of outputs and embeddings.
        units: U, of the state.
    """

    def __init__(self, hidden_size: int, units: int):
        super().__init__()
        self.units = units
        self.read: nn.Module = Dense.random(hidden_size, units)
        self.token: nn.Module = Dense.random(hidden_size, units)
        self.carry: nn.Module = Dense.random(units, units)
        self.out: nn.Module = Dense.random(units, hidden_size)

    def forward(self, output: Tensor, embedded: Tensor, above: Tensor | None) -> tuple[Tensor, Tensor]:
        """Refine the outputs of one depth.

        Args:
            output: `[M, H]`, the pass's normed output at this depth.
            embedded: `[M, H]`, the normed embedding of the token before the guess.
            above: `[M, U]`, the state one token above; None below the root.

        Returns:
            The refined output `[M, H]`, and the state `[M, U]`, both float32.
        """
        state = self.read(output).float() + self.token(embedded).float()
        if above is not None:
            state = state + self.carry(above).float()
        state = F.silu(state)
        return output + self.out(state).float(), state

    def begin(self, outputs: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Refine the first depth of R requests, and prepare the depths below it.

        Args:
            outputs: `[R, D, H]`, the pass's normed outputs.
            embedded: `[R, H]`, the normed embeddings of the roots' tokens.

        Returns:
            `[R * D, H]`, the outputs, the first of each request refined; `[R * D, U]`, what `read` makes of
            each; and `[R, U]`, the states of the roots. All float32.
        """
        first, states = self(outputs[:, 0], embedded, None)
        rows = torch.cat([first[:, None], outputs[:, 1:]], dim=1).flatten(0, 1)
        return rows, self.read(outputs.flatten(0, 1)).float(), states
