"""Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.decoder import decoder
from soothsay.model.families.gemma import gemma_keys, scaled_embedding
from soothsay.model.families.layer_fields import Raw, count, rotations, windows
from soothsay.model.families.part_fields import activation, attentions, dense, head_norms
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseAndExpertsSpec, DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import LayerEmbeddingsSpec, LayerInputSpec, ModelSpec

LOCAL, GLOBAL = "sliding_attention", "full_attention"

DEFAULTS: Raw = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 1,  # scores are not scaled
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_local_base_freq": 1e4,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
"""What published files leave out, since it equals transformers' defaults."""

UNIFIED_DEFAULTS: Raw = {
    **DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def gemma4(raw: Raw, defaults: Raw = DEFAULTS) -> ModelSpec:
    """Layers without a window have heads of their own, and may have values that are their keys.

    The last layers may read keys and values of layers before them.
    """
    raw = gemma_keys({**defaults, **raw})
    layers, size = count(raw), int(raw.get("hidden_size_per_layer_input", 0))
    kinds = list(raw.get("layer_types") or (LOCAL if (i + 1) % 6 else GLOBAL for i in range(layers)))
    kinds[-1:] = [GLOBAL]  # the last layer never has a window
    raw = {**raw, "layer_types": kinds}
    if size and int(raw.get("vocab_size_per_layer_input", raw["vocab_size"])) != int(raw["vocab_size"]):
        raise ModelError("config.json: vocab_size_per_layer_input differs from vocab_size")
    windowed = windows(raw)
    rotated = rotations(raw, local=windowed)
    mixers = attentions(raw, windowed, rotated, norms=head_norms(raw, values=True))
    mixers = sharing(raw, [_with_global_heads(raw, mixers, own) for own in mixers])
    mlps: Sequence[DenseSpec | DenseAndExpertsSpec] = dense(raw)
    if raw.get("use_double_wide_mlp", False):
        wide = replace(dense(raw)[0], size=2 * int(raw["intermediate_size"]))
        mlps = [part if own.reads is None else wide for own, part in zip(mixers, dense(raw), strict=True)]
    if raw.get("enable_moe_block"):
        experts = _experts(raw)
        mlps = [DenseAndExpertsSpec(part, experts) for part in mlps if isinstance(part, DenseSpec)]
    own = LayerEmbeddingsSpec(size, int(raw["vocab_size"])) if size else None
    return decoder(
        raw,
        mixers,
        mlps,
        embedding=replace(scaled_embedding(raw), layers=own),
        post_norms=True,
        input=LayerInputSpec(size, activation(raw)) if size else None,
        scalar=True,
    )


def gemma4_unified(raw: Raw) -> ModelSpec:
    """Gemma 4 whose images and sounds are read by the decoder itself."""
    return gemma4(raw, UNIFIED_DEFAULTS)


def sharing(raw: Raw, mixers: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """The last layers read the keys and values of the last layer of their kind, with a window or without.

    Raises `ModelError` if there is no such layer.
    """
    shared = int(raw.get("num_kv_shared_layers", 0))
    own = mixers[: len(mixers) - shared]
    last = {mixer.window is None: layer for layer, mixer in enumerate(own)}
    if shared >= len(mixers) or {mixer.window is None for mixer in mixers} - set(last):
        raise ModelError(
            f"config.json: the last {shared} of {len(mixers)} layers share keys and values "
            "(num_kv_shared_layers), and no layer before them has the same type"
        )
    return [*own, *(replace(mixer, reads=last[mixer.window is None]) for mixer in mixers[len(own) :])]


def _with_global_heads(raw: Raw, mixers: Sequence[AttentionSpec], own: AttentionSpec) -> AttentionSpec:
    """A layer's attention, with the heads of layers without a window, if it has none."""
    is_key, by_layer = bool(raw.get("attention_k_eq_v", False)), raw.get("per_layer_config")
    if by_layer is None:
        size, count = raw["global_head_dim"], raw.get("num_global_key_value_heads") if is_key else None
    else:  # as transformers 5 writes it: by the number of a layer, what differs from the rest
        size, count = _layer_values(by_layer, mixers)
    kv_heads, size = int(count or own.kv_heads), int(size)
    if own.heads % kv_heads or size % 2:
        raise ModelError(
            f"config.json: in layers without a window, {own.heads} attention heads cannot share "
            f"{kv_heads} key-value heads of {size} dimensions"
        )
    if own.window is not None:
        return own
    rotation = replace(own.rotation, size=size)
    return replace(own, kv_heads=kv_heads, rotation=rotation, keys_are_values=is_key)


def _layer_values(own: Any, mixers: Sequence[AttentionSpec]) -> tuple[int, int]:
    """Size and number of key-value heads in layers without a window, from `per_layer_config`.

    Its keys are numbers of layers. With eleven layers or more, transformers writes "05" for 5.
    """
    entries = own.items() if isinstance(own, Mapping) else ()
    by_layer = {int(key): values for key, values in entries if re.fullmatch("[0-9]{1,9}", key)}
    mappings = [values for values in by_layer.values() if isinstance(values, Mapping)]
    if not isinstance(own, Mapping) or len(mappings) != len(own):
        raise ModelError("config.json: per_layer_config is not a mapping from layers to their values")
    found = set()
    for layer, mixer in enumerate(mixers):
        values = by_layer.get(layer, {})
        size = values.get("head_dim", mixer.size)
        count = values.get("num_key_value_heads", mixer.kv_heads)
        if any(not isinstance(x, int) or not 1 <= x <= 65_536 for x in (size, count)):
            raise ModelError(
                f"config.json: per_layer_config of layer {layer} is not possible: {values!r:.80}"
            )
        if mixer.window is None:
            found.add((size, count))
        elif (size, count) != (mixer.size, mixer.kv_heads):
            raise ModelError(
                f"config.json: per_layer_config of layer {layer}, which has a window, differs from the others"
            )
    if len(found) != 1:
        raise ModelError("config.json: per_layer_config differs among layers without a window")
    return found.pop()


def _experts(raw: Raw) -> ExpertsSpec:
    count, chosen = int(raw["num_experts"]), int(raw["top_k_experts"])
    if not 1 <= chosen <= count:
        raise ModelError(f"config.json: top_k_experts is {chosen}, and there are {count} experts")
    expert = DenseSpec(int(raw["moe_intermediate_size"]), activation(raw), bool(raw.get("mlp_bias", False)))
    return ExpertsSpec(RoutingSpec(count, chosen), expert, scaled=True)
