"""Families whose code comes with their weights: relatives of families that transformers has, renamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, array, load, random_oracle, random_tokens, run, write_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay import LLM, ModelError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.model.families.parsing import parse_model_config

Weights = dict[str, Tensor]
Renaming = Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]


def renamed(weights: Weights, names: dict[str, str]) -> Weights:
    """Weights with parts of their names replaced."""
    return {re.sub("|".join(names), lambda m: names[m[0]], name): tensor for name, tensor in weights.items()}


def fused(weights: Weights, name: str, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Weights:
    """Weights whose queries, keys and values are one matrix of this name."""
    found = dict(weights)
    for key in weights:
        if key.endswith("q_proj.weight"):
            stem = key.removesuffix("q_proj.weight")
            parts = [found.pop(f"{stem}{part}_proj.weight") for part in "qkv"]
            found[f"{stem}{name}.weight"] = join(*parts)
    return found


def as_bailing(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    own = {
        **{"model_type": "bailing_moe", "num_experts": config["n_routed_experts"], "num_shared_experts": 1},
        **{"score_function": "sigmoid", "use_qkv_bias": False, "use_bias": False, "head_dim": 32},
        **{"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_parameters": None, "attention_bias": False},
        **{"n_routed_experts": None, "n_shared_experts": None},
    }
    names = {"self_attn": "attention", "o_proj": "dense", "embed_tokens": "word_embeddings"}
    names |= {
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
        "e_score_correction_bias": "expert_bias",
    }
    together = fused(weights, "query_key_value", lambda q, k, v: torch.cat([q, k, v]))
    return config | own, renamed(together, names)


def as_internlm2(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    kv, d = config["num_key_value_heads"], config["head_dim"]

    def by_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [part.view(kv, -1, d, part.shape[1]) for part in (q, k, v)]
        return torch.cat(heads, 1).flatten(0, 2)

    names = {
        "self_attn": "attention",
        "o_proj": "wo",
        "mlp": "feed_forward",
        "embed_tokens": "tok_embeddings",
    }
    names |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "lm_head": "output"}
    return config | {"model_type": "internlm2", "bias": False}, renamed(
        fused(weights, "wqkv", by_key_head), names
    )


def as_minicpm(config: dict[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    own = {
        **{"model_type": "minicpm", "scale_emb": config["embedding_multiplier"], "dim_model_base": 32},
        "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
    }
    return config | own, weights


SIZE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
CASES: dict[str, tuple[str, dict[str, Any], Renaming]] = {
    "bailing_moe": ("glm4_moe", {"attention_bias": False, "n_shared_experts": 1}, as_bailing),
    "internlm2": ("llama1", {"num_attention_heads": 4, "num_key_value_heads": 2}, as_internlm2),
    "minicpm": (
        "granite",
        {"attention_multiplier": 32**-0.5, "logits_scaling": 2.0, "tie_word_embeddings": True},
        as_minicpm,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_answers_are_those_of_the_relative(name: str, tmp_path: Path) -> None:
    relative, changes, rename = CASES[name]
    oracle = random_oracle(relative, **changes)
    oracle.save_pretrained(tmp_path / "usual")
    config = json.loads((tmp_path / "usual" / "config.json").read_text())
    config, weights = rename(config, load_file(tmp_path / "usual" / "model.safetensors"))
    (tmp_path / "own").mkdir()
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()}, tmp_path / "own" / "model.safetensors"
    )
    write_config(tmp_path / "own", config)
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    ours = run(load(tmp_path / "own"), [Rows(array(tokens), 0)])[0][0]
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (ours - expected).abs().max() < 1e-4
    assert expected.std() > 0.5
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = [*range(20)] * 2
    answers = [
        LLM(tmp_path / kind, dtype="float32", drafter=drafter, kv_tokens=512)
        .generate(prompt, greedy)
        .token_ids
        for kind, drafter in (("usual", "none"), ("own", "none"), ("own", "suffix"))
    ]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "bailing_moe", "norm_head": True}, "norm_head"),
        ({"model_type": "minicpm", "sparse_config": {"topk": 64}}, "sparse_config"),
        ({"model_type": "minicpm", "num_experts": 8}, "experts"),
    ],
)
def test_what_these_families_may_not_have(changes: dict[str, Any], told: str) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 256}
    with pytest.raises(ModelError, match=told):
        parse_model_config({**sizes, **changes})
