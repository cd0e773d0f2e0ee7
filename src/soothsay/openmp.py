"""How long PyTorch's threads spin after their work. It has to be said before torch is imported."""

from __future__ import annotations

import os

SPINS = "10000"
"""Turns of a waiting loop, some 0.1 ms, before a thread of GNU's OpenMP sleeps.

By default it spins for milliseconds after each large operation of torch, on a core that the kernels' own
threads need. Steps of drafters that rank all logits then took 1.4 times as long. Without any spinning, models
whose layers are torch's own slow down by a half, since each layer wakes the threads."""

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which users choose for themselves."""


def limit_spinning() -> None:
    """Let waiting threads of GNU's OpenMP spin for `SPINS`, unless the user has chosen.

    It has no effect in a process that has imported torch before.
    """
    if not any(name in os.environ for name in CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
