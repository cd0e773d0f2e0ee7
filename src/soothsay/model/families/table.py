"""The model families, by `model_type`: for each, the function that makes a `ModelSpec` of a `config.json`.

A new family is one function and one line here. The names of its tensors stand in
`soothsay.model.tensor_names`.
"""

from __future__ import annotations

from collections.abc import Callable

from soothsay.model.families import cohere, deepseek, glm, granite, lfm2, llama, olmo, qwen
from soothsay.model.families.decoder import llama_like
from soothsay.model.families.falcon_h1 import falcon_h1
from soothsay.model.families.gemma import gemma2, gemma3
from soothsay.model.families.gemma3n import gemma3n
from soothsay.model.families.gemma4 import gemma4, gemma4_unified
from soothsay.model.families.layer_fields import Raw
from soothsay.model.families.llama4 import llama4
from soothsay.model.families.nemotron_h import nemotron_h
from soothsay.model.specs.model_spec import ModelSpec

FAMILIES: dict[str, Callable[[Raw], ModelSpec]] = {
    "llama": llama_like,
    "phi3": llama.phi3,
    "mistral": llama.mistral,
    "mixtral": llama.mixtral,
    "ministral3": llama.ministral3,
    "qwen2": qwen.qwen2,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), qwen.qwen2_vl),
    "qwen3": qwen.qwen3,
    "qwen3_vl_text": qwen.qwen3_vl,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen3_vl_moe_text": qwen.qwen3_vl_moe,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_next_gguf": qwen.qwen3_next_gguf,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), qwen.qwen3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), qwen.qwen3_5_moe),
    "smollm3": llama.smollm3,
    "granite": granite.granite,
    # granitemoe_gguf, granitemoehybrid_gguf: our own: gate and up are matrices of their own
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_gguf"), granite.granite_moe),
    **dict.fromkeys(("granitemoehybrid", "granitemoehybrid_gguf"), granite.granite_hybrid),
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "deepseek_v2": deepseek.deepseek_v2,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), deepseek.deepseek_v3),
    "glm4_moe_lite": deepseek.glm4_moe_lite,
    "gpt_oss": llama.gpt_oss,
    "llama4_text": llama4,
    "lfm2": lfm2.lfm2,
    "lfm2_moe": lfm2.lfm2_moe,
    "minimax_m2": llama.minimax_m2,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "ernie4_5": llama.ernie,
    "seed_oss": llama.seed_oss,
    "exaone4": olmo.exaone4,
    "olmo2": olmo.olmo2,
    "olmo3": olmo.olmo3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4_unified,
}

_SPARSE = "its attention reads keys that an indexer chooses"
_BLOCKS = "its attention reads chosen blocks of keys"
_RECURRENT = "it has Mamba layers"
_NORMED_LAST = "its norms of queries and keys come after the rotation"
UNSUPPORTED: dict[str, str] = {  # by `model_type`
    "apertus": "its feed-forward parts have an activation of their own (xIELU)",
    "arcee": "its feed-forward parts have no gate",
    "bamba": _RECURRENT,
    "bert": "it is an encoder",
    "deepseek_ref": "it is DeepSeek-V4 in its authors' own format",
    "deepseek_v32": _SPARSE,
    "deepseek_v4": "its attention runs over compressed keys, and its layers have several residual streams",
    "ernie4_5_moe": "its experts have not been tried",
    "exaone_moe": "its experts have not been tried",
    "glm_moe_dsa": _SPARSE,
    "hunyuan_v1_dense": _NORMED_LAST,
    "hunyuan_v1_moe": _NORMED_LAST,
    "jamba": _RECURRENT,
    "kimi_linear": "it has layers of Kimi Delta Attention",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "mimo": "it has not been tried: its code comes with its weights",
    "mimo_v2_flash": "its heads of keys and of values differ in size",
    "minimax_m3": _BLOCKS,
    "minimax_m3_vl": _BLOCKS,
    "nemotron": "its feed-forward parts have no gate",
    "nemotron-nas": "each of its blocks has a shape of its own",
    "rwkv7": "it has no attention",
    "step3p7": "its attention has a gate for each head",
    "t5": "it has an encoder",
    "whisper": "it reads speech",
}
"""Why some families do not run that people may try."""
