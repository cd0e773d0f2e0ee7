"""One table for each layout, from our modules to a checkpoint's tensors: to load by, and to write by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.drafters.head import Head
from soothsay.errors import DrafterError
from soothsay.model.rope import Rope

Names = Mapping[str, tuple[str, ...]]
"""Our module -> the tensors, less `.weight` and `.bias`, whose rows together are its. What stands in no table
is called as we call it."""

BLOCK: Names = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
"""Of a decoder block as Llama, Qwen2 and Qwen3 have it."""


def block_names(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """`BLOCK` below prefixes, which end in a dot or are empty."""
    return {ours + module: tuple(theirs + tensor for tensor in tensors) for module, tensors in BLOCK.items()}


def stored(names: Names, parameter: str) -> list[str]:
    """The tensors that `parameter` is made of."""
    module, _, kind = parameter.rpartition(".")
    return [f"{tensor}.{kind}" for tensor in names[module]] if module in names else [parameter]


def split(head: Head, names: Names, block: ModelConfig | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint with `names`: weights in bfloat16. `block` says how q, k and v divide.

    Raises `DrafterError` for a head that was made ready to serve: its weights are in its kernels' order.
    """
    for module in head.modules():
        served = not isinstance(module, nn.ModuleList | Rope) and not any(module.children())
        if served and not module.state_dict():
            raise DrafterError(f"this {head.method} head was made ready to serve: write it before `serve`")
    for name, value in head.state_dict().items():
        parts = stored(names, name)
        rows = [len(value) // len(parts)] * len(parts)
        if len(parts) == 3 and block is not None:
            rows = [heads * block.head_dim for heads in (block.num_heads, *[block.num_kv_heads] * 2)]
        if value.is_floating_point():
            value = value.to(torch.bfloat16)
        for part, tensor in zip(parts, value.cpu().split(rows), strict=True):
            yield part, tensor.contiguous()
