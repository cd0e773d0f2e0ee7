"""Names in Hugging Face's checkpoints for our modules, family by family."""

from __future__ import annotations

from collections.abc import Mapping

Names = dict[str, tuple[str, ...]]
"""A module of a block -> the tensors whose rows in order are its rows. {} stands for an expert's number."""


def _feed_forward(ours: str, theirs: str) -> Names:
    """The names of a dense part, or of an expert, whose own names are these."""
    gate, up = f"{theirs}.gate_proj", f"{theirs}.up_proj"
    return {f"{ours}.gate_up": (gate, up), f"{ours}.up": (up,), f"{ours}.down": (f"{theirs}.down_proj",)}


BLOCK_NAMES: Names = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.inner_norm": ("self_attn.attn_sub_norm",),
    "attention.sinks": ("self_attn",),
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
    **_feed_forward("mlp", "mlp"),
    "mlp.inner_norm": ("mlp.ffn_sub_norm",),
    "mlp.learned": ("mlp.act_fn",),
    # experts
    "mlp.router": ("mlp.gate",),
    "mlp.correction": ("mlp.gate",),
    **_feed_forward("mlp.shared", "mlp.shared_experts"),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
    **_feed_forward("mlp.experts", "mlp.experts.{}"),
    "mlp.latent_in": ("mlp.fc1_latent_proj",),
    "mlp.latent_out": ("mlp.fc2_latent_proj",),
    # a dense part beside experts
    **_feed_forward("mlp.dense", "mlp"),
    "mlp.dense_norm": ("pre_feedforward_layernorm",),
    "mlp.dense_post_norm": ("post_feedforward_layernorm_1",),
    "mlp.experts_norm": ("pre_feedforward_layernorm_2",),
    "mlp.experts_post_norm": ("post_feedforward_layernorm_2",),
    "mlp.router_norm": ("router",),
    "mlp.mixture.router": ("router.proj",),
    "mlp.mixture.scales": ("router",),
    **_feed_forward("mlp.mixture.experts", "experts.{}"),
    # latent attention
    "attention.q": ("self_attn.q_proj",),
    "attention.q_a": ("self_attn.q_a_proj",),
    "attention.q_a_norm": ("self_attn.q_a_layernorm",),
    "attention.q_b": ("self_attn.q_b_proj",),
    "attention.kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "attention.kv_a_norm": ("self_attn.kv_a_layernorm",),
    "attention.kv_b": ("self_attn.kv_b_proj",),
    # states
    "attention.qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "attention.gates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "attention.low": tuple(f"self_attn.{part}_proj" for part in ("f_a", "g_a", "b")),
    "attention.decays": ("self_attn.f_b_proj",),
    "attention.z": ("self_attn.g_b_proj",),
    "attention.bcx": ("conv.in_proj",),
    "attention.taps": ("conv.conv",),
    "attention.zxbct": ("mamba.in_proj",),
    "attention.rule": ("mamba",),
    "attention.xz": ("mamba.in_proj",),
    "attention.inner": ("mamba.x_proj",),
    "attention.steps": ("mamba.dt_proj",),
    **{f"attention.norms.{i}": (f"mamba.{part}_layernorm",) for i, part in enumerate(("dt", "b", "c"))},
    "attention.beside.zxbct": ("mamba.in_proj",),
    "attention.beside.rule": ("mamba",),
    "attention.beside.o": ("mamba.out_proj",),
    "part_norm": ("norm",),
    # embeddings of layers, and alternating updates
    "layer_input.gate": ("per_layer_input_gate",),
    "layer_input.projection": ("per_layer_projection",),
    "layer_input.post_norm": ("post_per_layer_input_norm",),
    "scalar": ("",),
    "laurel_in": ("laurel.linear_left",),
    "laurel_out": ("laurel.linear_right",),
    "laurel_norm": ("laurel.post_laurel_norm",),
    "alternate.router": ("altup.modality_router",),
    "alternate.router_norm": ("altup.router_norm",),
    "alternate.predictions": ("altup.prediction_coefs",),
    "alternate.corrections": ("altup.correction_coefs",),
    "alternate.scale": ("altup",),
}
"""The usual names."""

OUTER_NAMES: Names = {
    "embedding": ("embed_tokens",),
    "positions": ("embed_positions",),
    "embedding_norm": ("layernorm_embedding",),
    "layers": ("layers",),
    "norm": ("norm",),
    "head": ("lm_head",),
    "layer_embeddings.table": ("embed_tokens_per_layer",),
    "layer_embeddings.projection": ("per_layer_model_projection",),
    "layer_embeddings.norm": ("per_layer_projection_norm",),
}
"""A module outside of the blocks -> the tensor."""


def _renamed(begins: Mapping[str, str], parts: Mapping[str, str] | None = None, **own: str) -> Names:
    """The usual names with other beginnings and other last parts, and the names of some modules.

    In the names of modules, `__` stands for a dot. Of beginnings, the first counts.
    """

    def other(name: str) -> str:
        old = next((begin for begin in begins if name.startswith(begin)), "")
        name = begins.get(old, "") + name.removeprefix(old)
        start, dot, last = name.rpartition(".")
        return start + dot + (parts or {}).get(last, last)

    usual = {module: tuple(map(other, tensors)) for module, tensors in BLOCK_NAMES.items()}
    return usual | {module.replace("__", "."): (name,) for module, name in own.items()}


def _t5(stack: str, mlp: int) -> Names:
    """The names of a stack, whose feed-forward parts have this place in a layer."""
    own, across, dense = "layer.0.SelfAttention", "layer.1.EncDecAttention", f"layer.{mlp}.DenseReluDense"
    return {
        "embedding": ("shared",),
        "layers": (f"{stack}.block",),
        "norm": (f"{stack}.final_layer_norm",),
        "attention.qkv": (f"{own}.q", f"{own}.k", f"{own}.v"),
        "attention.o": (f"{own}.o",),
        "attention.relative": (f"{own}.relative_attention_bias",),
        "attention_norm": ("layer.0.layer_norm",),
        "cross.q": (f"{across}.q",),
        "cross.kv": (f"{across}.k", f"{across}.v"),
        "cross.o": (f"{across}.o",),
        "cross_norm": ("layer.1.layer_norm",),
        "mlp.gate_up": (f"{dense}.wi_0", f"{dense}.wi_1"),
        "mlp.up": (f"{dense}.wi",),
        "mlp.down": (f"{dense}.wo",),
        "mlp_norm": (f"layer.{mlp}.layer_norm",),
    }


def _bart(stack: str, norm: str) -> Names:
    """The names of a stack, whose last norm has this name."""
    across = "encoder_attn"
    return {
        **_OPT,
        **{
            module: (f"{stack}.{OUTER_NAMES[module][0]}",)
            for module in ("positions", "embedding_norm", "layers")
        },
        "embedding": ("shared",),
        "norm": (f"{stack}.{norm}",),
        "cross.q": (f"{across}.q_proj",),
        "cross.kv": (f"{across}.k_proj", f"{across}.v_proj"),
        "cross.o": (f"{across}.out_proj",),
        "cross_norm": (f"{across}_layer_norm",),
    }


_OPT = _renamed(
    {"mlp.": ""},
    {"o_proj": "out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    norm="final_layer_norm",
)
_LAST_OF_BART = {
    **dict.fromkeys(("bart", "marian"), "layers.{}.final_layer_norm"),
    **dict.fromkeys(("mbart", "m2m_100", "pegasus"), "layer_norm"),
}
_W123 = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GEMMAS = "gemma2", "vaultgemma", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"
_QWEN3_5 = _renamed({"mlp.shared_experts": "mlp.shared_expert"}, attention__rule="linear_attn")
_GRANITE = {
    "mlp.experts": "block_sparse_moe.experts",
    "mlp.shared_experts": "shared_mlp",
    "mlp": "shared_mlp",
}
_SHARED_MLP = {"mlp.shared_experts": "mlp.shared_mlp"}
_HUNYUAN = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
_DENSE = {"o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
_LN = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_GPT = {"layers": "h", "norm": "ln_f"}
_GRANITE_ROUTER = "block_sparse_moe.router.layer"
_LFM2 = _renamed(
    {
        "mlp": "feed_forward",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
    },
    _W123
    | {"o_proj": "out_proj", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"},
    norm="embedding_norm",
    mlp__correction="feed_forward",
)

FAMILY_NAMES: Mapping[str, Names] = {
    "qwen3_next": {
        **_QWEN3_5,
        "attention.qkvz": ("linear_attn.in_proj_qkvz",),
        "attention.gates": ("linear_attn.in_proj_ba",),
    },
    "qwen3_next_gguf": {**_QWEN3_5, "attention.gates": ("linear_attn.in_proj_ba",)},
    **dict.fromkeys(("qwen2_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5),
    **dict.fromkeys(("mixtral", "phimoe"), _renamed({"mlp": "block_sparse_moe"}, _W123)),
    "minimax_m2": _renamed({"mlp": "block_sparse_moe"}, _W123, mlp__correction="block_sparse_moe"),
    **dict.fromkeys(_GEMMAS, _renamed({}, mlp_norm="pre_feedforward_layernorm")),
    "gpt_oss": _renamed({}, mlp__router="mlp.router"),
    "llama4_text": _renamed(
        {"mlp.shared_experts": "feed_forward.shared_expert", "mlp": "feed_forward"},
        mlp__router="feed_forward.router",
    ),
    "apertus": _renamed({}, attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    "glm": _renamed({}, mlp__gate_up="mlp.gate_up_proj"),
    "glm_gguf": _renamed({}, attention__qkv="self_attn.qkv_proj", mlp__gate_up="mlp.gate_up_proj"),
    **dict.fromkeys(
        ("glm4", "glm4v_text"),
        _renamed(
            {},
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            mlp__gate_up="mlp.gate_up_proj",
        ),
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared", "granitemoehybrid"),
        _renamed(
            _GRANITE,
            mlp__router=_GRANITE_ROUTER,
            mlp__gate_up="shared_mlp.input_linear",
            mlp__down="shared_mlp.output_linear",
            mlp__shared__gate_up="shared_mlp.input_linear",
            mlp__shared__down="shared_mlp.output_linear",
        ),
    ),
    **dict.fromkeys(
        ("granitemoe_gguf", "granitemoehybrid_gguf"), _renamed(_GRANITE, mlp__router=_GRANITE_ROUTER)
    ),
    **dict.fromkeys(
        ("falcon_h1", "bamba", "jamba"),
        _renamed(
            {"mlp": "feed_forward"},
            norm="final_layernorm",
            mlp_norm="pre_ff_layernorm",
            mlp__router="feed_forward.router",
        ),
    ),
    **dict.fromkeys(
        ("nemotron_h", "mamba2", "mamba", "falcon_mamba"),
        _renamed(
            {"self_attn": "mixer", "mlp": "mixer", "mamba": "mixer"}, embedding="embeddings", norm="norm_f"
        ),
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    "kimi_linear": {
        **_renamed(
            {
                "mlp.experts": "block_sparse_moe.experts",
                "mlp.shared_experts": "block_sparse_moe.shared_experts",
            },
            attention__rule="self_attn",
            mlp__router="block_sparse_moe.gate",
            mlp__correction="block_sparse_moe.gate",
        ),
        "mlp.experts.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.experts.down": ("block_sparse_moe.experts.{}.w2",),
    },
    "phi3": _renamed({}, attention__qkv="self_attn.qkv_proj", mlp__gate_up="mlp.gate_up_proj"),
    "starcoder2": _renamed({}, {"up_proj": "c_fc", "down_proj": "c_proj"}),
    "phi": _renamed({}, {"up_proj": "fc1", "down_proj": "fc2", "o_proj": "dense"}, norm="final_layernorm"),
    "gpt_neox": _renamed(
        {"self_attn": "attention"},
        _DENSE,
        attention__qkv="attention.query_key_value",
        embedding="embed_in",
        norm="final_layer_norm",
        head="embed_out",
    ),
    "falcon": _renamed(
        {"self_attn": "self_attention"},
        _DENSE,
        attention__qkv="self_attention.query_key_value",
        embedding="word_embeddings",
        **_GPT,
    ),
    "gpt2": _renamed(  # linear_: see `soothsay.model.formats.stacked_experts`
        {"self_attn": "attn"},
        {"o_proj": "linear_proj", "up_proj": "linear_fc", "down_proj": "linear_proj", **_LN},
        attention__qkv="attn.linear_attn",
        embedding="wte",
        positions="wpe",
        **_GPT,
    ),
    "gptj": _renamed(
        {"self_attn": "attn"},
        {"o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out", **_LN},
        embedding="wte",
        **_GPT,
    ),
    "exaone": _renamed(
        {"self_attn": "attn.attention"},
        {"o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj", **_LN},
        embedding="wte",
        **_GPT,
    ),
    **dict.fromkeys(
        ("bailing_moe", "bailing_moe_v2"),
        _renamed(
            {"self_attn": "attention"},
            {"o_proj": "dense", **_HUNYUAN},
            attention__qkv="attention.query_key_value",
            embedding="word_embeddings",
        ),
    ),
    "internlm2": _renamed(
        {"self_attn": "attention", "mlp": "feed_forward"},
        {"o_proj": "wo", **_W123},
        attention__qkv="attention.wqkv",
        attention_norm="attention_norm",
        mlp_norm="ffn_norm",
        embedding="tok_embeddings",
        head="output",
    ),
    "opt": _OPT,
    "t5": _t5("decoder", 2),
    "t5 encoder": _t5("encoder", 1),
    **{name: _bart("decoder", norm) for name, norm in _LAST_OF_BART.items()},
    **{f"{name} encoder": _bart("encoder", norm) for name, norm in _LAST_OF_BART.items()},
    "hunyuan_v1_dense": _renamed({}, _HUNYUAN),
    "hunyuan_v1_moe": _renamed(_SHARED_MLP, _HUNYUAN, mlp__router="mlp.gate.wg"),
    "afmoe": {
        **_renamed(
            {},
            mlp_norm="pre_mlp_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            mlp__router="mlp.router.gate",
            mlp__correction="mlp",
        ),
        "attention.qkv": tuple(f"self_attn.{part}_proj" for part in ("q", "gate", "k", "v")),
    },
    "hy_v3": _renamed(_SHARED_MLP, mlp__router="mlp.router.gate", mlp__correction="mlp"),
    "exaone_moe": _renamed({}, mlp__correction="mlp"),
    "ernie4_5_moe": _renamed({}, mlp__correction="mlp.moe_statics"),
}
"""Names of modules of a family, if they differ from the usual ones."""


def names_of(family: str) -> Names:
    """The names of a family's modules."""
    return OUTER_NAMES | FAMILY_NAMES.get(family, BLOCK_NAMES)
