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

_FUNCTIONS: tuple[Callable[[Raw], ModelSpec], ...] = (
    *(llama.exaone, llama.phi3, llama.mistral, llama.ministral, llama.ministral3, llama.internlm3),
    *(llama.helium, llama.cwm, llama.smollm3, llama.glm, llama.gpt_oss, llama.llama4_text, llama.cohere),
    *(llama.cohere2, llama.ernie4_5, llama.seed_oss, llama.exaone4, llama.olmo2, llama.olmo3),
    *(llama.apertus, llama.arcee, llama.bitnet, llama.internlm2, llama.hunyuan_v1_dense, llama.glm4),
    *(qwen.qwen2, qwen.qwen3, qwen.qwen3_vl_text, qwen.qwen2_moe, qwen.qwen3_moe, qwen.qwen3_vl_moe_text),
    *(qwen.qwen3_next, qwen.qwen3_next_gguf, qwen.qwen2_vl, qwen.qwen3_5, qwen.qwen3_5_moe),
    *(gemma.gemma, gemma.gemma2, gemma.vaultgemma, gemma.gemma3_text, gemma.gemma3n_text),
    *(gemma.gemma4_text, gemma.gemma4_unified_text),
    *(mixtures.mixtral, mixtures.phimoe, mixtures.minimax_m2, mixtures.ernie4_5_moe, mixtures.exaone_moe),
    *(mixtures.olmoe, mixtures.hunyuan_v1_moe, mixtures.hy_v3, mixtures.dots1, mixtures.solar_open),
    *(mixtures.mellum, mixtures.afmoe, mixtures.flex_olmo, mixtures.glm4_moe, mixtures.bailing_moe),
    *(deepseek.deepseek_v2, deepseek.kimi_linear, deepseek.glm4_moe_lite, deepseek.mistral4),
    *(deepseek.minicpm, deepseek.minicpm3, deepseek.deepseek_v3, deepseek.deepseek_v32, deepseek.glm_moe_dsa),
    *(hybrids.granite, hybrids.bamba, hybrids.falcon_h1, hybrids.nemotron_h, hybrids.mamba2),
    *(hybrids.mamba, hybrids.falcon_mamba, hybrids.jamba, hybrids.lfm2, hybrids.lfm2_moe),
    *(hybrids.granitemoe, hybrids.granitemoehybrid),
    *(classic.olmo, classic.starcoder2, classic.stablelm, classic.nemotron, classic.jais2, classic.phi),
    *(classic.gpt_neox, classic.gpt2, classic.gptj, classic.opt, classic.falcon),
    *(encoder_decoders.t5, encoder_decoders.mt5, encoder_decoders.umt5, encoder_decoders.bart),
    *(encoder_decoders.mbart, encoder_decoders.marian, encoder_decoders.m2m_100, encoder_decoders.pegasus),
)
FAMILIES: dict[str, Callable[[Raw], ModelSpec]] = {
    **dict.fromkeys(("llama", "iquestcoder"), llama_like),
    **{function.__name__: function for function in _FUNCTIONS},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), qwen.qwen2_vl),
    "qwen3_5_text": qwen.qwen3_5,
    "qwen3_5_moe_text": qwen.qwen3_5_moe,
    # granitemoe_gguf, granitemoehybrid_gguf: our own: gate and up are matrices of their own
    **dict.fromkeys(("granitemoeshared", "granitemoe_gguf"), hybrids.granitemoe),
    "granitemoehybrid_gguf": hybrids.granitemoehybrid,
    "glm_gguf": llama.glm,
    "glm4v_text": llama.glm4,
    "glm4v_moe_text": mixtures.glm4_moe,
    "kimi_k2": deepseek.deepseek_v3,
    **dict.fromkeys(("bailing_moe_v2", "bailing_moe_gguf"), mixtures.bailing_moe),
}
"""The function of each family, by `model_type`: most have this name."""

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
