"""What GGUF files of each architecture have: keys of a config.json, parts of blocks, and changes of tensors.

Names and keys are those of llama.cpp's converter (`conversion/`, `gguf-py/gguf/constants.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from soothsay.errors import ModelError, shown
from soothsay.model.formats import gguf_gemma_keys as gemma
from soothsay.model.formats import gguf_hybrid_keys as hybrid
from soothsay.model.formats import gguf_own_keys as keys
from soothsay.model.formats import gguf_part_names as parts
from soothsay.model.formats.gguf_metadata import Metadata, Own
from soothsay.model.formats.gguf_own_keys import Config, Shapes

Change = Callable[[Tensor], Tensor]
"""From the stored numbers of a tensor to those of Hugging Face."""


def _nothing(*_: object) -> Config:
    return {}


@dataclass(frozen=True)
class Architecture:
    """What the files of an architecture have."""

    family: str  # its `model_type`
    blocks: Mapping[str, str] = field(default_factory=dict)  # parts of blocks, beside the usual ones
    own: Callable[[Metadata, Config, Shapes], Config] = _nothing  # keys that not all files have
    yarn: Own = _nothing  # what a `rope_scaling` of YaRN has besides
    numbers: Mapping[str, str] = field(default_factory=dict)  # tensors of a block, by key of the metadata
    modules: parts.ModuleNames | None = None  # names of MTP modules
    stacks: Mapping[str, "Architecture"] = field(default_factory=dict)  # by what begins their tensors' names
    theta: float = 1e4  # base of rotary positions, where a file does not say
    eps: str = "rms_norm_eps"  # the key of the epsilon of norms
    interleaved: bool = False  # rows of q and k take turns, since llama.cpp rotates by neighbours
    centred: bool = False  # norms' weights w are stored as 1 + w
    partial: bool = False  # `rope.dimension_count` may be less than the size of a head
    varied: bool = False  # layers have sizes of their own


def architecture_of(data: Metadata, tensors: Iterable[str]) -> Architecture:
    """The architecture of a file with these tensors. Raises `ModelError` for an unknown one."""
    name = data.architecture
    if name == "t5encoder":
        raise ModelError(
            f"{data.path} holds the encoder of a T5 alone, which writes no answers; take the model's file"
        )
    if "general.architecture" not in data.values:
        kind = data.values.get("general.type")
        what = "names no architecture" if kind is None else f"is of the type {shown(kind, 40)}"
        raise ModelError(f"{data.path} {what}, so it holds no model; take the model's file")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{data.path} holds a model of architecture {name!r}; "
            f"the known ones are {', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and data.number("expert_count", 0) > 0:
        return _MIXTRAL
    if name == "olmo2" and data.number("attention.sliding_window", 0) > 0:
        return _OLMO3
    if name == "chatglm" and any("attn_qkv" in tensor for tensor in tensors):
        return _CHATGLM
    if name == "t5" and not any("ffn_gate" in tensor for tensor in tensors):
        return _T5_UNGATED
    return ARCHITECTURES[name]


def read_config(data: Metadata, kind: Architecture, shapes: Shapes) -> Config:
    """The keys of config.json, without those of rotary scaling."""
    if "token_embd.weight" not in shapes:
        raise ModelError(
            f"{data.path} has no tensor 'token_embd.weight'; is it a whole model, not an adapter?"
        )
    get, require = data.number, data.require
    hidden, heads = require("embedding_length"), require("attention.head_count")
    if heads < 1 and kind.family not in ("mamba", "mamba2"):
        raise ModelError(f"{data.path}: attention.head_count is {heads}; the file is damaged")
    head_dim, rotated = _head_sizes(data, kind, hidden // max(heads, 1))
    layers = require("block_count")
    if kind.varied:
        size = min(data.layers("feed_forward_length", layers), default=0)
    else:
        size = get("feed_forward_length", get("expert_feed_forward_length")) or require("feed_forward_length")
    config = {
        "model_type": kind.family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kind.varied else get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": require("context_length"),
        kind.eps: _norm_eps(data, kind),
        "rope_theta": get("rope.freq_base", kind.theta),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "is_causal": data.raw("attention.causal", True) is not False,
    }
    if kind.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    return config | kind.own(data, config, shapes)


def _head_sizes(data: Metadata, kind: Architecture, usual: int) -> tuple[int, int]:
    """The dimensions of a head, and those that rotate. `usual`: of a head, where the file has none.

    Latent attention has sizes of its own: only the dimensions that rotate count here.
    """
    get = data.number
    if "attn_kv_a_mqa" in kind.blocks:
        return (data.require("rope.dimension_count"),) * 2
    head_dim = get("attention.key_length", usual)
    if kind.family == "nemotron_h":  # nothing rotates, whatever the file says
        return head_dim, head_dim
    rotated = get("rope.dimension_count", head_dim)
    checked = ("attention.value_length", "rope.dimension_count")
    for key in checked[:1] if kind.partial and rotated <= head_dim else checked:
        if get(key, head_dim) != head_dim:
            raise ModelError(
                f"{data.path}: {key} {get(key)} is not the size of a head, {head_dim}: not supported"
            )
    return head_dim, rotated


def _norm_eps(data: Metadata, kind: Architecture) -> Any:
    """The epsilon of norms. Some converters write it under the key of the other kind of norms."""
    keys = ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"]
    own, other = reversed(keys) if kind.eps == "layer_norm_eps" else keys
    given = data.number(own, data.number(other))
    return data.require(own) if given is None else given


def _log_rates(rates: Tensor) -> Tensor:
    """A from the stored -e^A, one for each head or channel, or a row for each channel.

    Raises `ModelError` for rates at which a state would grow.
    """
    if not bool((rates < 0).all()):
        raise ModelError("a tensor ssm_a has rates that are not below 0; the file is damaged")
    logs = (-rates.float()).log()
    return logs.flatten() if 1 in logs.shape else logs


def _taps(stored: Tensor) -> Tensor:
    """The taps of a convolution, `[channels, 1, taps]`, or its bias."""
    return stored.reshape(-1, 1, stored.shape[-1]) if stored.ndim > 1 else stored


CHANGES: Mapping[str, Change] = {
    "ffn_gate_inp_shexp": lambda gate: gate.reshape(1, -1),
    "ssm_a": _log_rates,
    **dict.fromkeys(("ssm_conv1d", *(f"ssm_conv1d_{part}" for part in "qkv"), "shortconv.conv"), _taps),
    **dict.fromkeys(("ssm_d", "ssm_norm"), Tensor.flatten),
}
"""By part of a block."""

_MIXTRAL = Architecture("mixtral", parts.EXPERTS, keys.mixtral, interleaved=True)
_OLMO3 = Architecture("olmo3", parts.AFTER, keys.typed_windows)
_NEMOTRON_H = Architecture(
    *("nemotron_h", parts.NEMOTRON_H, hybrid.nemotron_h),
    modules=parts.IN_LAYERS,
    eps="layer_norm_epsilon",
    varied=True,
)
_QWEN3_5 = partial(Architecture, modules=parts.IN_MTP, centred=True, partial=True)
_LFM2 = partial(Architecture, blocks=parts.LFM2, eps="norm_eps", varied=True)


def _t5(blocks: Mapping[str, str], *, gated: bool) -> Architecture:
    stacks = {"enc.": Architecture("t5 encoder", blocks), "dec.": Architecture("t5", blocks)}
    return Architecture("t5", own=partial(keys.t5, gated=gated), stacks=stacks)


_T5_UNGATED = _t5(parts.T5_UNGATED, gated=False)

_LATENT = Architecture(  # V2's files too, which have no sigmoids
    "deepseek_v3", parts.SPARSE_LATENT, keys.latent, yarn=keys.latent_scaling, modules=parts.IN_LAYERS
)

_CHATGLM = Architecture("glm_gguf", parts.FUSED_QKV, keys.chatglm, partial=True)

ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),  # Mistral's files too; Mixtral's have experts
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", parts.EXPERTS, keys.qwen3_moe),
    "qwen2vl": Architecture("qwen2"),  # text has one position in all three axes
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", parts.EXPERTS, keys.qwen3_moe),
    "qwen2moe": Architecture("qwen2_moe", parts.GATED_SHARED, keys.qwen2_moe),
    "phi2": Architecture("phi", own=keys.acting("gelu_new"), eps="layer_norm_eps", partial=True),
    "phi3": Architecture("phi3", parts.FUSED_QKV, keys.windowed, partial=True),
    "phimoe": Architecture("phimoe", parts.EXPERTS, keys.phimoe),
    "starcoder2": Architecture("starcoder2", own=keys.starcoder2, eps="norm_epsilon"),
    "stablelm": Architecture("stablelm", own=keys.stablelm, eps="layer_norm_eps", partial=True),
    "nemotron": Architecture(
        "nemotron", own=keys.acting("relu2"), eps="norm_eps", centred=True, partial=True
    ),
    "apertus": Architecture("apertus", own=keys.acting("xielu"), numbers=parts.APERTUS),
    "jais2": Architecture("jais2", own=keys.acting("relu2"), eps="layer_norm_eps"),
    "arcee": Architecture("arcee", own=keys.acting("relu2"), interleaved=True),
    "gptneox": Architecture("gpt_neox", parts.FUSED_QKV, keys.gpt_neox, eps="layer_norm_eps", partial=True),
    "gpt2": Architecture("gpt2", parts.FUSED_QKV, keys.acting("gelu_new"), eps="layer_norm_epsilon"),
    "falcon": Architecture("falcon", parts.FUSED_QKV, keys.falcon, eps="layer_norm_epsilon"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),  # its base has grown by `alpha` already
    "hunyuan-moe": Architecture("hunyuan_v1_moe", parts.EXPERTS_AND_SHARED, keys.hunyuan_moe),
    "smollm3": Architecture("smollm3", interleaved=True),
    "granite": Architecture("granite", own=keys.granite, interleaved=True),
    "minicpm": Architecture("granite", own=keys.granite, interleaved=True),
    "internlm2": Architecture("llama", interleaved=True),
    "granitemoe": Architecture("granitemoe_gguf", parts.GRANITE, keys.granite_moe, interleaved=True),
    "granitehybrid": Architecture(
        *("granitemoehybrid_gguf", parts.GRANITE, hybrid.granite_hybrid),
        interleaved=True,
        varied=True,
        partial=True,  # Bamba
    ),
    "falcon-h1": Architecture("falcon_h1", parts.FALCON_H1, hybrid.falcon_h1),
    "mamba2": Architecture("mamba2", parts.MAMBA2, hybrid.mamba2, eps="layer_norm_epsilon"),
    "mamba": Architecture("mamba", parts.MAMBA, hybrid.mamba, eps="layer_norm_epsilon"),
    "jamba": Architecture("jamba", parts.JAMBA, hybrid.jamba, varied=True),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe", parts.CORRECTED_AND_SHARED, keys.ernie_moe),
    "dots1": Architecture("dots1", parts.CORRECTED_AND_SHARED, keys.dots1),
    "afmoe": Architecture("afmoe", parts.AFMOE, keys.afmoe),
    "hy_v3": Architecture("hy_v3", parts.BIASED_AND_SHARED, keys.hy3),
    "bailingmoe": Architecture("bailing_moe_gguf", parts.BIASED_AND_SHARED, keys.bailing, interleaved=True),
    "bailingmoe2": Architecture("bailing_moe", parts.BAILING, keys.bailing, partial=True),
    "mellum": Architecture("mellum", parts.EXPERTS, keys.mellum),
    "exaone": Architecture("exaone"),
    "exaone-moe": Architecture("exaone_moe", parts.CORRECTED_AND_SHARED, keys.exaone_moe),
    "seed_oss": Architecture("seed_oss", parts.BEFORE_MLP),
    "exaone4": Architecture("exaone4", parts.AFTER, keys.typed_windows),
    "olmo": Architecture("olmo", own=keys.olmo, interleaved=True),
    "olmoe": Architecture("olmoe", parts.EXPERTS, keys.sized_experts),
    "olmo2": Architecture("olmo2", parts.AFTER),  # OLMo 3's files too, which have a sliding window
    "mistral3": Architecture("ministral3", yarn=keys.ministral_scaling, interleaved=True),
    "chatglm": Architecture("glm", own=keys.chatglm, partial=True),
    "glm4": Architecture("glm4", parts.AFTER, keys.glm4, partial=True),
    "glm4moe": Architecture("glm4_moe", parts.GLM4_MOE, keys.glm4_moe, modules=parts.IN_LAYERS, partial=True),
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa"), _LATENT),
    "minicpm3": Architecture("minicpm3", parts.LATENT, keys.minicpm3),
    "kimi-linear": Architecture("kimi_linear", parts.KIMI_LINEAR, hybrid.kimi_linear, varied=True),
    "command-r": Architecture("cohere", own=keys.cohere, eps="layer_norm_eps"),
    "cohere2": Architecture("cohere2", own=keys.cohere2, eps="layer_norm_eps"),
    "gemma": Architecture("gemma", own=keys.acting("gelu_pytorch_tanh"), centred=True),
    "gemma2": Architecture("gemma2", parts.AFTER, gemma.gemma2, centred=True),
    "gemma3": Architecture("gemma3_text", parts.AFTER, gemma.gemma3, theta=1e6, centred=True),
    "gemma3n": Architecture("gemma3n_text", parts.GEMMA3N, gemma.gemma3n, theta=1e6),
    "gemma4": Architecture("gemma4_text", parts.GEMMA4, gemma.gemma4, varied=True),
    # the range of YaRN is not rounded, as in training; llama.cpp rounds
    "gpt-oss": Architecture("gpt_oss", parts.GPT_OSS, keys.gpt_oss, yarn=lambda _: {"truncate": False}),
    "llama4": Architecture("llama4_text", parts.EXPERTS_AND_SHARED, keys.llama4),
    "minimax-m2": Architecture("minimax_m2", parts.CORRECTED_EXPERTS, keys.minimax_m2, partial=True),
    "lfm2": _LFM2("lfm2", own=hybrid.lfm2),
    "lfm2moe": _LFM2("lfm2_moe", own=hybrid.lfm2_moe),
    "qwen3next": _QWEN3_5("qwen3_next_gguf", parts.QWEN3_NEXT, hybrid.qwen3_5_moe),
    "qwen35": _QWEN3_5("qwen3_5_text", parts.DELTA, hybrid.qwen3_5),
    "qwen35moe": _QWEN3_5("qwen3_5_moe_text", parts.DELTA_AND_EXPERTS, hybrid.qwen3_5_moe),
    "t5": _t5(parts.T5, gated=True),  # FLAN-T5, mT5 and umT5; T5 1.0 has no gates
}
"""By llama.cpp's names."""
