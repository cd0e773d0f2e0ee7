"""Names of the tensors of GGUF files, by our modules and by Hugging Face's names.

GGUF's names are those of llama.cpp's converter (`gguf-py/gguf/constants.py`).
A part stands for our module, which of its tensors it is, and how its name goes on; or for a name after =.
A part with its suffix stands for a whole name.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from soothsay.model.weights.hf_names import names_of

_OUTER_PARTS = {
    "token_embd": "embedding",
    "position_embd": "positions",
    "output_norm": "norm",
    "token_embd_norm": "=embedding_norm",  # LFM2's last norm
    "per_layer_token_embd": "layer_embeddings.table",
    "per_layer_model_proj": "layer_embeddings.projection",
    "per_layer_proj_norm": "layer_embeddings.norm",
}
_STREAMS = {  # of Gemma 3n; {} stands for the number in a stack
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}


def _feed_forward(end: str, module: str) -> dict[str, str]:
    """Parts of a dense part, or of all experts, whose names end so, and our module."""
    gate_up, down = f"{module}.gate_up", f"{module}.down"
    return {f"ffn_gate{end}": f"{gate_up}:0", f"ffn_up{end}": f"{gate_up}:-1", f"ffn_down{end}": down}


_BLOCK_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.qkv:0",
    "attn_k": "attention.qkv:1",
    "attn_v": "attention.qkv:2",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    **_feed_forward("", "mlp"),
}
"""Parts of most files."""

FUSED = "ffn_gate_up_exps"
"""Experts' gates and up, one after the other in one matrix: the halves of `FUSED_HALVES`."""

FUSED_HALVES = "ffn_gate_exps", "ffn_up_exps"

_STATES = {
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def _states(module: str) -> dict[str, str]:
    """Parts of a layer with states, all of one of our modules."""
    return {part: f"{module}:0:.{name}" for part, name in _STATES.items()}


# what architectures have beside the usual parts, or in their place
AFTER = {"post_attention_norm": "attention_post_norm", "post_ffw_norm": "mlp_post_norm"}
BEFORE_MLP = {"post_attention_norm": "mlp_norm"}
EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    **_feed_forward("_exps", "mlp.experts"),
}
CORRECTED_EXPERTS = {**EXPERTS, "exp_probs_b.bias": "mlp.correction:0:.e_score_correction_bias"}
_SHARED = _feed_forward("_shexp", "mlp.shared")
EXPERTS_AND_SHARED = {**EXPERTS, **_SHARED}
CORRECTED_AND_SHARED = {**CORRECTED_EXPERTS, **_SHARED}
GLM4_MOE = {**BEFORE_MLP, **CORRECTED_AND_SHARED}
BIASED_AND_SHARED = {
    **EXPERTS_AND_SHARED,
    **dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.correction:0:.expert_bias"),
}
AFMOE = {
    **AFTER,
    **BIASED_AND_SHARED,
    **{name: f"attention.qkv:{i}" for i, name in enumerate(("attn_q", "attn_gate", "attn_k", "attn_v"))},
}
GPT_OSS = {**BEFORE_MLP, **EXPERTS, "attn_sinks.weight": "attention.sinks:0:.sinks"}
APERTUS = {f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
FUSED_QKV = {"attn_qkv": "attention.qkv"}
BAILING = {**FUSED_QKV, **BIASED_AND_SHARED}
GATED_SHARED = {**EXPERTS_AND_SHARED, "ffn_gate_inp_shexp": "mlp.shared_gate"}
DELTA = {
    **BEFORE_MLP,
    "attn_qkv": "attention.qkvz:0",
    "attn_gate": "attention.qkvz:1",
    "ssm_beta": "attention.gates:0",
    "ssm_alpha": "attention.gates:-1",
    **_states("attention.rule"),
}
DELTA_AND_EXPERTS = {**DELTA, **GATED_SHARED}
QWEN3_NEXT = {**DELTA_AND_EXPERTS, "ssm_ba": "attention.gates"}
_MAMBA2 = {
    "ssm_in": "attention.zxbct",
    "ssm_d": "attention.rule:0:.D",
    **_states("attention.rule"),
}
MAMBA2 = {**_MAMBA2, "attn_norm": "part_norm"}
JAMBA = {
    **EXPERTS,
    **_states("attention.rule"),
    "ssm_in": "attention.xz",
    "ssm_x": "attention.inner",
    "ssm_dt": "attention.steps",
    "ssm_dt.bias": "attention.rule:0:.dt_proj.bias",
    "ssm_d": "attention.rule:0:.D",
    **{f"ssm_{part}_norm": f"attention.norms.{i}" for i, part in enumerate(("dt", "b", "c"))},
}
MAMBA = {**JAMBA, "attn_norm": "part_norm"}
GRANITE = {**_MAMBA2, **EXPERTS_AND_SHARED}
FALCON_H1 = {  # whose converter may name a norm without `.weight`
    **_MAMBA2,
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "mlp_norm:0:.weight"),
}
NEMOTRON_H = {  # queries and keys are permuted alike, which changes no score: nothing rotates
    **MAMBA2,
    **CORRECTED_AND_SHARED,
    "ffn_latent_down": "mlp.latent_in",
    "ffn_latent_up": "mlp.latent_out",
}
LFM2 = {
    **EXPERTS,
    "exp_probs_b.bias": "mlp.correction:0:.expert_bias",
    "shortconv.conv": "attention.taps",
    "shortconv.in_proj": "attention.bcx",
    "shortconv.out_proj": "=conv.out_proj",
}
LATENT = {
    **CORRECTED_AND_SHARED,
    "attn_q_a": "attention.q_a",
    "attn_q_a_norm": "attention.q_a_norm",
    "attn_q_b": "attention.q_b",
    "attn_kv_a_mqa": "attention.kv_a",
    "attn_kv_a_norm": "attention.kv_a_norm",
    "attn_kv_b": "attention.kv_b",
    "attn_k_b": "=self_attn.k_b_proj",
    "attn_v_b": "=self_attn.v_b_proj",
}
_INDEXER = "attn_q_b", "attn_k", "k_norm", "proj"
SPARSE_LATENT = {**LATENT, **{f"indexer.{part}": f"=self_attn.indexer.{part}" for part in _INDEXER}}
KIMI_LINEAR = {
    **LATENT,
    **{f"ssm_conv1d_{part}": f"attention.rule:0:.{part}_conv1d" for part in "qkv"},
    "ssm_f_a": "attention.low:0",
    "ssm_g_a": "attention.low:1",
    "ssm_beta": "attention.low:2",
    "ssm_f_b": "attention.decays",
    "ssm_g_b": "attention.z",
    "ssm_a": "attention.rule:0:.A_log",
    "ssm_dt.bias": "attention.rule:0:.dt_bias",
    "ssm_norm": "attention.rule:0:.o_norm",
}
_LAYER_INPUTS = {
    "inp_gate": "layer_input.gate",
    "proj": "layer_input.projection",
    "post_norm": "layer_input.post_norm",
}
GEMMA3N = {
    **AFTER,
    **_LAYER_INPUTS,
    "altup_correct_coef": "alternate.corrections",
    "altup_correct_scale.weight": "alternate.scale:0:.correct_output_scale",
    "altup_predict_coef": "alternate.predictions",
    "altup_router": "alternate.router",
    "altup_router_norm": "alternate.router_norm",
    "laurel_l": "laurel_in",
    "laurel_r": "laurel_out",
    "laurel_post_norm": "laurel_norm",
}
GEMMA4 = {
    **AFTER,
    **_LAYER_INPUTS,
    "pre_ffw_norm_2": "mlp.experts_norm",
    "post_ffw_norm_1": "mlp.dense_post_norm",
    "post_ffw_norm_2": "mlp.experts_post_norm",
    "layer_output_scale.weight": "=layer_scalar",
    "ffn_gate_inp": "mlp.mixture.router",
    "ffn_gate_inp.scale": "mlp.router_norm:0:.scale",
    **_feed_forward("_exps", "mlp.mixture.experts"),
    "ffn_down_exps.scale": "mlp.mixture.scales:0:.per_expert_scale",
}

T5 = {
    "attn_o": "attention.o",
    "attn_rel_b": "attention.relative",
    "cross_attn_norm": "cross_norm",
    "cross_attn_q": "cross.q",
    "cross_attn_k": "cross.kv:0",
    "cross_attn_v": "cross.kv:1",
    "cross_attn_o": "cross.o",
    "cross_attn_rel_b": "=layer.1.EncDecAttention.relative_attention_bias",  # which no model reads
}
T5_UNGATED = {**T5, "ffn_up": "mlp.up"}


class ModuleNames(NamedTuple):
    """How Hugging Face's checkpoints name an MTP module. {} stands for the block, and for its number.

    llama.cpp's converter counts modules as further blocks, and writes their number as `nextn_predict_layers`.
    """

    beside: Mapping[str, str]  # names of the parts beside its block
    block: str  # prefix of the block's tensors


_BESIDE = tuple(
    f"nextn.{part}"
    for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm", "embed_tokens", "shared_head_head")
)
_IN_MTP = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "embed_tokens", "shared_head.head")
_IN_LAYERS = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "embed_tokens", "shared_head.head")
IN_MTP = ModuleNames(
    {part: f"mtp.{name}" for part, name in zip(_BESIDE, _IN_MTP, strict=True)}, "mtp.layers.{1}"
)
IN_LAYERS = ModuleNames(
    {part: f"model.layers.{{0}}.{name}" for part, name in zip(_BESIDE, _IN_LAYERS, strict=True)},
    "model.layers.{0}",
)


def outer_names(family: str) -> dict[str, str]:
    """Hugging Face's names of what a family has outside of its blocks, by GGUF's."""
    found = {part: f"model.{name}" for part, name in _resolved(family, _OUTER_PARTS)}
    head = {"output": names_of(family)["head"][0]}
    return {**found, **head, **(_STREAMS if family == "gemma3n_text" else {})}


def block_names(family: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Hugging Face's names of a block's parts, by GGUF's. {} stands for the expert."""
    return dict(_resolved(family, {**_BLOCK_PARTS, **parts}))


def _resolved(family: str, parts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Parts, and Hugging Face's names. Without those that are in one tensor with others there."""
    names = names_of(family)
    for part, target in parts.items():
        module, _, tail = target.partition(":")
        place, _, rest = tail.partition(":")
        if target.startswith("="):
            yield part, target[1:]
        elif int(place or 0) < len(names.get(module, ())):
            yield part, names[module][int(place or 0)] + rest
