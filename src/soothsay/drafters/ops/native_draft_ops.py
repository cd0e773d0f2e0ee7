"""`DraftOps` in C: the library of an instruction set, called through ctypes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from soothsay.drafters.ops.draft_ops import DraftOps
from soothsay.drafters.ops.native_automaton import NativeAutomaton
from soothsay.drafters.ops.native_recurrent import NativeRecurrentDrafts
from soothsay.drafters.ops.native_redrafter import NativeRedrafter, grow_paths
from soothsay.drafters.ops.recurrent_drafts import DraftOutput, RecurrentLayers
from soothsay.drafters.ops.refinement import Candidates, RedrafterCall, Refinement
from soothsay.model.kernels import Kernels
from soothsay.model.native.library import Library
from soothsay.model.native.linear import NativeLinear
from soothsay.model.norm import Norm


class NativeDraftOps(Library, DraftOps):
    """The operations of one compiled library.

    Raises `OSError` if the library is missing or cannot run on this processor.
    """

    def redrafter_head(self, layers: Sequence[nn.Module], norm: Norm, depths: int) -> RedrafterCall | None:
        """See `DraftOps`."""
        own = [layer for layer in layers if isinstance(layer, NativeLinear)]
        return NativeRedrafter(self._run_redrafter, own, norm, depths) if own == [*layers] else None

    def recurrent_drafts(self, layers: RecurrentLayers) -> NativeRecurrentDrafts | None:
        """See `DraftOps`."""
        return NativeRecurrentDrafts(self._run_drafts, layers) if NativeRecurrentDrafts.fit(layers) else None

    def grow_paths(
        self, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
    ) -> DraftOutput:
        """See `DraftOps`."""
        return grow_paths(self._library.soothsay_grow_paths, refinement, candidates, nodes, depth)

    def automaton(self, counted: int) -> NativeAutomaton:
        """See `DraftOps`."""
        return NativeAutomaton(self._library, counted)

    def _run_redrafter(self, *arguments: object) -> None:
        self._library.soothsay_look(*arguments)

    def _run_drafts(self, *arguments: object) -> None:
        self._library.soothsay_draft(*arguments)


def draft_ops(kernels: Kernels) -> DraftOps:
    """The operations of drafters that go with a model's kernels: of the same library, or stock ones."""
    return NativeDraftOps(kernels.variant) if kernels.variant else DraftOps()
