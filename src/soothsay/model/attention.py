"""Attention over paged keys and values, for any mixture of prompts, single tokens and trees.

The reference, in stock operations, and exact: a row's result has the same bits whatever other rows, requests,
tree nodes or padding stand beside it, because every row meets the keys of its own path in order of position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soothsay.engine.batch import Batch
from soothsay.engine.paths import KEY_BLOCK


def attend(
    q: Tensor, kv: Tensor, batch: Batch, *, softcap: float | None = None, window: int | None = None
) -> Tensor:
    """Softmax attention of each row to its own path.

    Args:
        q: `[N, H_q, d]` float32 queries, rotated and scaled.
        kv: `[2 * H_kv, S, d]` one layer's keys and values, those of this pass included.
        batch: which keys each row sees.
        softcap: bound scores smoothly to this size (Gemma 2).
        window: see only the last `window` positions, oneself included.

    Returns:
        `[N, H_q * d]` float32.
    """
    heads, d = kv.shape[0] // 2, q.shape[-1]
    group = q.shape[1] // heads
    outputs = []
    for lanes in batch.lanes:
        num, m, num_keys = lanes.size
        k, v = kv.index_select(1, lanes.keys).float().view(2, heads * num, num_keys, d)
        x = q.index_select(0, lanes.rows).view(num, m, heads, group, d)
        x = x.permute(2, 0, 1, 3, 4).reshape(heads * num, m * group, d)
        scores = torch.bmm(x, k.transpose(1, 2))  # [H_kv * L, m * G, K]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores.view(heads, num, m, group, num_keys).add_(lanes.bias[window])
        out = _weigh(scores.softmax(-1), v)  # [H_kv * L, m * G, d]
        outputs.append(out.reshape(heads, num * m, group, d).transpose(0, 1).reshape(num * m, -1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, batch.lane_rows)


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    """`[B, M, K] x [B, K, d] -> [B, M, d]`, summed by blocks of keys in their order.

    One product over all keys is cut up by their number, and so has other bits in a longer list.
    """
    num, m, num_keys = p.shape
    blocks = num_keys // KEY_BLOCK
    p = p.view(num, m, blocks, KEY_BLOCK).transpose(1, 2).reshape(num * blocks, m, KEY_BLOCK)
    parts = torch.bmm(p, v.reshape(num * blocks, KEY_BLOCK, -1)).view(num, blocks, m, -1)
    out = parts[:, 0]
    for block in range(1, blocks):
        out = out + parts[:, block]
    return out
