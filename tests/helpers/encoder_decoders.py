"""Tiny random encoder-decoders that `transformers` makes, and what they write."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 97
START, END = 0, 1
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 32,  # not the hidden size by the heads
    "d_ff": 80,
    "num_layers": 4,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-3,  # large enough to matter
    "decoder_start_token_id": START,
    "eos_token_id": END,
}
UNTIED = {"tie_word_embeddings": False}
PLACES = 80
PAD = 2
FIRST = 7
"""The first token of all answers of "bart", which is not drawn."""

BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 4,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": PLACES,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "forced_eos_token_id": None,
}
SCALED = {"scale_embedding": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5_1.1": ("T5", {**T5, **UNTIED, "feed_forward_proj": "gated-gelu"}),  # FLAN-T5 too
    "ul2": ("T5", {**T5, **UNTIED, "feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", {**T5, "d_kv": 24}),  # native kernels do not fit such heads
    "umt5": ("UMT5", T5),
    "bart": ("Bart", {**BART, "activation_function": "gelu"}),
    "mbart": ("MBart", {**BART, **SCALED, "activation_function": "gelu", "decoder_attention_heads": 4}),
    "marian": ("Marian", {**BART, **SCALED, "activation_function": "swish"}),
    "m2m_100": ("M2M100", {**BART, **SCALED, "activation_function": "relu"}),
    "pegasus": ("Pegasus", {**BART, **SCALED, "activation_function": "relu"}),
}


BART_CASES = {"bart": 0, "mbart": 5, "marian": 7, "m2m_100": 5, "pegasus": 6}
"""Seeds of random models that do not repeat themselves."""

SIZES = {
    ("q_proj.weight", "k_proj.weight"): 3.0,
    ("encoder_attn.out_proj.weight",): 0.2,
    ("self_attn.out_proj.weight",): 0.3,
    ("fc2.weight",): 3.0,
    ("lm_head.weight",): 1.0,
}
"""Standard deviations of what weights make of rows of ones, by ends of names: the last token decides most."""


TABLES = {**dict.fromkeys(BART_CASES, 0.06), "marian": 0.12}
"""Standard deviations of embeddings."""


def _size(name: str) -> float:
    return next((size for ends, size in SIZES.items() if name.endswith(ends)), 1.5)


def random_sequence_oracle(name: str, **changes: Any) -> Any:
    """Make a random model of transformers. All its weights affect its logits. `changes`: of its settings."""
    family, settings = CASES[name]
    settings = settings | changes
    config = getattr(transformers, f"{family}Config")(**settings)
    kind = "MTModel" if name == "marian" else "ForConditionalGeneration"
    oracle = getattr(transformers, f"{family}{kind}")(config)
    seed = zlib.crc32(f"{family} {name}".encode()) + BART_CASES.get(name, 0)
    generator = torch.Generator().manual_seed(seed)
    if settings.get("tie_word_embeddings") is False:
        oracle.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.d_model))
    for key, parameter in oracle.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith(("norm.weight", "layernorm_embedding.weight")):
            value = 1 + 0.3 * noise
        elif key.endswith("bias"):
            value = 0.05 * noise
        elif key.endswith((".q.weight", ".k.weight")):  # nothing scales its scores
            value = noise * parameter.shape[-1] ** -0.5 * config.d_kv**-0.25 * 1.8
        elif "relative" in key:
            value = 3 * noise
        elif "shared" in key or "embed_positions" in key:
            value = noise * (TABLES.get(name, 0.3) if "shared" in key else 0.3)
        else:
            value = noise * parameter.shape[-1] ** -0.5 * _size(key)
        if parameter.requires_grad:  # waves of positions do not
            parameter.data.copy_(value)
    if name in BART_CASES:
        oracle.model.shared.weight.data[PAD] = 0  # so that no answer has padding, whose position is another
    if (bias := getattr(oracle, "final_logits_bias", None)) is not None:
        bias.copy_(0.05 * torch.randn(bias.shape, generator=generator))
    if name == "bart":
        oracle.generation_config.forced_bos_token_id = FIRST
    return oracle.eval()


@torch.no_grad()
def oracle_logits(oracle: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """The logits after each token of a target, start tokens included: `[len(target), V]`."""
    inputs = torch.tensor([source])
    logits: Tensor = oracle(input_ids=inputs, decoder_input_ids=torch.tensor([target])).logits[0]
    return logits


@torch.no_grad()
def oracle_answer(oracle: Any, source: Sequence[int], count: int, **own: Any) -> list[int]:
    """The likeliest tokens, one after the other, whether one of them ends the answer or not."""
    inputs, first = torch.tensor([source]), count + (oracle.generation_config.forced_bos_token_id is not None)
    asked = {"max_new_tokens": first, "min_new_tokens": first, "do_sample": False, "eos_token_id": None}
    if oracle.config.model_type == "marian":
        asked["bad_words_ids"] = [[PAD]]  # as published files have it
    written = oracle.generate(inputs, attention_mask=torch.ones_like(inputs), **asked, **own)[0].tolist()
    return [*written[-count:]]
