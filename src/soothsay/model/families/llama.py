"""Families that are Llama but for a few fields, or have norms, windows and rotations in other places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from soothsay.model.families.decoder import (
    attentions,
    decoder,
    dense,
    experts,
    growth_by_context,
    head_norms,
    llama_like,
    norm_eps,
    query_growth,
)
from soothsay.model.families.fields import require, require_only, usual_keys
from soothsay.model.families.layer_fields import (
    Raw,
    Windows,
    all_but_each,
    count,
    even,
    every,
    heads_of,
    main_rope,
    of_type,
    rotations,
    scaled_context,
    unrotated,
    windows,
)
from soothsay.model.specs.attention_spec import AttentionSpec, HeadRotation
from soothsay.model.specs.feed_forward_spec import CLIPPED, GATED_SQUARED_RELU, SQUARED_RELU, XIELU
from soothsay.model.specs.model_spec import ModelSpec, NormSpec

AFTER = {"pre_norms": False, "post_norms": True}
"""Norms stand after each part, and none before."""


def phi3(raw: Raw) -> ModelSpec:
    """Phi-3 and Phi-4: files say which share of each head rotates."""
    return llama_like(raw, windows(raw, every, reads_types=False), rotations(raw, share=1.0))


def mistral(raw: Raw) -> ModelSpec:
    """Mistral: a `sliding_window` holds for all layers."""
    return llama_like(raw, windows(raw, every, reads_types=False))


def ministral(raw: Raw) -> ModelSpec:
    """Ministral 8B: all layers have the window, unless `layer_types` say which."""
    return llama_like(raw, windows(raw, every))


def ministral3(raw: Raw) -> ModelSpec:
    """Ministral 3: queries grow with the position, by `llama_4_scaling_beta` among the rotary parameters."""
    raw = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **raw}
    growth = growth_by_context(raw, main_rope(raw, heads_of(raw)[2]))
    return llama_like(raw, windows(raw, every, reads_types=False), growth=growth)


def smollm3(raw: Raw) -> ModelSpec:
    """SmolLM3: some layers do not rotate, and only these may have windows."""
    raw = {"tie_word_embeddings": True, "rope_theta": 2e6, **raw}
    rotated = rotations(raw, unrotated=unrotated(raw))
    return llama_like(raw, windows(raw, unrotated, has_switch=True), rotated)


def ernie4_5(raw: Raw) -> ModelSpec:
    """ERNIE 4.5: neighbours rotate together."""
    raw = ernie_keys({"head_dim": 128, **raw})
    return llama_like(raw, rotated=rotations(raw, neighbours=True))


def ernie_keys(raw: Raw) -> Raw:
    """The file with the usual keys: `use_bias` is about all linear layers of a block."""
    biased = bool(raw.get("use_bias", False))
    defaults = {"tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
    return {**defaults, **raw, "attention_bias": biased, "mlp_bias": biased}


def helium(raw: Raw) -> ModelSpec:
    """Helium: neighbours rotate together."""
    raw = {"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 1e5, **raw}
    return llama_like(raw, rotated=rotations(raw, neighbours=True))


def internlm3(raw: Raw) -> ModelSpec:
    """InternLM3: `qkv_bias` is about attention, and `bias` about the feed-forward part."""
    biases = {"attention_bias": raw.get("qkv_bias", False), "mlp_bias": raw.get("bias", False)}
    return llama_like({"rms_norm_eps": 1e-5, "head_dim": 128, **biases, **raw})


def cwm(raw: Raw) -> ModelSpec:
    """CWM: all layers have the window but 0, 4, 8, ..."""
    raw = {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192, **raw}
    return llama_like(raw, windows(raw, lambda raw: [i % 4 > 0 for i in range(count(raw))]))


def apertus(raw: Raw) -> ModelSpec:
    """Apertus: feed-forward parts without a gate, whose activation is learned, and norms of heads."""
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "hidden_act": XIELU, **raw}
    return llama_like(raw, mlps=dense(raw, {XIELU: XIELU}), norms=head_norms(raw))


def seed_oss(raw: Raw) -> ModelSpec:
    """Seed-OSS: attention's output has no bias."""
    require_only(raw, attention_out_bias=False)
    return llama_like({"attention_bias": True, "head_dim": 128, **raw}, o_bias=False)


def gpt_oss(raw: Raw) -> ModelSpec:
    """gpt-oss: sinks, windows in every other layer, experts with biases and an own activation."""
    require_only(raw, swiglu_limit=7.0, swiglu_alpha=1.702)
    defaults = {"attention_bias": True, "rope_theta": 1.5e5, "rms_norm_eps": 1e-5}
    raw = {**defaults, "head_dim": 64, "sliding_window": 128, **raw, "mlp_bias": True}
    # the weights are the softmax of the chosen scores alone
    mlps = experts(raw, known=CLIPPED_SILU, routing={"normalize": True}, router_bias=True)
    return llama_like(raw, windows(raw, even), mlps=mlps, sinks=True)


CLIPPED_SILU = {"silu": CLIPPED, "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""Activations of gpt-oss."""


def cohere(raw: Raw) -> ModelSpec:
    """Attention and the feed-forward part read the same stream, whose mean is subtracted."""
    return _cohere(raw, windows(raw), unrotated=())


def cohere2(raw: Raw) -> ModelSpec:
    """Layers without a window do not rotate."""
    windowed = windows(raw, partial(all_but_each, 4))
    return _cohere(raw, windowed, unrotated=[window is None for window in windowed])


def _cohere(raw: Raw, windowed: Windows, unrotated: Sequence[bool]) -> ModelSpec:
    defaults = {"tie_word_embeddings": True, "logit_scale": 0.0625}
    raw = {**defaults, **raw, "rms_norm_eps": raw.get("layer_norm_eps", 1e-5)}
    rotated = rotations(raw, neighbours=True, unrotated=unrotated)
    return llama_like(raw, windowed, rotated, layer={"parallel": True, "norm": NormSpec(centred=True)})


def arcee(raw: Raw) -> ModelSpec:
    """Arcee: feed-forward parts have no gate."""
    raw = {"rms_norm_eps": 1e-5, "hidden_act": SQUARED_RELU, **raw}
    return llama_like(raw, mlps=dense(raw, {SQUARED_RELU: SQUARED_RELU}))


def internlm2(raw: Raw) -> ModelSpec:
    """InternLM 2 and 2.5: the rows of each key head stand together."""
    bias = bool(raw.get("bias", False))
    return llama_like(raw, by_key_head=True, bias=bias, o_bias=bias)


def bitnet(raw: Raw) -> ModelSpec:
    """BitNet b1.58: norms before the last product of each part, and a squared activation."""
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": SQUARED_RELU, **raw}
    eps = norm_eps(raw)
    mlps = dense(raw, {SQUARED_RELU: GATED_SQUARED_RELU}, inner_eps=eps)
    return llama_like(raw, mlps=mlps, inner_eps=eps)


def hunyuan_v1_dense(raw: Raw) -> ModelSpec:
    """Hunyuan: norms of queries and keys come after the rotation."""
    raw = hunyuan_keys(raw)
    return llama_like(raw, norms=head_norms(raw, last=True))


def hunyuan_keys(raw: Raw) -> Raw:
    """The file with the usual keys. The base of the rotation grows by `alpha`."""
    raw = {"rms_norm_eps": 1e-5, **raw}
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if scaling.get("alpha"):
        size = heads_of(raw)[2]
        theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 1e4)
        theta *= float(scaling["alpha"]) ** (size / max(size - 2, 1))
        raw = {**raw, "rope_parameters": {"rope_theta": theta}}
    return raw


def olmo2(raw: Raw) -> ModelSpec:
    """All queries are normed together, and all keys."""
    raw = {"rms_norm_eps": 1e-5, **raw}
    return llama_like(raw, norms=head_norms(raw, over_heads=True), layer=AFTER)


def olmo3(raw: Raw) -> ModelSpec:
    """OLMo 2 with windows, whose layers rotate without scaling."""
    raw = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, **raw}
    windowed = windows(raw, partial(all_but_each, 4))
    norms = head_norms(raw, over_heads=True)
    return llama_like(raw, windowed, rotations(raw, local=windowed), norms=norms, layer=AFTER)


def exaone(raw: Raw) -> ModelSpec:
    """EXAONE 3 and 3.5: Llama with other keys."""
    keys = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
    keys["activation_function"] = "hidden_act"
    return llama_like({"rms_norm_eps": 1e-5, **raw, **usual_keys(raw, keys)})


def exaone4(raw: Raw) -> ModelSpec:
    """EXAONE 4."""
    raw = {"rms_norm_eps": 1e-5, **raw}
    return llama_like(raw, *exaone_layers(raw), norms=head_norms(raw), layer=AFTER)


def exaone_layers(raw: Raw) -> tuple[Windows, list[HeadRotation]]:
    """The windows and rotations of EXAONE. Layers without a window do not rotate, where others have one.

    A text such as LLLG may list them.
    """
    pattern = raw.get("sliding_window_pattern")
    if isinstance(pattern, str):
        require(
            pattern and not set(pattern) - {"L", "G"},
            f"sliding_window_pattern is {pattern!r:.40}, not letters L and G",
        )
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        listed = [kinds[pattern[i % len(pattern)]] for i in range(count(raw))]
        raw = {"layer_types": listed, **raw, "sliding_window_pattern": None}
    windowed = windows(raw, partial(all_but_each, 4))
    unrotated = [window is None and any(windowed) for window in windowed]
    return windowed, rotations(raw, unrotated=unrotated)


def glm(raw: Raw, **layer: Any) -> ModelSpec:
    """Half of each head rotates, by pairs of neighbours."""
    raw = {"attention_bias": True, "rms_norm_eps": 1.5625e-7, **raw}
    rotated = rotations(raw, share=0.5, neighbours=bool(raw.get("rope_interleave", True)))
    return llama_like(raw, rotated=rotated, layer=layer, o_bias=False)


def glm4(raw: Raw) -> ModelSpec:
    """Norms stand after each part too."""
    return glm(raw, post_norms=True)


LLAMA4_DEFAULTS = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}


def llama4_text(raw: Raw) -> ModelSpec:
    """`moe_layers` have experts, and other layers a size of their own.

    Most layers rotate, norm their heads and see chunks. The others do not, and their queries grow with the
    position.
    """
    raw = {**LLAMA4_DEFAULTS, **raw}
    layers, step = count(raw), int(raw.get("interleave_moe_layer_step") or 1)
    sparse = raw.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    raw = {
        **raw,
        "n_shared_experts": 1,
        "moe_intermediate_size": raw["intermediate_size"],
        "intermediate_size": raw.get("intermediate_size_mlp", 16_384),
        "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse],
    }
    still, size = unrotated(raw), heads_of(raw)[2]
    chunk = -int(raw["attention_chunk_size"])
    windowed = of_type(raw, "chunked_attention", chunk, lambda raw: [not each for each in unrotated(raw)])
    growth = None
    if raw.get("attn_temperature_tuning", True):
        span, context = int(raw.get("floor_scale") or 8192), scaled_context(raw, main_rope(raw, size))
        growth = query_growth(raw.get("attn_scale", 0.1), span, context, "floor_scale", shift=1)
    norms = head_norms(raw, learned=False) if raw.get("use_qk_norm", True) else None

    def own(attention: AttentionSpec, is_still: bool) -> AttentionSpec:
        return replace(attention, growth=growth) if is_still else replace(attention, norms=norms)

    rotated = rotations(raw, neighbours=True, unrotated=still)
    mixers = map(own, attentions(raw, windowed, rotated), still)
    return decoder(raw, [*mixers], experts(raw, routing={"sigmoid": True, "scales_inputs": True}))
