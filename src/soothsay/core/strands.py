"""The rows of a pass as layers with a state read them: one strand a request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soothsay.core.forms import HasForms
from soothsay.core.strand import Strand
from soothsay.core.windows import WindowPlanner, Windows


@dataclass(frozen=True)
class Strands(HasForms):
    """The strands of a pass."""

    listed: tuple[Strand, ...]

    def windows(self, taps: int, device: torch.device) -> Windows:
        """The windows of a convolution over `taps` tokens. Layers of one kind share them."""
        return self.form(_windows, taps, device)


def _windows(strands: Strands, taps: int, device: torch.device) -> Windows:
    return WindowPlanner(strands.listed, taps).plan(device)
