"""Models of a given shape with random weights, to measure the time of a pass without a real model."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay import ModelError, Tokenizer
from soothsay.bench.grown_tensors import SHAPES, read_sizes
from soothsay.model.formats.weight_format import Reader

Sizes = dict[str, tuple[int, ...]]

_NOISE = 1_000_003
"""Number of random values that all tensors share. A prime, so that no row is a copy of another."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama. The default has 1.1B parameters, 1.03B of them in linear layers.

    With experts, they are those of a Mixtral. With `state_heads`, they are those of a Qwen3.5: three of four
    layers keep a state in place of keys and values.
    """

    layers: int = 22
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    ffn: int = 5632  # of one expert, if there are any
    vocab: int = 32_000
    experts: int = 0  # of each layer; 0: it is dense
    chosen: int = 0  # experts of a row
    state_heads: int = 0  # heads of size 128 of layers that keep a state; 0: all layers have attention

    @property
    def dense(self) -> LlamaShape:
        """The shape whose dense layers have as many weights as a row's experts."""
        return replace(self, ffn=self.ffn * max(self.chosen, 1), experts=0, chosen=0)

    @classmethod
    def parse(cls, text: str) -> LlamaShape:
        """Parse `"1.1B"`, `"hybrid"`, the name of a shape that models are grown to, or sizes such as
        `"layers=22,hidden=2048"`.

        Sizes that are not given are those of 1.1B.

        Raises `ModelError` for an unknown name, and for impossible numbers.
        """
        if text == "1.1B":
            return cls()
        if text == "hybrid":
            return cls(layers=20, hidden=2048, heads=8, kv_heads=2, ffn=6144, state_heads=16)
        if text in SHAPES:
            size = SHAPES[text]
            return cls(size.layers, size.hidden, size.heads, size.kv_heads, size.intermediate)
        example = ",".join(f"{key}={value}" for key, value in asdict(cls()).items() if value)
        names = [field.name for field in fields(cls)]
        known = ", ".join(("1.1B", "hybrid", *SHAPES))
        shape = replace(cls(), **read_sizes(text, names, f"{known}, or {example}"))
        if shape.hidden % shape.heads or shape.heads % shape.kv_heads or shape.hidden // shape.heads % 2:
            raise ModelError(
                f"shape {text!r}: {shape.heads} heads have to share {shape.hidden} evenly, "
                f"an even number each, and {shape.kv_heads} key-value heads have to share them"
            )
        if shape.chosen > shape.experts or (shape.experts and not shape.chosen):
            raise ModelError(f"shape {text!r}: {shape.chosen} of {shape.experts} experts cannot be chosen")
        if shape.state_heads and shape.experts:
            raise ModelError(f"shape {text!r}: layers with states do not go with experts here")
        return shape


class RandomCheckpoint:
    """A Llama, Mixtral or Qwen3.5 with an untied head and random bfloat16 weights.

    They are made when they are read. They have the standard deviation `1 / sqrt(in)`, and norms scale by 1,
    so that values neither grow nor vanish from layer to layer. Equal seeds give equal weights, in any order
    of reading, on any device.

    Args:
        shape: the sizes.
        seed: of the weights.
        device: where the weights are made.
    """

    def __init__(self, shape: LlamaShape, seed: int = 0, device: torch.device | str = "cpu"):
        mixed = f"-{shape.experts}x{shape.ffn}" if shape.experts else ""
        kind = "hybrid" if shape.state_heads else "random"
        self.path = Path(f"{kind}-{shape.layers}x{shape.hidden}{mixed}")
        self.files, self.eos_ids = tuple[Path, ...](), tuple[int, ...]()
        self.config: dict[str, Any] = {
            "model_type": "qwen3_5_text" if shape.state_heads else "mixtral" if shape.experts else "llama",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "intermediate_size": shape.ffn,
            "vocab_size": shape.vocab,
            "max_position_embeddings": 32_768,
            **({"num_local_experts": shape.experts, "num_experts_per_tok": shape.chosen} if mixed else {}),
        }
        if shape.state_heads:
            kinds = "full_attention", "linear_attention"
            heads = "linear_num_key_heads", "linear_num_value_heads"
            self.config["layer_types"] = [kinds[_keeps_state(shape, i)] for i in range(shape.layers)]
            self.config["head_dim"] = shape.hidden // shape.heads
            self.config |= dict.fromkeys(heads, shape.state_heads)
        self._zero_norms, self._shapes = bool(shape.state_heads), _tensors(shape)
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(_NOISE, generator=generator).bfloat16().to(device)

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._shapes)

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """A function from a name to its tensor, a new one at each call."""
        yield self._make

    def stored(self) -> Iterator[tuple[str, int]]:
        """The dtype and the number of elements of each tensor."""
        for shape in self._shapes.values():
            yield "bfloat16", math.prod(shape)

    def weight_format(self) -> None:
        """None: all weights are plain."""

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return 2 * self.most_weights()

    def most_weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(count for _, count in self.stored())

    def sampling_defaults(self) -> dict[str, float]:
        """There are none."""
        return {}

    def tokenizer(self) -> Tokenizer | None:
        """None: there is no tokenizer."""
        return None

    def _make(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            plain = not self._zero_norms or name.endswith(("linear_attn.norm.weight", "dt_bias"))
            return torch.full(shape, float(plain), dtype=torch.bfloat16, device=self._noise.device)
        noise: Tensor = self._noise.roll(zlib.crc32(name.encode())) * math.prod(shape[1:]) ** -0.5
        count = math.prod(shape)
        return noise.repeat(-(-count // _NOISE))[:count].view(shape)


def _tensors(shape: LlamaShape) -> Sizes:
    """Names and shapes `[out, in]`, as Hugging Face writes a Llama, a Mixtral or a Qwen3.5."""
    keys = shape.hidden // shape.heads * shape.kv_heads
    inner, outer = (shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
    feed_forward = {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": outer}
    if shape.experts:
        mixture, parts = "block_sparse_moe", {"w1": inner, "w3": inner, "w2": outer}
        names = product(range(shape.experts), parts)
        feed_forward = {f"{mixture}.experts.{expert}.{part}": parts[part] for expert, part in names}
        feed_forward[f"{mixture}.gate"] = (shape.experts, shape.hidden)
    around: Sizes = {
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
        **{f"{name}.weight": size for name, size in feed_forward.items()},
    }
    queries = (shape.hidden * (2 if shape.state_heads else 1), shape.hidden)  # and gates
    attention: Sizes = {
        "self_attn.q_proj.weight": queries,
        "self_attn.k_proj.weight": (keys, shape.hidden),
        "self_attn.v_proj.weight": (keys, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, shape.hidden),
    }
    if shape.state_heads:
        attention |= {f"self_attn.{n}_norm.weight": (shape.hidden // shape.heads,) for n in "qk"}
    return {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocab, shape.hidden),
        **{
            f"model.layers.{i}.{name}": size
            for i in range(shape.layers)
            for name, size in {**(_rule(shape) if _keeps_state(shape, i) else attention), **around}.items()
        },
    }


def _keeps_state(shape: LlamaShape, layer: int) -> bool:
    return shape.state_heads > 0 and layer % 4 != 3


def _rule(shape: LlamaShape) -> Sizes:
    """The gated delta rule in a layer of Qwen3.5."""
    heads, size = shape.state_heads, 128
    parts: Sizes = {
        "in_proj_qkv.weight": (3 * heads * size, shape.hidden),
        "in_proj_z.weight": (heads * size, shape.hidden),
        "in_proj_b.weight": (heads, shape.hidden),
        "in_proj_a.weight": (heads, shape.hidden),
        "conv1d.weight": (3 * heads * size, 1, 4),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (size,),
        "out_proj.weight": (shape.hidden, heads * size),
    }
    return {f"linear_attn.{name}": shape for name, shape in parts.items()}
