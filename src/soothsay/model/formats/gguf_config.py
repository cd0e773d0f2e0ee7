"""The metadata of a GGUF file as the keys of a Hugging Face config.json.

Keys mean what llama.cpp's converter writes and its runtime computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.core.arrays import FloatArray
from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_LAYERS

FAMILIES = {
    "llama": "llama",  # Mistral's files too; Mixtral's have experts
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen2vl": "qwen2",  # text has one position in all three axes
    "qwen3vl": "qwen3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "granitemoe": "granitemoe_gguf",
    "granitehybrid": "granitemoehybrid_gguf",
    "falcon-h1": "falcon_h1",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "olmo2": "olmo2",  # OLMo 3's files too, which have a sliding window
    "mistral3": "ministral3",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v3",  # V2's files too, which have no sigmoids
    "command-r": "cohere",
    "cohere2": "cohere2",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "llama4": "llama4_text",
    "minimax-m2": "minimax_m2",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "qwen3next": "qwen3_next_gguf",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
ROPE_DIVISORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
"""Tensors with the factors of longrope, and their keys in a `rope_scaling`."""

MAX_FACTORS = 2**15
"""Limit of the factors in a tensor: a head has at most twice as many dimensions."""


ROTATES_PART = (
    "phi3",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next_gguf",
)
"""Families of which `rope.dimension_count` may be less than the size of a head."""


class Header:
    """The metadata of a file, looked up under its architecture's prefix."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path, self.metadata = path, metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in FAMILIES:
            raise ModelError(
                f"{path} holds a model of architecture {self.architecture!r}; "
                f"the known ones are {', '.join(FAMILIES)}"
            )
        self.family = FAMILIES[self.architecture]
        if self.family == "llama" and self.number("expert_count", 0) > 0:
            self.family = "mixtral"
        if self.family == "olmo2" and self.number("attention.sliding_window", 0) > 0:
            self.family = "olmo3"

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or `default`. Raises `ModelError` for a list whose values differ between layers."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, list | np.ndarray):
            return value
        values = list(value) if isinstance(value, list) else value.tolist()
        if len(set(values)) != 1:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} differs from layer to layer: {values!r:.80}"
            )
        return values[0]

    def number(self, key: str, default: Any = None) -> Any:
        """A value that is a number above 0, or `default`. Raises `ModelError` for another one."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is {value!r:.80} and should be a number; "
                "the file is damaged"
            )
        return value

    def layers(self, key: str, count: int) -> list[int]:
        """A whole number for each of `count` layers. Raises `ModelError` for another value."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        values = values if isinstance(values, list) else [values] * min(count, MAX_LAYERS)
        if len(values) != count or not all(isinstance(n, int) and 0 <= n < 2**31 for n in values):
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} {value!r:.80} of {count} layers is damaged"
            )
        return values

    def experts(self) -> dict[str, Any]:
        """The keys of config.json for routed experts, under the names that most families have."""
        count = self.require("expert_count")
        return {
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": self.require("expert_used_count"),
            "moe_intermediate_size": self.require("expert_feed_forward_length"),
        }

    def require(self, key: str) -> Any:
        """A number. Raises `ModelError` if it is missing."""
        value = self.number(key)
        if value is None:
            raise ModelError(
                f"{self.path} has no metadata {self.architecture}.{key}; "
                "convert the model again with a current llama.cpp"
            )
        return value


def read_config(header: Header, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The keys of config.json that most families have, without `rope_scaling`.

    `shapes` are those of the tensors by GGUF's names.
    """
    if "token_embd.weight" not in shapes:
        raise ModelError(
            f"{header.path} has no tensor 'token_embd.weight'; is it a whole model, not an adapter?"
        )
    family, get, require = header.family, header.number, header.require
    hidden, heads = require("embedding_length"), require("attention.head_count")
    if heads < 1:
        raise ModelError(f"{header.path}: attention.head_count is {heads}; the file is damaged")
    head_dim, rotated = _head_sizes(header, hidden // heads)
    layers = require("block_count")
    varied = family in (
        "gemma4_text",
        "lfm2",
        "lfm2_moe",
        "granitemoehybrid_gguf",
        "nemotron_h",
    )  # whose layers have sizes of their own
    config = {
        "model_type": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": min(header.layers("feed_forward_length", layers), default=0)
        if varied
        else get("feed_forward_length", get("expert_feed_forward_length")) or require("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if varied else get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": require("context_length"),
        **_norm_eps(header),
        "rope_theta": get("rope.freq_base", 1e6 if family in ("gemma3_text", "gemma3n_text") else 1e4),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "is_causal": header.metadata.get(f"{header.architecture}.attention.causal", True) is not False,
    }
    if family in ROTATES_PART:
        config["partial_rotary_factor"] = rotated / head_dim
    if family in ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "minimax_m2", "granitemoe_gguf"):
        used = require("expert_used_count")
        config |= {"num_local_experts": require("expert_count"), "num_experts_per_tok": used}
    if family == "qwen3_moe":
        size = get("expert_feed_forward_length", config["intermediate_size"] // max(used, 1))
        config |= {"moe_intermediate_size": size, "norm_topk_prob": True}  # llama.cpp always normalizes
    if family == "minimax_m2":
        config["rotary_dim"] = rotated
    if family in ("gpt_oss", "minimax_m2"):
        config["intermediate_size"] = get("expert_feed_forward_length", config["intermediate_size"])
    return config


def _head_sizes(header: Header, usual: int) -> tuple[int, int]:
    """The dimensions of a head, and those that rotate. `usual`: of a head, where the file has none.

    Latent attention has sizes of its own: only the dimensions that rotate count here.
    """
    get = header.number
    if header.family == "deepseek_v3":
        return (header.require("rope.dimension_count"),) * 2
    head_dim = get("attention.key_length", usual)
    if header.family == "nemotron_h":  # nothing rotates, whatever the file says
        return head_dim, head_dim
    rotated = get("rope.dimension_count", head_dim)
    checked = ("attention.value_length", "rope.dimension_count")
    for key in checked[:1] if header.family in ROTATES_PART and rotated <= head_dim else checked:
        if get(key, head_dim) != head_dim:
            raise ModelError(
                f"{header.path}: {key} {get(key)} is not the size of a head, {head_dim}: not supported"
            )
    return head_dim, rotated


def _norm_eps(header: Header) -> dict[str, Any]:
    """The epsilon of norms. Some converters write it under the key of the other kind of norms."""
    own, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    keys = {"lfm2": "norm_eps", "lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
    if header.family.startswith("cohere"):
        own, other, keys = other, own, {header.family: "layer_norm_eps"}
    key, given = keys.get(header.family, "rms_norm_eps"), header.number(own, header.number(other))
    return {key: header.require(own) if given is None else given}


def read_rope_scaling(
    header: Header, divisors: Tensor | None, factors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The mapping `rope_scaling` of config.json, empty without scaling.

    Args:
        header: of the file.
        divisors: those of the frequencies, `[d / 2]`, if the file has them.
        factors: longrope's, by their keys in the mapping.
        config: the other keys of config.json.
    """
    if factors:
        return _longrope(header, factors)
    kind = header.get("rope.scaling.type", "linear")
    # the new key, then the old one
    factor = header.number("rope.scaling.factor") or header.number("rope.scale_linear") or 1.0
    unscaled = kind == "none" or (kind == "linear" and factor == 1)
    if divisors is not None and unscaled:
        found = divisors.double().numpy()
        possible = found.ndim == 1 and bool(np.isfinite(found).all() and (found > 0).all())
        with np.errstate(all="ignore"):
            scaling = _llama3_scaling(found, config["rope_theta"]) if possible else None
        if scaling is None:
            raise ModelError(
                f"{header.path}: no scaling of Llama 3's kind gives the divisors in {ROPE_DIVISORS!r}; "
                "load the model from its Hugging Face directory instead"
            )
        return scaling
    if unscaled:
        return {}
    if divisors is not None or kind not in ("linear", "yarn"):
        also = f" with {ROPE_DIVISORS!r}" if divisors is not None else ""
        raise ModelError(
            f"{header.path}: rope.scaling.type {kind!r}{also} is not supported, only linear and yarn"
        )
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        keys = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given = {name: header.number(f"rope.scaling.{key}") for name, key in keys.items()}
        multiplier = header.number("rope.scaling.attn_factor", 1.0)
        if multiplier != 1.0:  # llama.cpp multiplies its default by it
            given["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
        given |= _ministral_scaling(header) if header.family == "ministral3" else {}
        given |= _latent_scaling(header) if header.family == "deepseek_v3" else {}
        given |= {"truncate": False} if header.family == "gpt_oss" else {}  # as trained; llama.cpp rounds
        scaling |= {name: value for name, value in given.items() if value is not None}
    return scaling


def _ministral_scaling(header: Header) -> dict[str, Any]:
    multiplier = header.number("rope.scaling.yarn_log_multiplier")
    return {
        "llama_4_scaling_beta": header.number("attention.temperature_scale"),
        "mscale": None if multiplier is None else 1.0,
        "mscale_all_dim": multiplier,
    }


def _latent_scaling(header: Header) -> dict[str, Any]:
    """The file has a tenth of mscale_all_dim alone; mscale equals it in all of these models."""
    multiplier = header.number("rope.scaling.yarn_log_multiplier")
    mscale = None if multiplier is None else round(10 * multiplier, 6)
    return {"mscale": mscale, "mscale_all_dim": mscale}


def _longrope(header: Header, factors: Mapping[str, Tensor]) -> dict[str, Any]:
    if any(values.ndim != 1 or len(values) > MAX_FACTORS for values in factors.values()):
        raise ModelError(
            f"{header.path}: the factors of longrope are no lists for a head; the file is damaged"
        )
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": header.require("rope.scaling.original_context_length"),
        **{key: values.tolist() for key, values in factors.items()},
    }


def _llama3_scaling(divisors: FloatArray, theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling parameters from the divisors of the frequencies, `[d / 2]`; None if none fit.

    A divisor is 1 / (keep + (1 - keep) / factor). `keep` rises from 0 to 1 as the turns of a wave over the
    original context rise from `low` to `high`. The context only sets the unit of turns, so Llama's 8192 does.
    """
    factor, context = float(divisors.max()), 8192
    if factor == 1:
        return {}
    turns = context * theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    steps = turns[keep < 0.5], turns[keep >= 0.5]
    bounds = [(1.0, 4.0)]
    between = (keep > 1e-3) & (keep < 1 - 1e-3)
    if between.sum() >= 2:  # two points define the line
        slope, start = np.polyfit(turns[between], keep[between], 1)
        bounds.append((float(-start / slope), float((1 - start) / slope)))
    elif all(map(len, steps)):  # no wave is between: both bounds are one
        bounds.append((float(steps[0].max() + steps[1].min()) / 2,) * 2)
    for low, high in bounds:
        risen = (turns - low) / (high - low) if low < high else turns >= low
        if np.allclose(np.clip(risen, 0, 1), keep, atol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return None
