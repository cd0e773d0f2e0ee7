"""The order of a head's dimensions in the rows of queries and keys.

Kernels pair dimension i with i + d/2 and rotate all. Checkpoints may pair neighbours, or rotate a part
of each head. Scores stay the same if queries and keys change their order together. So the rows are reordered
while they load, and the dimensions that do not rotate turn by 0 (`soothsay.model.rope`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.model_spec import MixerSpec
from soothsay.model.specs.rope_spec import HeadRotation
from soothsay.model.specs.state_specs import DeltaSpec


def row_order(spec: MixerSpec | None, module: str) -> Tensor | None:
    """For each row of a module of a mixer, its number in a checkpoint; None if the order is the same."""
    match spec:
        case AttentionSpec() if module == "qkv":
            return qkv_order(spec)
        case AttentionSpec() if module in ("q_norm", "k_norm") and spec.norms is not None:
            heads = spec.heads if module == "q_norm" else spec.kv_heads
            return _all_heads(spec.rotation, heads if spec.norms.over_heads else 1)
        case LatentSpec() if module in ("q", "q_b"):
            return _all_heads(spec.rotation, spec.heads, spec.plain)
        case LatentSpec() if module == "kv_a":
            return _all_heads(spec.rotation, 1, spec.rank)
        case DeltaSpec() if module in spec.by_key_head:
            return _delta_order(spec, module)
    return None


def qkv_order(spec: AttentionSpec) -> Tensor | None:
    """For each row of `attention.qkv`, its number in a checkpoint: `[(H_q + 2 H_kv) * d]` int64.

    With gates there are `H_q` heads more, after the queries.

    None if the order is the same.

    Example: heads of 8 dimensions, of which 4 rotate.

        checkpoint   0 1 2 3 | 4 5 6 7      pairs (0, 2), (1, 3)
        order        0 1 4 5   2 3 6 7      pairs (0, 2), (1, 3) rotate; (4, 6), (5, 7) turn by 0
        neighbours   0 2 4 5   1 3 6 7      pairs (0, 1), (2, 3) rotate
    """
    order, d, gates = head_order(spec.rotation), spec.size, 0
    if spec.gated:  # the rows of each query are followed by those of its gate
        gates = spec.heads
        order = torch.arange(d, device="cpu") if order is None else order
    if order is None:
        return None
    heads = torch.arange(spec.heads, device="cpu")[:, None] * d
    keys = (2 * gates or spec.heads) * d + torch.arange(spec.kv_heads, device="cpu")[:, None] * d
    values = keys[-1] + d + torch.arange(spec.kv_heads * d, device="cpu")
    gate_rows = (heads[:gates] * 2 + d + torch.arange(d, device="cpu")).flatten()
    queries = heads * 2 if gates else heads
    return torch.cat([(queries + order).flatten(), gate_rows, (keys + order).flatten(), values])


def _delta_order(spec: DeltaSpec, module: str) -> Tensor:
    """For each row of `qkvz` or `gates`, its number in a checkpoint of Qwen3-Next.

    There the rows of each key head's query, key, values and output gates stand together, and so do the gates
    of the heads that share it. llama.cpp keeps that order for gates alone.
    """
    group = spec.value_heads // spec.key_heads
    values = group * spec.value_size
    sizes = [spec.key_size, spec.key_size, values, values] if module == "qkvz" else [group, group]
    rows = torch.arange(spec.key_heads * sum(sizes), device="cpu").view(spec.key_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])


def _all_heads(rotation: HeadRotation, heads: int, still: int = 0) -> Tensor | None:
    """For each row of some heads, its number in a checkpoint; None if the order is the same.

    The first `still` rows of a head stay in their places.
    """
    order = head_order(rotation)
    if order is None:
        return None
    head = torch.cat([torch.arange(still, device="cpu"), still + order])
    return (torch.arange(heads, device="cpu")[:, None] * len(head) + head).flatten()


def head_order(rotation: HeadRotation) -> Tensor | None:
    """For each dimension of a head, its number in a checkpoint: `[d]` int64. None: the order is the same."""
    size, rotary_dim = rotation.size, rotation.rotated or rotation.size
    rotated = torch.arange(rotary_dim, device="cpu")
    first, second = rotated.view(-1, 2).t() if rotation.neighbours else rotated.view(2, -1)
    rest = torch.arange(rotary_dim, size, device="cpu").view(2, -1)
    order = torch.cat([first, rest[0], second, rest[1]])
    return None if torch.equal(order, torch.arange(size, device="cpu")) else order
