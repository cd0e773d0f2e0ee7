"""GGUF files (llama.cpp's format) as a Hugging Face checkpoint: its keys, names, shapes and row order.

What a key or a tensor means here is what llama.cpp's converter writes and its runtime computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.checkpoint import Reader
from soothsay.model.gguf_tokenizer import build_tokenizer, stop_ids
from soothsay.tokenizer import Tokenizer

FAMILIES = {
    "llama": "llama",  # Mistral's files too; Mixtral's have experts
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_DIVISORS = "rope_freqs.weight"

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILY_NAMES = {  # {} stands for the expert
    "gemma2": _GEMMA_NAMES,
    "gemma3_text": _GEMMA_NAMES,
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
}


class GGUFCheckpoint:
    """One `.gguf` file with weights in F32, F16, BF16 or Q8_0.

    Raises `ModelError` where the file is missing or damaged, or holds what soothsay cannot compute.
    """

    def __init__(self, path: Path):
        self.path = path
        self._metadata, stored = _read_header(path)
        header = _Header(path, self._metadata)
        divisors = stored.pop(ROPE_DIVISORS, None)
        self.config: dict[str, Any] = _config(header, stored)
        scaling = _rope_scaling(header, None if divisors is None else divisors.read(_map(path)), self.config)
        if scaling:
            self.config["rope_scaling"] = scaling
        self._tensors = _rename(header, stored, self.config)
        self.eos_ids = stop_ids(self._metadata)

    def names(self) -> frozenset[str]:
        """Names of all tensors, as Hugging Face writes them."""
        return frozenset(self._tensors)

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """A function from a name to its tensor `[out, in]`, a view of the mapped file unless values have to
        be computed (Q8_0, Gemma's norms) or rows put in order (q and k of Llama)."""
        mapped = [_map(self.path)]

        def read(name: str) -> Tensor:
            return self._tensors[name].read(mapped[0])

        try:
            yield read
        finally:
            mapped.clear()  # `read` may live on, but must not keep the file mapped

    def stored(self) -> Iterator[tuple[str, int]]:
        """Of each tensor, GGML's name of its element type and its number of elements."""
        for tensor in self._tensors.values():
            yield tensor.kind, math.prod(tensor.shape)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer inside the file, if any."""
        return build_tokenizer(self._metadata, self.path)


@dataclass(frozen=True)
class _Stored:
    """A tensor's place in the file, and what makes it the tensor that Hugging Face would store."""

    kind: str  # GGML's name of the element type
    shape: tuple[int, ...]  # [out, in]
    offset: int  # bytes
    size: int  # bytes
    heads: int = 0  # the rows of each of so many heads are interleaved for llama.cpp's rotation
    centred: bool = False  # a norm's w that is stored as 1 + w

    def expert(self, index: int) -> _Stored:
        """One matrix of a stack `[E, out, in]`."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, size=size)

    def read(self, file: npt.NDArray[np.uint8]) -> Tensor:
        """The tensor, from the bytes of the whole file."""
        data = file[self.offset : self.offset + self.size]
        if self.kind in DTYPES:
            tensor = torch.from_numpy(data).view(DTYPES[self.kind]).view(self.shape)
        else:
            rows = data.reshape(math.prod(self.shape[:-1]), -1)
            tensor = torch.from_numpy(dequantize(rows, GGMLQuantizationType[self.kind])).view(self.shape)
        if self.heads:  # rows (head, d/2, 2) -> (head, 2, d/2)
            tensor = tensor.view(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        return tensor.float() - 1 if self.centred else tensor


class _Header:
    """The metadata of one architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path, self.metadata = path, metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in FAMILIES:
            raise ModelError(
                f"{path} holds a model of architecture {self.architecture!r}; "
                f"the known ones are {', '.join(FAMILIES)}"
            )
        mixtral = self.architecture == "llama" and self.get("expert_count", 0) > 0
        self.family = "mixtral" if mixtral else FAMILIES[self.architecture]

    def get(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's prefix. A list of one value for each layer has to agree on it."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self.path}: {self.architecture}.{key} differs from layer to layer: {value}")
        return value[0]

    def require(self, key: str) -> Any:
        """A value that has to be there."""
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"{self.path} has no metadata {self.architecture}.{key}; "
                "convert the model again with a current llama.cpp"
            )
        return value


def _map(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of the file. Copy on write, since torch warns of views that it may not write to."""
    return np.memmap(path, dtype=np.uint8, mode="c")


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, _Stored]]:
    """Metadata and places of the tensors under GGUF's names. Nothing of it refers to the mapped file."""
    if not path.is_file():
        raise ModelError(f"{path} is missing; check the path, or download the file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file (it starts with {magic!r}); give a GGUF or a model directory"
        )
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); download it again") from error
    if reader.byte_order == "S":
        raise ModelError(
            f"{path} is written for a machine of the other byte order; convert the model again here"
        )
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts; join them with: "
            f"llama-gguf-split --merge {path.name} merged.gguf"
        )
    stored = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind not in DTYPES and kind != "Q8_0":
            raise ModelError(
                f"{path}: tensor {tensor.name!r} is of type {kind}; only {', '.join(DTYPES)} and Q8_0 are "
                "supported, so take another file of this model or convert it with --outtype q8_0"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored[str(tensor.name)] = _Stored(kind, shape, int(tensor.data_offset), int(tensor.n_bytes))
    return metadata, stored


def _config(header: _Header, stored: Mapping[str, _Stored]) -> dict[str, Any]:
    """The keys of config.json, all but the scaling of the rotation."""
    if "token_embd.weight" not in stored:
        raise ModelError(
            f"{header.path} has no tensor 'token_embd.weight'; is it a whole model, not an adapter?"
        )
    family, get, require = header.family, header.get, header.require
    hidden, heads = require("embedding_length"), require("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelError(
                f"{header.path}: {key} {get(key)} is not the size of a head, {head_dim}: not supported"
            )
    config = {
        "model_type": family,
        "vocab_size": stored["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": require("feed_forward_length"),
        "num_hidden_layers": require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": require("context_length"),
        "rms_norm_eps": require("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 1e6 if family == "gemma3_text" else 1e4),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in stored,
    }
    if family in ("mixtral", "qwen3_moe"):
        used = require("expert_used_count")
        config |= {"num_local_experts": require("expert_count"), "num_experts_per_tok": used}
    if family == "qwen3_moe":
        size = get("expert_feed_forward_length", config["intermediate_size"] // used)
        config |= {"moe_intermediate_size": size, "norm_topk_prob": True}  # llama.cpp always normalizes
    return config | _gemma_config(header, config) if family.startswith("gemma") else config


def _gemma_config(header: _Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's own keys."""
    gemma2, get, layers = header.family == "gemma2", header.get, int(config["num_hidden_layers"])
    largest = layers == (46 if gemma2 else 62)  # 27B; the file does not state the scale of attention
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": get("attention.sliding_window", 4096 if gemma2 else None),
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0 if gemma2 else None),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0 if gemma2 else None),
    }
    if not gemma2:
        own["rope_local_base_freq"] = get("rope.freq_base_swa", 1e4)
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if pattern is not None:  # every n-th layer sees everything, or a list: is this layer local?
        local = (
            pattern
            if isinstance(pattern, list)
            else [not pattern or (i + 1) % pattern for i in range(layers)]
        )
        own["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in local]
    return own


def _rope_scaling(header: _Header, divisors: Tensor | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping `rope_scaling`, empty where nothing is scaled."""
    kind = header.get("rope.scaling.type", "linear")
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear") or 1.0  # new and old key
    unscaled = kind == "none" or (kind == "linear" and factor == 1)
    if divisors is not None and unscaled:
        scaling = _llama3_scaling(divisors.double().numpy(), config["rope_theta"])
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
        given = {name: header.get(f"rope.scaling.{key}") for name, key in keys.items()}
        if (
            multiplier := header.get("rope.scaling.attn_factor", 1.0)
        ) != 1.0:  # llama.cpp's, on top of the usual
            given["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
        scaling |= {name: value for name, value in given.items() if value is not None}
    return scaling


def _llama3_scaling(divisors: npt.NDArray[np.float64], theta: float) -> dict[str, Any] | None:
    """Llama 3's parameters from the `[d / 2]` divisors of the frequencies that they lead to, None if none do.

    A divisor is 1 / (keep + (1 - keep) / factor); keep goes from 0 to 1 as a wave's turns over the original
    context go from `low` to `high`. That context only sets the unit of turns, so Llama's own, 8192, will do.
    """
    factor, context = float(divisors.max()), 8192
    if factor == 1:
        return {}
    turns = context * theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    bounds = [(1.0, 4.0)]
    between = (keep > 1e-3) & (keep < 1 - 1e-3)
    if between.sum() >= 2:  # two points make the line
        slope, start = np.polyfit(turns[between], keep[between], 1)
        bounds.append((float(-start / slope), float((1 - start) / slope)))
    for low, high in bounds:
        if np.allclose(np.clip((turns - low) / (high - low), 0, 1), keep, atol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return None


def _rename(header: _Header, stored: Mapping[str, _Stored], config: Mapping[str, Any]) -> dict[str, _Stored]:
    """Tensors under Hugging Face's names, with what has to be undone in reading them."""
    block_names = _BLOCK_NAMES | _FAMILY_NAMES.get(header.family, {})
    interleaved = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    renamed: dict[str, _Stored] = {}
    for name, tensor in stored.items():
        stem, _, suffix = name.rpartition(".")
        outer, _, inner = stem.partition(".")
        layer, _, part = inner.partition(".")
        target = block_names.get(part) if outer == "blk" else _OUTER_NAMES.get(stem)
        if target is None or suffix not in ("weight", "bias"):
            raise ModelError(f"{header.path}: {header.family} as soothsay knows it has no tensor {name!r}")
        if header.architecture == "llama" and part in interleaved:
            tensor = replace(tensor, heads=int(config[interleaved[part]]))
        if header.family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = replace(tensor, centred=True)
        full = f"model.layers.{layer}.{target}.{suffix}" if outer == "blk" else f"{target}.{suffix}"
        if "{}" in full:
            renamed |= {full.format(e): tensor.expert(e) for e in range(tensor.shape[0])}
        else:
            renamed[full] = tensor
    return renamed
