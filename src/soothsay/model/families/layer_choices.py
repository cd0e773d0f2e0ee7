"""Fields of a config.json that say something of each layer: windows, types, and which layers do not rotate.

Each function takes the file, and returns a value for every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soothsay.errors import ModelError

Raw = Mapping[str, Any]
"""The content of a `config.json`, its fields checked."""

Windows = Sequence[int | None]
Chooser = Callable[[Raw], Sequence[bool]]


def count(raw: Raw) -> int:
    """Number of layers."""
    return int(raw["num_hidden_layers"])


def no_layer(raw: Raw) -> list[bool]:
    """No layer."""
    return [False] * count(raw)


def windows(
    raw: Raw, chosen: Chooser = no_layer, *, reads_types: bool = True, has_switch: bool = False
) -> Windows:
    """The sliding window of each layer.

    Args:
        raw: the file.
        chosen: for each layer, whether it has the window.
        reads_types: the file's `layer_types` take the place of `chosen`.
        has_switch: the window counts only if `use_sliding_window` is true.
    """
    window = raw.get("sliding_window")
    if not window or (has_switch and not raw.get("use_sliding_window", False)):
        return [None] * count(raw)
    typed = {**raw, "layer_types": raw.get("layer_types") if reads_types else None}
    return of_type(typed, "sliding_attention", int(window), chosen)


def of_type(raw: Raw, kind: str, size: int, chosen: Chooser) -> Windows:
    """`size` for the layers of a type, or without types for the chosen ones; None for the others."""
    kinds = raw.get("layer_types")
    windowed = [each == kind for each in kinds] if kinds else chosen(raw)
    if len(windowed) != count(raw):
        raise ModelError(f"config.json: layer_types has {len(windowed)} entries for {count(raw)} layers")
    return [size if has_window else None for has_window in windowed]


def every(raw: Raw) -> list[bool]:
    """Every layer."""
    return [True] * count(raw)


def even(raw: Raw) -> list[bool]:
    """Layers 0, 2, 4, ..."""
    return [i % 2 == 0 for i in range(count(raw))]


def all_but_each(default: int, raw: Raw) -> list[bool]:
    """Each layer but every `sliding_window_pattern`-th."""
    pattern = raw.get("sliding_window_pattern") or default
    if isinstance(pattern, str):
        raise ModelError("config.json: sliding_window_pattern should be a number")
    return [(i + 1) % pattern != 0 for i in range(count(raw))]


def last(raw: Raw) -> list[bool]:
    """Layers from `max_window_layers` on."""
    return [i >= int(raw.get("max_window_layers", 28)) for i in range(count(raw))]


def unrotated(raw: Raw) -> list[bool]:
    """Layers with 0 in `no_rope_layers`. Without it, each `no_rope_layer_interval`-th (default: fourth)."""
    interval, layers = int(raw.get("no_rope_layer_interval") or 4), count(raw)
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    if len(rotated) < layers:
        raise ModelError(f"config.json: no_rope_layers has {len(rotated)} entries for {layers} layers")
    return [not rotates for rotates in rotated[:layers]]


def are(wanted: str, raw: Raw) -> list[bool]:
    """Layers of a type. All others should have full attention."""
    kinds, layers = raw["layer_types"], count(raw)
    if len(kinds) != layers or not set(kinds) <= {wanted, "full_attention"}:
        raise ModelError(
            f"config.json: layer_types should be {wanted} or full_attention for each of {layers} "
            f"layers; it has {len(kinds)} entries: {', '.join(sorted(set(kinds)))}"
        )
    return [kind == wanted for kind in kinds]
