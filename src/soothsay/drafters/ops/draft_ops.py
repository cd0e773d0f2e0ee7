"""The operations of drafters that depend on a device or an instruction set.

The engine has one set of them, which it passes to drafters in `Target`. `DraftOps` has the stock operations,
`native_draft_ops.NativeDraftOps` those of a compiled library.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from soothsay.drafters.ops.automaton import Automaton
from soothsay.drafters.ops.recurrent_drafts import DraftOutput, RecurrentDrafts, RecurrentLayers
from soothsay.drafters.ops.refinement import Candidates, RedrafterCall, Refinement, grow_refined_tree
from soothsay.drafters.ops.stock_automaton import StockAutomaton
from soothsay.model.norm import Norm


class DraftOps:
    """The stock operations. A subclass computes some of them in another way."""

    def redrafter_head(self, layers: Sequence[nn.Module], norm: Norm, depths: int) -> RedrafterCall | None:
        """One call for all that a ReDrafter head computes; None if there is none for these layers.

        Args:
            layers: its linear layers: `look`, `guesses`, `read`, `token` and `out` of the cell, and `head`.
                The weights must keep their addresses.
            norm: of guesses.
            depths: that it predicts.
        """
        return None

    def recurrent_drafts(self, layers: RecurrentLayers) -> RecurrentDrafts | None:
        """One call for all that a recurrent head drafts; None if there is none for these layers.

        The weights must keep their addresses. Noise is nearly that of `SamplingOps`, so trees may differ
        where scores nearly tie.
        """
        return None

    def grow_paths(
        self, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
    ) -> DraftOutput:
        """Grow the best tree over refined guesses; see `soothsay.drafters.ops.refinement.grow_refined_tree`.

        The native one sums in another order, so trees may differ where scores nearly tie.
        """
        return grow_refined_tree(refinement, candidates, nodes, depth)

    def automaton(self, counted: int) -> Automaton:
        """An empty automaton. `counted` is that of `Automaton`."""
        return StockAutomaton(counted)
