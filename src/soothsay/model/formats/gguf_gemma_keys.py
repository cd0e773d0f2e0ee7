"""Keys of a Hugging Face config.json that GGUF files of Gemma have. See `gguf_own_keys`."""

from functools import partial
from statistics import NormalDist

import numpy as np
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.families.gemma import GLOBAL, LOCAL
from soothsay.model.formats.gguf_metadata import Metadata
from soothsay.model.formats.gguf_own_keys import Config, Shapes, layer_types, own_experts


def _gemma(
    data: Metadata,
    config: Config,
    shapes: Shapes,
    large: int,
    window: int | None = None,
    softcap: float | None = None,
    last_softcap: float | None = None,
) -> Config:
    """Gemma 2 and 3. `large`: the layers of the model of 27B, whose scale of attention differs.

    The file does not state the scale. The others are defaults.
    """
    is_large = config["num_hidden_layers"] == large
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_large
        else config["head_dim"],
        "sliding_window": data.number("attention.sliding_window", window),
        "attn_logit_softcapping": data.number("attn_logit_softcapping", softcap),
        "final_logit_softcapping": data.number("final_logit_softcapping", last_softcap),
        "rope_local_base_freq": data.number("rope.freq_base_swa", 1e4),
    }
    return own | layer_types(data, config)


gemma2 = partial(_gemma, large=46, window=4096, softcap=50.0, last_softcap=30.0)
gemma3 = partial(_gemma, large=62)


def _sharing(data: Metadata, config: Config, last_softcap: float | None) -> Config:
    """What Gemma 3n and 4 have. The last layers read keys and values of layers before them."""
    local = data.layers("attention.sliding_window_pattern", int(config["num_hidden_layers"]))
    return {
        "layer_types": [LOCAL if is_local else GLOBAL for is_local in local],
        "num_kv_shared_layers": data.number("attention.shared_kv_layers", 0),
        "sliding_window": data.require("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,
        "final_logit_softcapping": data.number("final_logit_softcapping", last_softcap),
    }


def gemma3n(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Streams, and embeddings of layers."""
    table, laurel = (
        shapes.get(name, (0,))[0] for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    )
    own = _sharing(data, config, last_softcap=30.0)
    if not table or not laurel:
        raise ModelError(f"{data.path} has no embeddings for layers, or no laurel_l; it is damaged")
    return own | {
        "rope_local_base_freq": data.number("rope.freq_base_swa", 1e4),
        "hidden_size_per_layer_input": data.require("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table,
        "altup_num_inputs": data.require("altup.num_inputs"),
        "altup_active_idx": data.number("altup.active_idx", 0),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in shapes,
        "laurel_rank": laurel,
        "activation_sparsity_pattern": _sparsity(data, int(config["num_hidden_layers"])),
    }


def _sparsity(data: Metadata, layers: int) -> list[float]:
    """The share of gates that become zero. The file has the standard deviations above the mean instead."""
    found = data.raw("activation_sparsity_scale")
    values = found.tolist() if isinstance(found, np.ndarray) else found
    values = values if isinstance(values, list) else []
    # false for NaN
    if len(values) != layers or not all(isinstance(value, float) and value < 4 for value in values):
        raise ModelError(
            f"{data.path}: {data.architecture}.activation_sparsity_scale {values!r:.80} of {layers} layers "
            "is damaged"
        )
    return [NormalDist().cdf(value) for value in values]


def gemma4(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Layers of two kinds, with sizes of their own."""
    get, layers = data.number, int(config["num_hidden_layers"])
    own = _sharing(data, config, last_softcap=None)
    kinds = own["layer_types"]
    kv = dict(zip(reversed(kinds), reversed(data.layers("attention.head_count_kv", layers)), strict=True))
    sizes = data.layers("feed_forward_length", layers)
    keys_are_values = any(
        f"blk.{layer}.attn_k.weight" in shapes and f"blk.{layer}.attn_v.weight" not in shapes
        for layer in range(layers)
    )
    own |= {
        "head_dim": get("attention.key_length_swa", config["head_dim"]),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": kv.get(LOCAL, kv[GLOBAL]) if GLOBAL in kv else kv[LOCAL],
        "attention_k_eq_v": keys_are_values,
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "intermediate_size": min(sizes),
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
    }
    if keys_are_values:
        own["num_global_key_value_heads"] = kv.get(GLOBAL)
    if count := get("expert_count", 0):
        own |= {"enable_moe_block": True, "num_experts": count, **own_experts(data)}
        own["top_k_experts"] = own["num_experts_per_tok"]
    return own


def gemma4_rotations(data: Metadata, divisors: Tensor | None) -> Config:
    """How heads rotate, by kind of layer. `divisors` `[d / 2]` are huge where global heads do not rotate.

    Raises `ModelError` for other divisors.
    """
    share = 1.0
    if divisors is not None:
        still = divisors >= 1e29
        if not bool((still | (divisors == 1)).all()) or not len(divisors) or bool(still.diff().lt(0).any()):
            raise ModelError(f"{data.path}: rope_freqs.weight has frequencies that Gemma 4 does not have")
        share = float((~still).float().mean())
    base, local = data.number("rope.freq_base", 1e6), data.number("rope.freq_base_swa", 1e4)
    return {
        GLOBAL: {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share},
        LOCAL: {"rope_type": "default", "rope_theta": local},
    }
