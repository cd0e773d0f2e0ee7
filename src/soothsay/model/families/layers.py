"""Which layers of a family have a sliding window, and which do not rotate, by its `config.json`.

A chooser of windows takes the file and the number of layers. A chooser of layers that do not rotate takes the
file and the windows of all layers. Each returns a truth value for every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soothsay.errors import ModelError

Raw = Mapping[str, Any]
"""The content of a `config.json`."""


def no_layer(raw: Raw, layers: int) -> list[bool]:
    """No layer has a sliding window."""
    return [False] * layers


def every_layer(raw: Raw, layers: int) -> list[bool]:
    """Every layer has a sliding window."""
    return [True] * layers


def even_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers 0, 2, 4, ... have a sliding window."""
    return [i % 2 == 0 for i in range(layers)]


def all_but_each(default: int) -> Callable[[Raw, int], list[bool]]:
    """Each layer but every `sliding_window_pattern`-th has a sliding window."""

    def windowed(raw: Raw, layers: int) -> list[bool]:
        pattern = raw.get("sliding_window_pattern") or default
        if isinstance(pattern, str):
            raise ModelError("config.json: sliding_window_pattern should be a number")
        return [(i + 1) % pattern != 0 for i in range(layers)]

    return windowed


def last_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers from `max_window_layers` on have a sliding window."""
    return [i >= int(raw.get("max_window_layers", 28)) for i in range(layers)]


def rotated_layers(raw: Raw, layers: int) -> list[bool]:
    """All but `unrotated_layers`."""
    return [not unrotated for unrotated in unrotated_layers(raw, layers)]


def full_layers(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """Layers without a sliding window."""
    return [window is None for window in windows]


def full_layers_beside_windows(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """Layers without a sliding window, where other layers have one."""
    return [window is None and any(windows) for window in windows]


def all_layers(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """No layer rotates."""
    return [True] * len(windows)


def listed_layers(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """See `unrotated_layers`."""
    return unrotated_layers(raw, len(windows))


def unrotated_layers(raw: Raw, layers: int) -> list[bool]:
    """Layers with 0 in `no_rope_layers`. Without it, each `no_rope_layer_interval`-th (default: fourth)."""
    interval = int(raw.get("no_rope_layer_interval") or 4)
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {layers} layers")
    return [not rotates for rotates in rotated[:layers]]


def all_or_none(raw: Raw, windows: Sequence[int | None]) -> list[bool]:
    """All layers, unless `position_embedding_type` is "rope"."""
    return [raw.get("position_embedding_type") != "rope"] * len(windows)
