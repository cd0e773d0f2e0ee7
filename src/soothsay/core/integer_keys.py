"""Rows of a KV pool whose keys are 16-bit integers with a float32 scale.

Such a pool is a tensor of int16. A row of a key or a value of `d` numbers has `d + SCALE` elements. A key has
`d` integers, then the bits of its scale. A value has `d` numbers in bfloat16. Its last elements are unused.

bfloat16 rounds a key to 8 bits. These keys have up to 15. Rounded values cost no quality (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from soothsay.core.functions import total

SCALE = 2
"""Elements of a key's scale."""

NORM = 32700.0
"""Euclidean norm of a row of integers.

No integer is larger, so 16 bits hold it. Rounding lengthens a row of `d` numbers by sqrt(d) / 2 at most. So
no part of the sum of a product of two rows is larger than (NORM + sqrt(d) / 2)^2, by the inequality of Cauchy
and Schwarz. This is below 2^31 for every `d` up to 2^28."""

LEAST_NORM = 1e-15
"""A shorter row becomes zeros. The squares of its numbers would lose bits in float32."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Elements of a pool's row for `size` numbers."""
    return size + SCALE if dtype == torch.int16 else size


def kv_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes that a token takes in a pool: for each layer, its heads and their size."""
    return sum(heads * row_size(size, dtype) for heads, size in shapes) * dtype.itemsize


def integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[..., d]` float32 as integers `[..., d]` int16, and their scales `[..., 1]` float32."""
    norm = total(x.square()).sqrt()
    inverse = torch.where(norm > LEAST_NORM, torch.full_like(norm, NORM) / norm, 0.0)
    return (x * inverse).round().to(torch.int16), norm / NORM


def written(keys: Tensor, values: Tensor) -> Tensor:
    """Keys and values `[H_kv, N, d]` float32 as rows of a pool, `[2 * H_kv, N, d + SCALE]` int16."""
    whole, scales = integers(keys)
    halves = values.bfloat16().view(torch.int16)
    unused = halves.new_zeros(*halves.shape[:-1], SCALE)
    return torch.cat([torch.cat([whole, scales.view(torch.int16)], -1), torch.cat([halves, unused], -1)])


def scores(q: Tensor, keys: Tensor) -> Tensor:
    """Products of queries `[B, M, d]` float32 and rows of keys `[B, K, d + SCALE]`: `[B, M, K]` float32.

    Queries are rounded as keys are. The sums of integers are exact.
    """
    whole, scale = integers(q)
    places = keys[..., -SCALE:].contiguous().view(torch.float32)  # [B, K, 1]
    sums = torch.bmm(whole.double(), keys[..., :-SCALE].double().transpose(1, 2))
    return sums.float() * (places.transpose(1, 2) * scale)


def read_values(rows: Tensor) -> Tensor:
    """Rows of values `[..., d + SCALE]` as `[..., d]` float32."""
    return rows[..., :-SCALE].contiguous().view(torch.bfloat16).float()
