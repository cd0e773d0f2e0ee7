"""Threads of PyTorch's OpenMP must not spin for long on cores that the kernels' threads need."""

import os
import re
import subprocess
import sys

import pytest

from soothsay.openmp import CHOICES, SPINS


def spins(**chosen: str) -> str | None:
    """What OpenMP has read when torch is imported after soothsay; None if it is not GNU's."""
    env = {name: value for name, value in os.environ.items() if name not in CHOICES}
    code = "import soothsay, torch; torch.ones(1 << 20).add_(1)"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "OMP_DISPLAY_ENV": "verbose", **chosen},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", shown)
    return None if found is None else found[1]


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP comes with torch on Linux alone")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_spin_for_a_moment_unless_the_user_says_otherwise(
    chosen: dict[str, str], expected: str
) -> None:
    assert spins(**chosen) == expected
