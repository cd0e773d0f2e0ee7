"""Attention over the paged KV cache, for any mixture of prefill chunks, single tokens and trees.

This is the reference, in stock operations. A row's bits do not depend on other rows, requests, tree nodes or
padding, because each row reads the keys of its own path in order of position.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import key_products, read_values
from soothsay.core.paths import KEY_BLOCK
from soothsay.model.ops.operands import PLAIN, Scoring


class AttentionOps:
    """Attention. Kernels may compute it in another way."""

    def attend(self, q: Tensor, kv: Tensor, batch: Batch, how: Scoring = PLAIN) -> Tensor:
        """Softmax attention of each row to its own path.

        Args:
            q: `[N, H_q, d]` float32 queries, rotated and scaled.
            kv: `[2 * H_kv, S, row]` keys and values of one layer in a KV pool, including those of this pass.
                `[1, S, d]`: the rows are both keys and values.
            batch: has the keys that each row sees.
            how: scores become weights.

        Returns:
            `[N, H_q * d]` float32.
        """
        softcap, window, sinks, relative = how
        if len(kv) == 1:
            kv = kv.expand(2, -1, -1)
        heads, d = kv.shape[0] // 2, q.shape[-1]
        group = q.shape[1] // heads
        outputs = []
        for lanes in batch.lanes:
            num, m, num_keys = lanes.size
            keys, values = kv.index_select(1, lanes.keys).view(2, heads * num, num_keys, -1)
            x = q.index_select(0, lanes.rows).view(num, m, heads, group, d)
            x = x.permute(2, 0, 1, 3, 4).reshape(heads * num, m * group, d)
            scores, v = key_products(x, keys), read_values(values)  # [H_kv * L, m * G, K], [H_kv * L, K, d]
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores.view(heads, num, m, group, num_keys).add_(lanes.bias[window])
            if relative is not None:
                added = _by_distance(relative, batch.positions.index_select(0, lanes.rows), num_keys)
                added = added.view(heads, group, num, m, num_keys).permute(0, 2, 3, 1, 4)
                scores.view(heads, num, m, group, num_keys).add_(added)
            if sinks is not None:
                scores = _after_sinks(scores.view(heads, -1, group, num_keys), sinks).view_as(scores)
            else:
                scores = scores.softmax(-1)
            out = _weigh(scores, v)  # [H_kv * L, m * G, d]
            outputs.append(out.reshape(heads, num * m, group, d).transpose(0, 1).reshape(num * m, -1))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).index_select(0, batch.lane_rows)


def _by_distance(table: Tensor, positions: Tensor, num_keys: int) -> Tensor:
    """The numbers of `Scoring.relative` for rows at `positions` `[n]`: `[H_q, n * K]`."""
    most = table.shape[1] // 2
    distances = torch.arange(num_keys, device=positions.device) - positions[:, None]
    return table.index_select(1, (distances.clamp(-most, most) + most).view(-1))


def _after_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """The softmax of scores `[H_kv, n, G, K]` and a sink `[H_kv * G]` before them, without the sink.

    Sinks fill a whole block, so that sums are in the same order as without them.
    """
    heads, rows, group, _ = scores.shape
    first = scores.new_full((heads, rows, group, KEY_BLOCK), -torch.inf)
    first[..., 0] = sinks.view(heads, 1, group)
    return torch.cat([first, scores], -1).softmax(-1)[..., KEY_BLOCK:].contiguous()


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    """`[B, M, K] x [B, K, d] -> [B, M, d]`, summed block by block of keys, in order.

    BLAS would split one product over all keys by their number, so bits would depend on the padding. With 5 to
    10 columns, but for 8, bits would depend on a row's place (measured on x86), so columns are padded.
    """
    (num, m, num_keys), d = p.shape, v.shape[2]
    blocks = num_keys // KEY_BLOCK
    p = p.view(num, m, blocks, KEY_BLOCK).transpose(1, 2).reshape(num * blocks, m, KEY_BLOCK)
    v = F.pad(v, (0, -d % 8)).reshape(num * blocks, KEY_BLOCK, -1)
    parts = torch.bmm(p, v).view(num, blocks, m, -1)[..., :d]
    out = parts[:, 0]
    for block in range(1, blocks):
        out = out + parts[:, block]
    return out
