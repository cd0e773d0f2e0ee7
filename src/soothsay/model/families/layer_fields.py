"""Fields of a config.json that say something of each layer: windows, types, and how its heads rotate.

Functions return a value for every layer, and raise `ModelError`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_POSITIONS, require
from soothsay.model.specs.attention_spec import NO_ROTATION, HeadRotation, RopeSpec

Raw = Mapping[str, Any]
"""The content of a `config.json`, its fields checked."""

Windows = Sequence[int | None]
Chooser = Callable[[Raw], Sequence[bool]]
Own = TypeVar("Own")
Other = TypeVar("Other")


def count(raw: Raw) -> int:
    """Number of layers."""
    return int(raw["num_hidden_layers"])


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def sizes(*values: int | None, **more: Any) -> Raw:
    """A model's `SIZES`, in order, and more keys. None: a file may leave the key out."""
    return {**dict(zip(SIZES, values, strict=True)), **more}


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
    require(not isinstance(pattern, str), "sliding_window_pattern should be a number")
    return [(i + 1) % pattern != 0 for i in range(count(raw))]


def last(raw: Raw) -> list[bool]:
    """Layers from `max_window_layers` on."""
    return [i >= int(raw.get("max_window_layers", 28)) for i in range(count(raw))]


def unrotated(raw: Raw) -> list[bool]:
    """Layers with 0 in `no_rope_layers`. Without it, each `no_rope_layer_interval`-th (default: fourth)."""
    interval, layers = int(raw.get("no_rope_layer_interval") or 4), count(raw)
    rotated = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(layers)]
    require(len(rotated) >= layers, f"no_rope_layers has {len(rotated)} entries for {layers} layers")
    return [not rotates for rotates in rotated[:layers]]


def mixed(
    raw: Raw,
    own: Own,
    others: Sequence[Other],
    attends: Callable[[int], bool] = lambda layer: True,
    kind: str = "linear_attention",
) -> list[Own | Other]:
    """One part for the layers of a type, and other parts for those with full attention.

    Args:
        raw: the file.
        own: the part of layers of type `kind`.
        others: the part of each layer, if it has full attention. No layer should have a third type.
        attends: whether a layer has full attention, by its number, where the file does not say so.
        kind: the type.
    """
    layers = range(count(raw))
    kinds = raw.get("layer_types", ["full_attention" if attends(layer) else kind for layer in layers])
    if len(kinds) != len(layers) or not set(kinds) <= {kind, "full_attention"}:
        raise ModelError(
            f"config.json: layer_types should be {kind} or full_attention for each of {len(layers)} "
            f"layers; it has {len(kinds)} entries: {', '.join(sorted(set(kinds)))}"
        )
    return [own if found == kind else other for found, other in zip(kinds, others, strict=True)]


KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")

ROPE_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
"""Fields of `RopeSpec` that files have under the same names."""

ALIASES = {"su": "longrope", "mrope": "default", "dynamic": "default"}
"""Kinds that compute what another one computes.

su: longrope's older name. mrope: text has the same position in all three axes. dynamic: transformers changes
the base as soon as a request is longer than `max_position_embeddings`, so keys would depend on later tokens.
Up to there, nothing is scaled, and there the context ends."""


def heads_of(raw: Raw) -> tuple[int, int, int]:
    """The heads of queries, those of keys and values, and the size of a head."""
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    require(
        "head_dim" in raw or hidden % heads == 0,
        f"{heads} attention heads do not divide hidden_size {hidden}",
    )
    size = int(raw.get("head_dim") or hidden // heads)
    require(size % 2 == 0, f"heads of {size} dimensions cannot be rotated; head_dim must be even")
    return heads, kv_heads, size


def rotations(
    raw: Raw,
    *,
    share: float | None = None,
    neighbours: bool = False,
    local: Windows = (),
    unrotated: Sequence[bool] = (),
) -> list[HeadRotation]:
    """How the heads of each layer rotate.

    Args:
        raw: the file.
        share: the share of a head that rotates, where the file does not say so; None: all, whatever it says.
        neighbours: stored heads rotate by pairs of neighbours.
        local: windows of all layers: those with a window rotate by a rotary embedding of their own.
        unrotated: for each layer, whether it does not rotate; empty: all do.
    """
    size = heads_of(raw)[2]
    rotated = None if share is None else rotated_dimensions(raw, size, share)
    first = main_rope(raw, rotated or size)
    second = _rope(raw, rotated or size, is_local=True) if local else NO_ROTATION
    chosen = [window is not None for window in local] or unrotated or [False] * count(raw)
    return [HeadRotation(second if other else first, size, rotated, neighbours) for other in chosen]


def rotated_dimensions(raw: Raw, size: int, share: float) -> int | None:
    """Dimensions of a head that rotate; None: all. `share` of them, where the file does not say so."""
    share = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", share)
    rotated = int(size * raw.get("partial_rotary_factor", share))
    require(
        2 <= rotated <= size and rotated % 2 == 0,
        f"by its partial_rotary_factor, {rotated} of {size} dimensions of each head rotate; "
        "the number must be even",
    )
    return None if rotated == size else rotated


def main_rope(raw: Raw, dims: int) -> RopeSpec:
    """The rotary embedding of most layers, which turns `dims` dimensions of a head."""
    return _rope(raw, dims, is_local=False)


def _rope(raw: Raw, dims: int, *, is_local: bool) -> RopeSpec:
    """The rotary embedding of most layers, or of those with a window."""
    positions = int(raw["max_position_embeddings"])
    original = int(raw.get("original_max_position_embeddings") or positions)
    theta = float(raw.get("rope_theta") or 1e4)
    scaling: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "full_attention" in scaling:  # transformers 5 writes one mapping for each kind of layer
        scaling = scaling["sliding_attention" if is_local else "full_attention"]
    elif is_local:
        scaling = {}
    if is_local:
        theta = float(raw.get("rope_local_base_freq") or theta)
    return parse_rope(scaling, theta, positions, original, dims)


def scaled_context(raw: Raw, rope: RopeSpec, *, states_scaled: bool = False) -> int:
    """The context after scaling. A file with llama3 scaling states the scaled context already.

    `states_scaled`: so does one with linear scaling.
    """
    positions = int(raw["max_position_embeddings"])
    if rope.kind == "yarn":
        positions = max(positions, int(rope.original_max_positions * rope.factor))
    elif rope.kind == "linear" and not states_scaled:
        positions = int(positions * rope.factor)
    require(
        1 <= positions <= MAX_POSITIONS,
        f"a context of {positions:,} tokens, scaled by {rope.factor:g}, is not possible",
    )
    return positions


def parse_rope(
    scaling: Mapping[str, Any], theta: float, positions: int, original: int, dims: int
) -> RopeSpec:
    """Parse a mapping of checked fields.

    Args:
        scaling: the mapping. Without a type, nothing is scaled.
        theta: the base, where `scaling` has none.
        positions: the model's context.
        original: the context of the first training, where `scaling` has none.
        dims: dimensions of a head that rotate.

    Raises `ModelError` for an unknown type, and for numbers that do not fit each other.
    """
    name = scaling.get("rope_type", scaling.get("type", "default"))
    kind = ALIASES.get(name, name)
    if kind not in KINDS:
        known = ", ".join((*KINDS, *ALIASES))
        raise ModelError(f"rope_scaling type {kind!r} is not supported; known types: {known}")
    if kind not in ("default", "longrope", "proportional") and scaling.get("factor") is None:
        raise ModelError(f"rope_scaling of type {kind!r} has no 'factor' in config.json")

    own: dict[str, Any] = {key: float(scaling[key]) for key in ROPE_NUMBERS if scaling.get(key) is not None}
    require(
        own.get("high_freq_factor", 4.0) >= own.get("low_freq_factor", 1.0),
        "high_freq_factor must not be below low_freq_factor",
    )
    original = int(scaling.get("original_max_position_embeddings") or original)
    if kind == "longrope":
        own = {"factor": positions / original, **own, **_longrope(scaling, positions, original, dims)}
    return RopeSpec(
        theta=float(scaling.get("rope_theta", theta)),
        kind=kind,
        original_max_positions=original,
        truncate=bool(scaling.get("truncate", True)),
        share=float(scaling.get("partial_rotary_factor", 1.0)) if kind == "proportional" else 1.0,
        **own,
    )


def _longrope(scaling: Mapping[str, Any], positions: int, original: int, dims: int) -> dict[str, Any]:
    """The fields that only longrope has."""
    require(original >= 2, f"longrope with a context of {original} tokens before scaling is not possible")
    factors = {}
    for ours, key in (("short_factors", "short_factor"), ("long_factors", "long_factor")):
        given = tuple(float(value) for value in scaling.get(key) or ())
        require(
            len(given) == dims // 2,
            f"{key!r} of longrope has {len(given)} values, and {dims // 2} pairs of dimensions rotate",
        )
        factors[ours] = given
    return {**factors, "context": positions}
