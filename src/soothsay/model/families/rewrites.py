"""Rewrites of a family's `config.json` to the usual keys. Each returns a new mapping.

Rewrites raise `ModelError` for a model that is not supported.
"""

from __future__ import annotations

from soothsay.config import ModelConfig
from soothsay.errors import ModelError
from soothsay.model.families.layers import Raw


def unchanged(raw: Raw) -> Raw:
    """The file's keys are the usual ones."""
    return raw


def as_parsed(raw: Raw, config: ModelConfig) -> ModelConfig:
    """The family has no fields of its own."""
    return config


def granite_hybrid(raw: Raw) -> Raw:
    """Granite 4's configuration. Layers and sizes have names of their own."""
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    kinds = ["mamba"] * int(raw["num_hidden_layers"]) if kinds is None else kinds
    usual = {"mamba": "linear_attention", "attention": "full_attention"}
    raw = {**raw, "layer_types": [usual.get(kind, kind) for kind in kinds]}
    if raw["num_local_experts"]:
        return raw
    if not raw["shared_intermediate_size"]:
        raise ModelError("config.json: without experts, shared_intermediate_size should be above 0")
    return {**raw, "intermediate_size": raw["shared_intermediate_size"]}


def ernie(raw: Raw) -> Raw:
    """ERNIE 4.5's configuration, where `use_bias` is about all linear layers of a block."""
    biased = bool(raw.get("use_bias", False))
    return {**raw, "attention_bias": biased, "mlp_bias": biased}


def seed_oss(raw: Raw) -> Raw:
    """Seed-OSS's configuration, whose attention has no bias after it in published models."""
    if raw.get("attention_out_bias"):
        raise ModelError("config.json: attention_out_bias is supported only as false")
    return raw


def exaone4(raw: Raw) -> Raw:
    """EXAONE 4's configuration, whose layers with and without windows may stand in a text such as LLLG."""
    pattern, layers = raw.get("sliding_window_pattern"), int(raw["num_hidden_layers"])
    if not isinstance(pattern, str):
        return raw
    if not pattern or set(pattern) - {"L", "G"}:
        raise ModelError(f"config.json: sliding_window_pattern is {pattern!r:.40}, not letters L and G")
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    listed = [kinds[pattern[i % len(pattern)]] for i in range(layers)]
    rest = {key: value for key, value in raw.items() if key != "sliding_window_pattern"}
    return {"layer_types": listed, **rest}


def softmax_groups(raw: Raw) -> Raw:
    """DeepSeek-V2's configuration, where `topk_method` says whether groups count."""
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method {method!r} is not supported in DeepSeek-V2")
    if raw.get("norm_topk_prob"):
        raise ModelError("config.json: norm_topk_prob is not supported in DeepSeek-V2")
    return {**raw, "n_group": 1, "topk_group": 1} if method == "greedy" else raw


def listed_experts(raw: Raw) -> Raw:
    """A configuration whose `mlp_layer_types` takes the place of `first_k_dense_replace`."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return raw
    if len(kinds) != int(raw["num_hidden_layers"]):
        raise ModelError(
            f"config.json: mlp_layer_types has {len(kinds)} entries, one for each layer is needed"
        )
    if unknown := set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"config.json: mlp_layer_types has {min(unknown)!r}, which is not dense or sparse")
    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return {**raw, "mlp_only_layers": dense, "first_k_dense_replace": 0}


def rotary_share(raw: Raw) -> Raw:
    """MiniMax-M2's configuration, where `rotary_dim` is the number of dimensions that rotate."""
    if "rotary_dim" not in raw:
        return raw
    return {**raw, "partial_rotary_factor": int(raw["rotary_dim"]) / int(raw["head_dim"])}


def llama4(raw: Raw) -> Raw:
    """Llama 4's configuration, where `moe_layers` have experts, and other layers a size of their own."""
    layers, step = int(raw["num_hidden_layers"]), int(raw.get("interleave_moe_layer_step") or 1)
    sparse = raw.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    return {
        **raw,
        "num_experts_per_tok": raw.get("num_experts_per_tok", 1),
        "n_shared_experts": 1,
        "moe_intermediate_size": raw["intermediate_size"],
        "intermediate_size": raw.get("intermediate_size_mlp", 16_384),
        "mlp_only_layers": [layer for layer in range(layers) if layer not in sparse],
    }


def lfm2(raw: Raw) -> Raw:
    """LFM2's configuration, where the size of feed-forward parts may be derived."""
    size = int(raw.get("block_ff_dim") or raw["intermediate_size"])
    if raw.get("block_auto_adjust_ff_dim", True):
        step = int(raw.get("block_multiple_of") or 256)
        size = int(float(raw.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        size = -(-size // step) * step
    return {**_short_convolutions(raw), "intermediate_size": size}


def lfm2_moe(raw: Raw) -> Raw:
    """LFM2-MoE's configuration, where `num_dense_layers` takes the place of `first_k_dense_replace`."""
    return {**_short_convolutions(raw), "first_k_dense_replace": int(raw.get("num_dense_layers", 2))}


def _short_convolutions(raw: Raw) -> Raw:
    """Both families' configuration, with the type of each layer."""
    if raw.get("conv_bias"):
        raise ModelError("config.json: conv_bias (convolutions with a bias) is not supported")
    layers = int(raw["num_hidden_layers"])
    full = raw.get("full_attn_idxs")
    kinds = ["full_attention" if full is None or i in full else "conv" for i in range(layers)]
    tied = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    return {**raw, "layer_types": raw.get("layer_types") or kinds, "tie_word_embeddings": tied}


def bounded_at_7(raw: Raw) -> Raw:
    """A configuration of gpt-oss, whose activation has the published constants."""
    for key, value in {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}.items():
        if raw.get(key, value) != value:
            raise ModelError(f"config.json: {key} {raw[key]!r:.80} is not supported, only {value}")
    return raw


def with_layer_types(raw: Raw) -> Raw:
    """A configuration with `layer_types`. Without, each `full_attention_interval`-th layer is full."""
    interval, layers = int(raw.get("full_attention_interval") or 4), int(raw["num_hidden_layers"])
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return {"layer_types": kinds, **raw}
