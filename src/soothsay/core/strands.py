"""The rows of a pass as layers with a state read them: one strand a request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cached_property

import torch

from soothsay.core.strand import Strand
from soothsay.core.windows import WindowPlanner, Windows


@dataclass(frozen=True)
class Strands:
    """The strands of a pass, in the forms that kernels read."""

    listed: tuple[Strand, ...]
    _windows: dict[tuple[int, torch.device], Windows] = field(default_factory=dict, compare=False)

    @cached_property
    def plan(self) -> array[int]:
        """End to end, as kernels read them; see `soothsay_delta_rule` in csrc/kernels.h."""
        plan = array("q", [len(self.listed)])
        for s in self.listed:
            size = len(s.parents)
            plan.extend((s.first, s.advancing, s.first_node, size, s.slot, s.is_new, len(s.marks)))
            plan.extend(s.parents)
            plan.extend(number for mark in s.marks for number in mark)
        return plan

    def windows(self, taps: int, device: torch.device) -> Windows:
        """The windows of a convolution over `taps` tokens. Layers of one kind share them."""
        key = taps, device
        if key not in self._windows:
            self._windows[key] = WindowPlanner(self.listed, taps).plan(device)
        return self._windows[key]
