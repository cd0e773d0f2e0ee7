"""The order of a head's dimensions in the rows of queries and keys.

Kernels pair dimension i with i + d/2 and rotate all. Checkpoints may pair neighbours, or rotate a part
of each head. Scores stay the same if queries and keys change their order together. So the rows are reordered
while they load, and the dimensions that do not rotate turn by 0 (`soothsay.model.rope`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.config import ModelConfig


def qkv_order(config: ModelConfig) -> Tensor | None:
    """For each row of `attention.qkv`, its number in a checkpoint: `[(H_q + 2 H_kv) * d]` int64.

    With gates there are `H_q` heads more, after the queries.

    None if the order is the same.

    Example: heads of 8 dimensions, of which 4 rotate.

        checkpoint   0 1 2 3 | 4 5 6 7      pairs (0, 2), (1, 3)
        order        0 1 4 5   2 3 6 7      pairs (0, 2), (1, 3) rotate; (4, 6), (5, 7) turn by 0
        neighbours   0 2 4 5   1 3 6 7      pairs (0, 1), (2, 3) rotate
    """
    order, d, gates = head_order(config), config.head_dim, 0
    if config.gated_attention:  # the rows of each query are followed by those of its gate
        gates = config.num_heads
        order = torch.arange(d, device="cpu") if order is None else order
    if order is None:
        return None
    heads = torch.arange(config.num_heads, device="cpu")[:, None] * d
    keys = (2 * gates or config.num_heads) * d + torch.arange(config.num_kv_heads, device="cpu")[:, None] * d
    values = keys[-1] + d + torch.arange(config.num_kv_heads * d, device="cpu")
    gate_rows = (heads[:gates] * 2 + d + torch.arange(d, device="cpu")).flatten()
    queries = heads * 2 if gates else heads
    return torch.cat([(queries + order).flatten(), gate_rows, (keys + order).flatten(), values])


def delta_order(config: ModelConfig, module: str) -> Tensor | None:
    """For each row of a module of a layer that keeps a state, its number in a checkpoint of Qwen3-Next.

    There the rows of each key head's query, key, values and output gates stand together, and so do the gates
    of the heads that share it. llama.cpp keeps that order for gates alone. None: the order is the same.
    """
    c = config.delta
    if c is None or not config.family.startswith("qwen3_next"):
        return None
    group = c.value_heads // c.key_heads
    if module.endswith("attention.qkvz") and config.family == "qwen3_next":
        sizes = [c.key_size, c.key_size, group * c.value_size, group * c.value_size]
    elif module.endswith("attention.gates"):
        sizes = [group, group]
    else:
        return None
    rows = torch.arange(c.key_heads * sum(sizes), device="cpu").view(c.key_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])


def latent_order(config: ModelConfig, module: str) -> Tensor | None:
    """For each row of a module of latent attention, its number in a checkpoint. None: the order is the same.

    The rotated dimensions stand at the end of each query head, and of the rows of `attention.kv_a`.
    """
    order, latent = head_order(config), config.latent
    if (
        order is None
        or latent is None
        or not module.endswith(("attention.q", "attention.q_b", "attention.kv_a"))
    ):
        return None
    heads, still = (1, latent.rank) if module.endswith("kv_a") else (config.num_heads, latent.plain)
    head = torch.cat([torch.arange(still, device="cpu"), still + order])
    return (torch.arange(heads, device="cpu")[:, None] * len(head) + head).flatten()


def norm_order(config: ModelConfig, heads: int) -> Tensor | None:
    """For each weight of a norm of queries or keys, its number in a checkpoint: `[heads * d]` int64.

    `heads` are those that are normed together. None if the order is the same.
    """
    order = head_order(config)
    if order is None:
        return None
    return (torch.arange(heads, device="cpu")[:, None] * config.head_dim + order).flatten()


def head_order(config: ModelConfig) -> Tensor | None:
    """For each dimension of a head, its number in a checkpoint: `[d]` int64. None: the order is the same."""
    rotary_dim = config.rotary_dim or config.head_dim
    rotated = torch.arange(rotary_dim, device="cpu")
    first, second = rotated.view(-1, 2).t() if config.rotates_neighbours else rotated.view(2, -1)
    rest = torch.arange(rotary_dim, config.head_dim, device="cpu").view(2, -1)
    order = torch.cat([first, rest[0], second, rest[1]])
    return None if torch.equal(order, torch.arange(config.head_dim, device="cpu")) else order
