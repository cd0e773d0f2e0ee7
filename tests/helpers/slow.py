"""Parameters of which most are left to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Values for `pytest.mark.parametrize`: `make test` runs one of `every`, and the first one."""
    return [
        pytest.param(value, marks=() if place % every == 0 else pytest.mark.slow)
        for place, value in enumerate(values)
    ]
