"""Parameters of which some are left to the slow tests, or to other processors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from soothsay.model.ops.linear import multiplies_bfloat16


def distinct(*dtypes: str) -> list[str]:
    """Number formats, without bfloat16 where this processor does not multiply it: there it is float32."""
    return [dtype for dtype in dtypes if dtype != "bfloat16" or multiplies_bfloat16()]


def mostly_slow(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Values for `pytest.mark.parametrize`: `make test` runs one of `every`, and the first one."""
    return [
        pytest.param(value, marks=() if place % every == 0 else pytest.mark.slow)
        for place, value in enumerate(values)
    ]
