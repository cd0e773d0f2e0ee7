"""Gemma 1 to 4."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.decoder import activation, attentions, decoder, dense, head_norms
from soothsay.model.families.fields import require, require_only
from soothsay.model.families.layer_fields import (
    Raw,
    all_but_each,
    count,
    even,
    rotations,
    scaled_context,
    sizes,
    windows,
)
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseAndExpertsSpec, DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import (
    AlternatingSpec,
    EmbeddingSpec,
    LayerEmbeddingsSpec,
    LayerInputSpec,
    ModelSpec,
)

LOCAL, GLOBAL = "sliding_attention", "full_attention"

GEMMA3_DEFAULTS = {  # Google's multimodal checkpoints leave out what equals transformers' defaults
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
SHARED: Raw = {
    "head_dim": 256,
    "query_pre_attn_scalar": 1,  # scores are not scaled
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_local_base_freq": 1e4,
}
"""What published files of Gemma 3n and 4 leave out, since it equals transformers' defaults."""

GEMMA3N_DEFAULTS: Raw = {
    **SHARED,
    **sizes(262_400, 2048, 16_384, 35, 8, 2, 32_768),
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1e6,
}
GEMMA4_DEFAULTS: Raw = {
    **SHARED,
    **sizes(262_144, 2304, 9216, 30, 8, 4, 131_072),
    "global_head_dim": 512,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 1e4},
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
UNIFIED_DEFAULTS: Raw = {
    **GEMMA4_DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def gemma(raw: Raw) -> ModelSpec:
    """Gemma 1: norms stand before each part alone."""
    raw = {"head_dim": 256, **raw}
    return _gemma(raw, attentions(raw), post_norms=False)


def gemma2(raw: Raw) -> ModelSpec:
    """Every other layer has a window."""
    return _gemma(raw, attentions(raw, windows(raw, even)))


def vaultgemma(raw: Raw) -> ModelSpec:
    """VaultGemma: Gemma 2 without norms after the parts."""
    return _gemma(raw, attentions(raw, windows(raw, even)), post_norms=False)


def gemma3_text(raw: Raw) -> ModelSpec:
    """Layers with a window rotate by a base of their own, without scaling."""
    raw = {**GEMMA3_DEFAULTS, **raw}
    windowed = windows(raw, partial(all_but_each, 6))
    rotated = rotations(raw, local=windowed)
    rope = next((own.rope for own, window in zip(rotated, windowed, strict=True) if window is None), None)
    context = None if rope is None else scaled_context(raw, rope, states_scaled=True)
    return _gemma(raw, attentions(raw, windowed, rotated, norms=head_norms(raw)), context)


def _gemma(
    raw: Raw, mixers: Sequence[AttentionSpec], max_positions: int | None = None, *, post_norms: bool = True
) -> ModelSpec:
    raw = gemma_keys(raw)
    return decoder(
        raw,
        mixers,
        dense(raw),
        embedding=scaled_embedding(raw),
        max_positions=max_positions,
        post_norms=post_norms,
        zero_centred_norms=True,
    )


def gemma_keys(raw: Raw) -> Raw:
    """The file with the usual keys, and with what all of Gemma's files may leave out."""
    named = raw.get("hidden_activation") or raw.get("hidden_act", "gelu")
    kind = "gelu_pytorch_tanh" if named == "gelu" else named  # which older files mean by "gelu"
    return {"tie_word_embeddings": True, **raw, "hidden_act": kind}


def scaled_embedding(raw: Raw) -> EmbeddingSpec:
    """Embeddings are multiplied by the square root of the hidden size."""
    return EmbeddingSpec(int(raw["hidden_size"]) ** 0.5, scale_rounded=True)


def gemma4_text(raw: Raw, defaults: Raw = GEMMA4_DEFAULTS) -> ModelSpec:
    """Layers without a window have heads of their own, and may have values that are their keys.

    The last layers may read keys and values of layers before them.
    """
    raw = gemma_keys({**defaults, **raw})
    layers, size = count(raw), int(raw.get("hidden_size_per_layer_input", 0))
    kinds = list(raw.get("layer_types") or (LOCAL if (i + 1) % 6 else GLOBAL for i in range(layers)))
    kinds[-1:] = [GLOBAL]  # the last layer never has a window
    raw = {**raw, "layer_types": kinds}
    require(
        not size or int(raw.get("vocab_size_per_layer_input", raw["vocab_size"])) == int(raw["vocab_size"]),
        "vocab_size_per_layer_input differs from vocab_size",
    )
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


def gemma4_unified_text(raw: Raw) -> ModelSpec:
    """Gemma 4 whose images and sounds are read by the decoder itself."""
    return gemma4_text(raw, UNIFIED_DEFAULTS)


def sharing(raw: Raw, mixers: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """The last layers read the keys and values of the last layer of their kind, with a window or without.

    Raises `ModelError` if there is no such layer.
    """
    shared = int(raw.get("num_kv_shared_layers", 0))
    own = mixers[: len(mixers) - shared]
    last = {mixer.window is None: layer for layer, mixer in enumerate(own)}
    require(
        shared < len(mixers) and {mixer.window is None for mixer in mixers} <= set(last),
        f"the last {shared} of {len(mixers)} layers share keys and values "
        "(num_kv_shared_layers), and no layer before them has the same type",
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
    require(
        own.heads % kv_heads == 0 and size % 2 == 0,
        f"in layers without a window, {own.heads} attention heads cannot share "
        f"{kv_heads} key-value heads of {size} dimensions",
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
    require(
        isinstance(own, Mapping) and len(mappings) == len(own),
        "per_layer_config is not a mapping from layers to their values",
    )
    found = set()
    for layer, mixer in enumerate(mixers):
        values = by_layer.get(layer, {})
        size = values.get("head_dim", mixer.size)
        count = values.get("num_key_value_heads", mixer.kv_heads)
        require(
            all(isinstance(x, int) and 1 <= x <= 65_536 for x in (size, count)),
            f"per_layer_config of layer {layer} is not possible: {values!r:.80}",
        )
        if mixer.window is None:
            found.add((size, count))
        elif (size, count) != (mixer.size, mixer.kv_heads):
            raise ModelError(
                f"config.json: per_layer_config of layer {layer}, which has a window, differs from the others"
            )
    require(len(found) == 1, "per_layer_config differs among layers without a window")
    return found.pop()


def _experts(raw: Raw) -> ExpertsSpec:
    count, chosen = int(raw["num_experts"]), int(raw["top_k_experts"])
    require(1 <= chosen <= count, f"top_k_experts is {chosen}, and there are {count} experts")
    expert = DenseSpec(int(raw["moe_intermediate_size"]), activation(raw), bool(raw.get("mlp_bias", False)))
    return ExpertsSpec(RoutingSpec(count, chosen), expert, scaled=True)


def gemma3n_text(raw: Raw) -> ModelSpec:
    """The stream has several parts, and the last layers read keys and values of layers before them."""
    require_only(raw, altup_active_idx=0)
    raw = gemma_keys({**GEMMA3N_DEFAULTS, **raw})
    layers, size = count(raw), int(raw["hidden_size_per_layer_input"])
    windowed = windows(raw, partial(all_but_each, 5))
    rotated = rotations(raw, local=windowed)
    mixers = attentions(raw, windowed, rotated, norms=head_norms(raw, values=True))
    sparsity = raw.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    require(
        len(sparsity) == layers,
        f"activation_sparsity_pattern has {len(sparsity)} entries for {layers} layers",
    )
    parts = dense(raw)
    own = LayerEmbeddingsSpec(size, int(raw["vocab_size_per_layer_input"]))
    return decoder(
        raw,
        sharing(raw, mixers),
        [replace(part, sparsity=float(share)) for part, share in zip(parts, sparsity, strict=True)],
        embedding=replace(scaled_embedding(raw), layers=own),
        post_norms=True,
        input=LayerInputSpec(size, parts[0].activation),
        alternating=AlternatingSpec(
            parts=int(raw.get("altup_num_inputs", 4)),
            scaled=bool(raw.get("altup_correct_scale", True)),
            laurel_rank=int(raw.get("laurel_rank", 64)),
        ),
    )
