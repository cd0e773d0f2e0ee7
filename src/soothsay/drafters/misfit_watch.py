"""Reports a trained drafter that never drafts right, as one that was trained for another model does."""

from __future__ import annotations

import warnings

WATCHED_STEPS = 100
"""Steps with drafts after which a drafter is judged."""

CHANCE = 0.02
"""Share of steps in which a draft token may be right by chance."""


class MisfitWatch:
    """Counts the first steps of one drafter.

    Args:
        name: of the drafter.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.right = 0  # steps in which a draft token was accepted

    def record(self, accepted: int) -> None:
        """Count a step with a draft of which `accepted` tokens were right.

        Warns after `WATCHED_STEPS` if hardly any step had one.
        """
        self.steps += 1
        self.right += accepted > 0
        if self.steps == WATCHED_STEPS and self.right < CHANCE * WATCHED_STEPS:
            warnings.warn(
                f"{self.name} guessed right in {self.right} of its first {WATCHED_STEPS} steps: it was "
                "probably trained for another model, or is read as another method than it is; "
                "'soothsay inspect MODEL --drafter PATH' says what it is",
                stacklevel=2,
            )
