"""Tables of names: for each layout, the tensors that make up each of our modules. Read and written by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.rope import Rope

Names = Mapping[str, tuple[str, ...]]
"""Our module -> names of tensors without `.weight` and `.bias`. Their rows, concatenated, are the module's. A
module that is not in the table has our name in the file. Where one parameter has a name of its own, the entry
is the full name of the parameter -> that of the tensor."""

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
"""The table of a decoder block of Llama, Qwen2 or Qwen3."""


def block_names(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """`BLOCK` with prefixes. Each prefix ends in a dot or is empty."""
    return {ours + module: tuple(theirs + tensor for tensor in tensors) for module, tensors in BLOCK.items()}


def stored(names: Names, parameter: str) -> list[str]:
    """Names of the tensors that make up `parameter`."""
    if parameter in names:
        return [*names[parameter]]
    module, _, kind = parameter.rpartition(".")
    return [f"{tensor}.{kind}" for tensor in names[module]] if module in names else [parameter]


def split(head: Head, names: Names, block: ModelConfig | None = None) -> Iterator[tuple[str, Tensor]]:
    """Split a head into the tensors of a checkpoint, weights in bfloat16.

    Args:
        head: a head that was not made ready to serve.
        names: the layout's table.
        block: the sizes of queries, keys and values, for heads with attention.

    Raises:
        DrafterError: the head was made ready to serve, so its weights are in its kernels' order.
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
