"""Notices drafters that are never right, which is what a drafter of another model looks like."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soothsay.drafters.base import Drafter

STEPS = 100
"""Steps with guesses after which a drafter is judged."""

SHARE = 0.02
"""Guesses right in fewer steps than this are what chance gives."""


class Watch:
    """Counts the first steps of one drafter."""

    def __init__(self) -> None:
        self.steps = 0
        self.right = 0  # of them, those in which a guess was right

    def see(self, drafter: Drafter, accepted: int) -> None:
        """Count a step with guesses, `accepted` of them right. Warns after `STEPS` if hardly any was."""
        self.steps += 1
        self.right += accepted > 0
        if self.steps == STEPS and self.right < SHARE * STEPS:
            warnings.warn(
                f"{type(drafter).__name__} guessed right in {self.right} of its first {STEPS} steps: it was "
                "probably trained for another model, or is read as another method than it is; "
                "'soothsay inspect MODEL --drafter PATH' says what it is",
                stacklevel=2,
            )
