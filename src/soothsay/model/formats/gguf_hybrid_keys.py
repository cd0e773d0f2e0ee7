"""Keys of a Hugging Face config.json that GGUF files of models with states have. See `gguf_own_keys`."""

from soothsay.model.families.fields import MAX_LAYERS
from soothsay.model.families.gemma import GLOBAL
from soothsay.model.formats.gguf_metadata import Metadata
from soothsay.model.formats.gguf_own_keys import (
    Config,
    Shapes,
    granite,
    grouped_experts,
    latent,
    own_experts,
)


def _states(data: Metadata, **names: str) -> Config:
    """The sizes of layers that keep states, under a family's names."""
    return {name: data.require(f"ssm.{key}") for name, key in names.items()}


def qwen3_5(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Sizes of recurrent layers. The converter tiles their value heads, and appends MTP modules as layers."""
    heads = max(data.require("ssm.time_step_rank"), 1)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - data.number("nextn_predict_layers", 0),
        "full_attention_interval": data.number("full_attention_interval", 4),
        **_states(
            data,
            linear_conv_kernel_dim="conv_kernel",
            linear_key_head_dim="state_size",
            linear_num_key_heads="group_count",
        ),
        "linear_value_head_dim": data.require("ssm.inner_size") // heads,
        "linear_num_value_heads": heads,
        "linear_heads_tiled": data.architecture != "qwen3next",
    }


def qwen3_5_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same with experts."""
    shared = data.require("expert_shared_feed_forward_length")
    own = qwen3_5(data, config, shapes) | own_experts(data)
    return own | {"shared_expert_intermediate_size": shared}


def _mamba2(data: Metadata) -> Config:
    return _states(
        data,
        mamba_d_ssm="inner_size",
        mamba_n_heads="time_step_rank",
        mamba_n_groups="group_count",
        mamba_d_state="state_size",
        mamba_d_conv="conv_kernel",
    )


def falcon_h1(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The converter multiplies the weights by all multipliers."""
    normed = "blk.0.ssm_norm.weight" in shapes
    return _mamba2(data) | {"mamba_rms_norm": normed, "mamba_norm_before_gate": False}


def _attention_layers(data: Metadata, config: Config, other: str, attention: str = GLOBAL) -> Config:
    """Layers without key-value heads are others."""
    kv = data.layers("attention.head_count_kv", config["num_hidden_layers"])
    kinds = [attention if heads else other for heads in kv]
    return {"layer_types": kinds, "num_key_value_heads": max(kv, default=0) or 1}


def kimi_linear(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Latent attention, and Kimi Delta Attention in layers without key-value heads."""
    return {
        **latent(data, config, shapes),
        **_attention_layers(data, config, "linear_attention"),
        **_states(data, linear_conv_kernel_dim="conv_kernel"),
        "model_type": "kimi_linear",
        "norm_topk_prob": bool(data.get("expert_weights_norm", True)),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": data.require("kda.head_dim"),
    }


def lfm2(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Layers without key-value heads have a convolution. Sizes of feed-forward parts are final."""
    own = _attention_layers(data, config, "conv")
    return own | {"conv_L_cache": data.require("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}


def lfm2_moe(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """The same with experts after some dense layers."""
    own = lfm2(data, config, shapes) | own_experts(data)
    return own | {"num_dense_layers": data.number("leading_dense_block_count", 0)}


def granite_hybrid(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Multipliers, and what experts and hybrids have. Layers without key-value heads are Mamba-2's."""
    experts = data.number("expert_count", 0)
    shared = data.number("expert_shared_feed_forward_length", 0)
    return {
        **granite(data, config, shapes),
        **_attention_layers(data, config, "mamba", "attention"),
        "position_embedding_type": "rope" if data.raw("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": data.number("expert_used_count", 0),
        "shared_intermediate_size": shared if experts else config["intermediate_size"],
        **_mamba2(data),
    }


def _mamba2_layers(data: Metadata, heads: str, size: str, states: str) -> Config:
    """Sizes of Mamba-2, where heads, their size and that of states have these keys."""
    count = max(data.require("ssm.time_step_rank"), 1)
    own = {heads: count, size: data.require("ssm.inner_size") // count}
    return own | _states(data, n_groups="group_count", conv_kernel="conv_kernel", **{states: "state_size"})


NOTHING_ELSE = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"))
"""There is no attention and no feed-forward part, whose sizes are 0 in a file."""


def mamba(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Falcon-Mamba's files say that they have norms."""
    normed = data.raw("ssm.dt_b_c_rms", False) is True
    own = _states(data, state_size="state_size", conv_kernel="conv_kernel", time_step_rank="time_step_rank")
    family = {"model_type": "falcon_mamba", "mixer_rms_eps": config["layer_norm_epsilon"]} if normed else {}
    return {**NOTHING_ELSE, **own, **_states(data, mamba_d_inner="inner_size"), **family}


def jamba(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Layers without key-value heads are Mamba's, and those without a router are dense."""
    layers = min(int(config["num_hidden_layers"]), MAX_LAYERS)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in shapes for i in range(layers)]
    return {
        **_attention_layers(data, config, "linear_attention"),
        **_states(data, mamba_d_inner="inner_size", mamba_d_state="state_size", mamba_d_conv="conv_kernel"),
        **_states(data, mamba_dt_rank="time_step_rank"),
        "mlp_layer_types": ["sparse" if has else "dense" for has in routed],
        **dict.fromkeys(("num_experts", "num_local_experts"), data.number("expert_count", 0) or 1),
        "num_experts_per_tok": data.number("expert_used_count", 0),
    }


def mamba2(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """Mamba-2 alone."""
    return NOTHING_ELSE | _mamba2_layers(data, "num_heads", "head_dim", "state_size")


def nemotron_h(data: Metadata, config: Config, shapes: Shapes) -> Config:
    """MTP modules are the last blocks.

    A block with key-value heads has attention, one with a feed-forward size is a feed-forward part, and the
    others are Mamba-2's.
    """
    blocks = int(config["num_hidden_layers"])
    layers = blocks - data.number("nextn_predict_layers", 0)
    kv, sizes = (
        data.layers(key, blocks)[:layers] for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = [
        GLOBAL if heads else ("mlp" if size else "linear_attention")
        for heads, size in zip(kv, sizes, strict=True)
    ]
    own = {
        "layers_block_type": kinds,
        "num_hidden_layers": layers,
        "num_key_value_heads": max(kv, default=0) or 1,
        "intermediate_size": max(sizes, default=0) or 1,
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in shapes),
        **_mamba2_layers(data, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    }
    if not data.number("expert_count", 0):
        return own
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in shapes for layer in range(layers)]
    return {
        **own,
        **grouped_experts(data, normalized=True),
        "n_routed_experts": data.require("expert_count"),
        "layers_block_type": ["moe" if has else kind for has, kind in zip(sparse, kinds, strict=True)],
        "moe_shared_expert_intermediate_size": data.require("expert_shared_feed_forward_length"),
        "moe_latent_size": data.number("moe_latent_size"),
    }
