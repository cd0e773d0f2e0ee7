"""A decoder block's configuration with Hugging Face's keys: read from a checkpoint, and written to one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.stored_head import Names, stored
from soothsay.errors import DrafterError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.specs.attention_spec import AttentionSpec, HeadNorms, RopeSpec
from soothsay.model.specs.feed_forward_spec import CLIPPED, DenseSpec
from soothsay.model.specs.model_spec import EmbeddingSpec, LayerSpec, ModelSpec, NormSpec
from soothsay.model.weights.hf_names import names_of

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose blocks heads may have. Configurations of other families are read as Llama's, and the tensors
decide which parts a block has."""

GATED = "qwen3_5_text"
"""The family of blocks whose attention has an output gate."""

FOREIGN = {
    "self_attn.kv_b_proj.": "multi-head latent attention (DeepSeek)",
    "self_attn.qkv_proj.": "q, k and v in one tensor",
    "linear_attn.": "linear attention",
    "mlp.experts.": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "block_sparse_moe.": "a mixture of experts",
    "self_attn.sinks": "attention sinks",
    "pre_feedforward_layernorm.": "Gemma's norms after each part",
    "post_feedforward_layernorm.": "Gemma's norms after each part",
}
"""Beginnings of tensor names that only blocks of other kinds have, and what they mean."""


def block_config(
    files: DrafterFiles, raw: Mapping[str, Any], names: Names, ours: str, layers: int = 1
) -> ModelSpec:
    """Read the configuration of a head's decoder blocks.

    The tensors decide whether there are biases and norms of queries and keys, since the config.json of a head
    is often a copy of its target's.

    Args:
        files: the checkpoint.
        raw: config.json, or its part for the blocks.
        names: the layout's table.
        ours: the prefix of the first block's parameters in our head.
        layers: number of blocks.

    Raises:
        ModelError: the configuration lacks a key.
    """

    def held(parameter: str) -> bool:
        return stored(names, ours + parameter)[0] in files.names

    family = raw.get("model_type") if raw.get("model_type") in PLAIN else "llama"
    config = {
        **raw,
        "model_type": family,
        "num_hidden_layers": layers,
        "layer_types": None,
        "is_causal": None,
    }
    prefix = stored(names, ours + "attention.qkv.weight")[0].removesuffix("self_attn.q_proj.weight")
    if has_experts(files, raw, prefix):
        config |= expert_settings(raw, layers)
    elif has_gate(files, prefix):
        config |= {"model_type": GATED, "layer_types": ["full_attention"] * layers}
    spec = parse_model_config(config)
    norms = HeadNorms(spec.norm.eps) if held("attention.q_norm.weight") else None
    bias, o_bias, mlp_bias = (held(f"{part}.bias") for part in ("attention.qkv", "attention.o", "mlp.down"))

    def with_held(layer: LayerSpec) -> LayerSpec:
        return replace(
            layer,
            mixer=replace(cast(AttentionSpec, layer.mixer), bias=bias, o_bias=o_bias, norms=norms),
            mlp=replace(layer.mlp, bias=mlp_bias) if isinstance(layer.mlp, DenseSpec) else layer.mlp,
        )

    return replace(spec.with_layers(with_held), head=replace(spec.head, tied=False))


def has_gate(files: DrafterFiles, prefix: str) -> bool:
    """Whether the attention of the block at `prefix` has an output gate."""
    query, output = f"{prefix}self_attn.q_proj.weight", f"{prefix}self_attn.o_proj.weight"
    return {query, output} <= files.names and files.rows(query) == 2 * files.shape(output)[-1]


def check_block(
    files: DrafterFiles, raw: Mapping[str, Any], prefix: str, *, gated: bool = False, experts: bool = False
) -> None:
    """Raises `DrafterError` for a block with parts that we do not compute. `prefix` ends in a dot.

    `gated`: its attention may have an output gate, and then rotate a part of each head. `experts`: it may
    have experts, and then is as its family's blocks are.
    """
    experts = experts and has_experts(files, raw, prefix)
    held = {name.removeprefix(prefix) for name in files.names if name.startswith(prefix)}
    for part, what in FOREIGN.items():
        if any(name.startswith(part) for name in held) and not (experts and part.startswith("mlp.")):
            raise refusal(files, f"its block has {what}")
    if experts or (gated and has_gate(files, prefix)):
        return
    rope = raw.get("rope_parameters") or {}
    rotated = float(raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1)
    if rotated != 1:
        raise refusal(files, f"its attention rotates {rotated:.0%} of each head")
    if has_gate(files, prefix):
        raise refusal(files, "its attention has an output gate (Qwen3-Next, Qwen3.5)")


def check_one_block(files: DrafterFiles) -> None:
    """Raises `DrafterError` for a head of EAGLE with several decoder blocks."""
    layers = {name.split(".")[1] for name in files.names if re.match(r"layers\.\d+\.", name)}
    if layers - {"0"}:
        raise refusal(files, f"it has {len(layers)} decoder blocks, where EAGLE has one")


def refusal(files: DrafterFiles, why: str) -> DrafterError:
    """The error for a block that we do not compute."""
    return DrafterError(
        f"{files.path}: {why}; soothsay drafts with dense blocks as Llama, Qwen2 and Qwen3 have them. Take "
        "another drafter for this target, or train one"
    )


def hf_config(block: ModelSpec) -> dict[str, Any]:
    """A block's configuration with Hugging Face's keys, for `block_config` and for other engines.

    Raises `DrafterError` for a block that no known family has.
    """
    attention, mlp = block.layers[0].mixer, block.layers[0].mlp
    if not isinstance(attention, AttentionSpec) or not isinstance(mlp, DenseSpec):
        raise _unwritable(block)
    c, size = attention, attention.size
    norms = None if c.norms is None else HeadNorms(block.norm.eps)
    plain = AttentionSpec(
        c.heads, c.kv_heads, c.rotation, c.scale, c.window, norms=norms, bias=c.bias, o_bias=c.o_bias
    )
    expressible = (
        (attention, mlp) == (plain, DenseSpec(mlp.size, mlp.activation, mlp.bias))
        and set(block.layers) == {LayerSpec(attention, mlp, NormSpec(block.norm.eps))}
        and mlp.gated
        and mlp.activation != CLIPPED
        and not block.zero_centred_norms
        and block.embedding == EmbeddingSpec()
        and abs(attention.scale * size**0.5 - 1) < 1e-6
        and not (attention.window and (norms or attention.bias))
    )
    if not expressible:
        raise _unwritable(block)
    family = "qwen3" if attention.norms else "qwen2" if attention.bias and not attention.o_bias else "llama"
    rope, window = attention.rotation.rope, attention.window
    positions = block.max_positions  # configurations state those before a linear scaling
    return {
        "model_type": "mistral" if window else family,
        "vocab_size": block.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": mlp.size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": size,
        "max_position_embeddings": round(positions / rope.factor) if rope.kind == "linear" else positions,
        "rms_norm_eps": block.norm.eps,
        "hidden_act": "gelu_pytorch_tanh" if mlp.activation == "gelu_tanh" else mlp.activation,
        "attention_bias": attention.bias,
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({"sliding_window": window} if window else {}),
        **_hf_rope(rope),
    }


def _unwritable(block: ModelSpec) -> DrafterError:
    return DrafterError(
        f"a block of family {block.family!r} with these parts has no place in a drafter's checkpoint: "
        "make the head of plain blocks, as Llama's or Qwen's"
    )


def speculators_config(method: str, architecture: str, target: str) -> dict[str, Any]:
    """The keys that all of speculators' configurations have."""
    return {
        "architectures": [architecture],
        "speculators_model_type": method,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def _hf_rope(rope: RopeSpec) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


FAMILIES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "glm4_moe")
"""Families whose MTP modules have experts in blocks that are computed."""


def has_experts(files: DrafterFiles, raw: Mapping[str, Any], prefix: str) -> bool:
    """Whether the block at `prefix` has experts as `FAMILIES` have them."""
    return raw.get("model_type") in FAMILIES and f"{prefix}mlp.gate.weight" in files.names


def expert_names(
    files: DrafterFiles, raw: Mapping[str, Any], ours: str, theirs: str
) -> dict[str, tuple[str, ...]]:
    """The table of names of a block's experts, empty if it has none. Prefixes end in a dot. See `Names`."""
    if not has_experts(files, raw, theirs):
        return {}
    family = names_of(str(raw["model_type"]))
    pattern = re.escape(theirs) + r"mlp\.experts\.(\d{1,6})\.down_proj\.weight"
    experts = [int(found[1]) for name in files.names if (found := re.fullmatch(pattern, name))]
    names = {}
    for module in ("mlp.router", "mlp.shared.gate_up", "mlp.shared.down", "mlp.shared_gate"):
        names[ours + module] = tuple(theirs + tensor for tensor in family[module])
    for expert in experts:
        for part in ("gate_up", "down"):
            tensors = family[f"mlp.experts.{part}"]
            names[f"{ours}mlp.experts.{expert}.{part}"] = tuple(theirs + t.format(expert) for t in tensors)
    correction = "e_score_correction_bias"
    names[f"{ours}mlp.correction.{correction}"] = (f"{theirs}mlp.gate.{correction}",)
    return names


def expert_settings(raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What a configuration says of `layers` blocks, all with experts and full attention."""
    return {
        "model_type": raw["model_type"],
        "layer_types": ["full_attention"] * layers,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": 0,
        "mlp_layer_types": None,
    }
