"""How the config.json of each family becomes a `ModelSpec`."""

from collections.abc import Callable, Mapping

from soothsay.errors import ModelError
from soothsay.model.families import classic, deepseek, encoder_decoders, gemma, hybrids, llama, mixtures, qwen
from soothsay.model.families.decoder import llama_like
from soothsay.model.families.fields import checked_fields, require
from soothsay.model.families.layer_fields import Raw, sizes
from soothsay.model.specs.model_spec import ModelSpec

TEXT_DEFAULTS: Mapping[str, Raw] = {
    "llama": sizes(32_000, 4096, 11_008, 32, 32, None, 2048),
    "mistral": sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072, sliding_window=4096),
    "qwen2": sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768, sliding_window=4096),
    "qwen3": sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768, head_dim=128, sliding_window=4096),
    "phi3": sizes(32_064, 3072, 8192, 32, 32, None, 4096, rms_norm_eps=1e-5),
    "granite": sizes(32_000, 4096, 11_008, 32, 32, None, 2048),
    "smollm3": sizes(128_256, 2048, 11_008, 36, 16, 4, 32_768),
    "cohere": sizes(256_000, 8192, 22_528, 40, 64, None, 8192, rope_theta=5e5),
    "cohere2": sizes(256_000, 8192, 22_528, 40, 64, None, 8192, sliding_window=4096),
}
"""What the `text_config` of a multimodal model may leave out, as its class in transformers has it.

LLaVA-1.5 names only what differs from transformers' `LlamaConfig`. A whole model's config.json names all."""

FAMILIES: dict[str, Callable[[Raw], ModelSpec]] = {
    **dict.fromkeys(("llama", "iquestcoder"), llama_like),
    "exaone": llama.exaone,
    "phi3": llama.phi3,
    "mistral": llama.mistral,
    "mixtral": mixtures.mixtral,
    "phimoe": mixtures.phimoe,
    "ministral": llama.ministral,
    "ministral3": llama.ministral3,
    "internlm3": llama.internlm3,
    "helium": llama.helium,
    "cwm": llama.cwm,
    "qwen2": qwen.qwen2,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), qwen.qwen2_vl),
    "qwen3": qwen.qwen3,
    "qwen3_vl_text": qwen.qwen3_vl,
    "qwen2_moe": qwen.qwen2_moe,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen3_vl_moe_text": qwen.qwen3_vl_moe,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_next_gguf": qwen.qwen3_next_gguf,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), qwen.qwen3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), qwen.qwen3_5_moe),
    "smollm3": llama.smollm3,
    "granite": hybrids.granite,
    # granitemoe_gguf, granitemoehybrid_gguf: our own: gate and up are matrices of their own
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_gguf"), hybrids.granite_moe),
    **dict.fromkeys(("granitemoehybrid", "granitemoehybrid_gguf"), hybrids.granite_hybrid),
    "bamba": hybrids.bamba,
    "falcon_h1": hybrids.falcon_h1,
    "nemotron_h": hybrids.nemotron_h,
    "mamba2": hybrids.mamba2,
    "mamba": hybrids.mamba,
    "falcon_mamba": hybrids.falcon_mamba,
    "jamba": hybrids.jamba,
    **dict.fromkeys(("glm", "glm_gguf"), llama.glm),
    **dict.fromkeys(("glm4", "glm4v_text"), llama.glm4),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), mixtures.glm4_moe),
    "deepseek_v2": deepseek.deepseek_v2,
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), deepseek.deepseek_v3),
    "deepseek_v32": deepseek.deepseek_v32,
    "glm_moe_dsa": deepseek.glm_moe_dsa,
    "kimi_linear": deepseek.kimi_linear,
    "glm4_moe_lite": deepseek.glm4_moe_lite,
    "mistral4": deepseek.mistral4,
    "minicpm": deepseek.minicpm,
    "minicpm3": deepseek.minicpm3,
    "gpt_oss": llama.gpt_oss,
    "llama4_text": llama.llama4,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "minimax_m2": mixtures.minimax_m2,
    "cohere": llama.cohere,
    "cohere2": llama.cohere2,
    "ernie4_5": llama.ernie,
    "ernie4_5_moe": mixtures.ernie_moe,
    "seed_oss": llama.seed_oss,
    "exaone4": llama.exaone4,
    "exaone_moe": mixtures.exaone_moe,
    "olmo": classic.olmo,
    "olmoe": mixtures.olmoe,
    "olmo2": llama.olmo2,
    "olmo3": llama.olmo3,
    "apertus": llama.apertus,
    "arcee": llama.arcee,
    "bitnet": llama.bitnet,
    "internlm2": llama.internlm2,
    "hunyuan_v1_dense": llama.hunyuan,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "hy_v3": mixtures.hy3,
    "dots1": mixtures.dots1,
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2", "bailing_moe_gguf"), mixtures.bailing),
    "solar_open": mixtures.solar_open,
    "mellum": mixtures.mellum,
    "afmoe": mixtures.afmoe,
    "flex_olmo": mixtures.flex_olmo,
    "starcoder2": classic.starcoder2,
    "stablelm": classic.stablelm,
    "nemotron": classic.nemotron,
    "jais2": classic.jais2,
    "phi": classic.phi,
    "gpt_neox": classic.gpt_neox,
    "gpt2": classic.gpt2,
    "gptj": classic.gptj,
    "opt": classic.opt,
    "falcon": classic.falcon,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "vaultgemma": gemma.vault_gemma,
    "gemma3_text": gemma.gemma3,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "gemma4_unified_text": gemma.gemma4_unified,
    "t5": encoder_decoders.t5,
    "mt5": encoder_decoders.mt5,
    "umt5": encoder_decoders.umt5,
    "bart": encoder_decoders.bart,
    "mbart": encoder_decoders.mbart,
    "marian": encoder_decoders.marian,
    "m2m_100": encoder_decoders.m2m_100,
    "pegasus": encoder_decoders.pegasus,
}

_BLOCKS = "its attention reads chosen blocks of keys"
_SOURCE = "of encoder-decoders, only relatives of T5 and of BART run"
UNSUPPORTED: dict[str, str] = {  # by `model_type`
    "bert": "it is an encoder",
    **dict.fromkeys(("blenderbot", "pegasus_x", "prophetnet", "t5gemma"), _SOURCE),
    "deepseek_ref": "it is DeepSeek-V4 in its authors' own format",
    "deepseek_v4": "its attention runs over compressed keys, and its layers have several residual streams",
    "mimo": "it has not been tried: its code comes with its weights",
    "mimo_v2_flash": "its heads of keys and of values differ in size",
    "minimax_m3": _BLOCKS,
    "minimax_m3_vl": _BLOCKS,
    "nllb-moe": "its experts have not been tried",
    "nemotron-nas": "each of its blocks has a shape of its own",
    "rwkv7": "it has no attention",
    "step3p7": "its attention has a gate for each head",
    "whisper": "it reads speech",
}
"""Why some families do not run that people may try."""


NO_DECODERS = ("Classification", "QuestionAnswering", "MaskedLM", "RewardModel")
"""Ends of names in `architectures` of models with another head than one for tokens."""


def parse_model_config(raw: Raw) -> ModelSpec:
    """Turn the content of a Hugging Face `config.json` into a `ModelSpec`.

    Raises `ModelError`, which names what is missing, unknown or out of range.
    """
    text = raw.get("text_config")
    _require_family(text if isinstance(text, Mapping) else raw)  # before fields, which may mean other things
    if isinstance(text, Mapping):
        raw = {**raw, "text_config": {**TEXT_DEFAULTS.get(str(text.get("model_type")), {}), **text}}
    raw = checked_fields(raw)
    if "text_config" in raw:  # a multimodal wrapper, such as gemma3: the decoder's part is inside
        shared = "tie_word_embeddings", "architectures"
        outer: Raw = {key: raw[key] for key in shared if key in raw}
        raw = {**raw["text_config"], **outer}
    _require_decoder(raw)
    name = str(raw["model_type"])
    try:
        return FAMILIES[name](raw)
    except KeyError as error:
        raise ModelError(f"config.json of family {name!r} has no {error.args[0]!r}") from None


def _require_decoder(raw: Raw) -> None:
    """Raises `ModelError` for a model whose tokens see later ones, or that has no output head for tokens."""
    for key, encodes in (("use_bidirectional_attention", (True, "all")), ("is_causal", (False,))):
        if raw.get(key) in encodes:
            raise ModelError(
                f"config.json: {key} {raw[key]!r} makes an encoder, not a decoder; it writes no text"
            )
    for name in raw.get("architectures") or ():
        require(
            not str(name).endswith(NO_DECODERS),
            f"a {name:.80} judges texts, and writes none; take the causal model",
        )


def _require_family(raw: Raw) -> None:
    """Raises `ModelError` for a family that is not supported."""
    name = raw.get("model_type") or ""
    if isinstance(name, str) and name in FAMILIES:
        return
    named = f"model_type {name!r:.80}" if name else f"architectures {raw.get('architectures')!r:.80}"
    if isinstance(name, str) and name in UNSUPPORTED:
        raise ModelError(f"{named} is not supported: {UNSUPPORTED[name]}")
    raise ModelError(f"{named} is not a family that soothsay knows: {', '.join(FAMILIES)}")
