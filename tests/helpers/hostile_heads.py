"""Configurations of drafters with hostile values, and what may become of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.head_directory import read_head
from soothsay.errors import DrafterError

HOSTILE: list[Any] = [
    *(0, -1, 1, 10**9, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf")),
    *("x", "", None, True, [], {}, [[]], [None], [10**9], {"x": {}}, [-1, 5, 7]),
]


def read(directory: Path, target: Target) -> bool:
    """Whether a head is read; if not, it is refused by `DrafterError`."""
    try:
        read_head(directory, target)
    except DrafterError as error:
        assert str(directory) in str(error)  # noqa: PT017
        return False
    return True


def places(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in places(value))


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = place
    return {**config, key: changed(config[key], tuple(rest), value) if rest else value}
