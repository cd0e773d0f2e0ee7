"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): EAGLE-2's tree, and features of several layers."""

from __future__ import annotations

from soothsay.drafters.heads.eagle3.eagle3_head import Eagle3Head
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter


class Eagle3(ConfidentDrafter):
    """EAGLE-3: a head over features of several layers. Its output head may have the frequent tokens only."""

    method, kind = "eagle3", Eagle3Head
