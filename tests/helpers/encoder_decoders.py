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
    "d_kv": 24,  # not the hidden size by the heads
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5_1.1": ("T5", {**T5, **UNTIED, "feed_forward_proj": "gated-gelu"}),  # FLAN-T5 too
    "ul2": ("T5", {**T5, **UNTIED, "feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", T5),
}


def random_sequence_oracle(name: str) -> Any:
    """Make a random model of transformers. All its weights affect its logits."""
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    oracle = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{family} {name}".encode()))
    if settings.get("tie_word_embeddings") is False:
        oracle.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, config.d_model))
    for key, parameter in oracle.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith("norm.weight"):
            value = 1 + 0.3 * noise
        elif key.endswith((".q.weight", ".k.weight")):  # nothing scales its scores
            value = noise * parameter.shape[-1] ** -0.5 * config.d_kv**-0.25 * 1.8
        elif "relative" in key:
            value = 3 * noise
        elif key.startswith("shared"):
            value = 0.3 * noise
        else:
            value = noise * parameter.shape[-1] ** -0.5 * 1.5
        parameter.data.copy_(value)
    return oracle.eval()


@torch.no_grad()
def oracle_logits(oracle: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """The logits after each token of a target, start tokens included: `[len(target), V]`."""
    inputs = torch.tensor([source])
    logits: Tensor = oracle(input_ids=inputs, decoder_input_ids=torch.tensor([target])).logits[0]
    return logits


@torch.no_grad()
def oracle_answer(oracle: Any, source: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, one after the other, whether one of them ends the answer or not."""
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}
    written: list[int] = oracle.generate(torch.tensor([source]), **asked)[0].tolist()
    return written[-count:]
