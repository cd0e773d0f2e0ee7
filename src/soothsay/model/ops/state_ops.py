"""Operations of layers that keep states, in stock operations."""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.core.states import LayerStates
from soothsay.core.strands import WITHIN, Strands
from soothsay.model.ops.token_rule import TokenRule, run_rows


class StateOps:
    """The rules of layers that keep states. Kernels may compute them in another way."""

    def token_rule(
        self, rows: Tensor, gates: Tensor, rule: TokenRule, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """A rule for each token: the gated delta rule (`soothsay.model.ops.delta_rule`), or Mamba-2
        (`soothsay.model.ops.state_space`).

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

    def gated_convolve(
        self, bcx: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """`c * convolve(b * x)` float32, of `[N, 3 * channels]`: b, c and x."""
        b, c, inner = bcx.chunk(3, dim=-1)
        return c.float() * self.convolve(b * inner, taps, states, strands)
