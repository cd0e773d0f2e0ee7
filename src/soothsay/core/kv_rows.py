"""Rows of a KV pool: how it keeps a key or a value of `d` numbers.

A pool of floats has rows of `d` elements. The others have integers with a float32 scale, a number being scale
times integer:

- int16: a key has `d` integers, then the bits of its scale. A value has `d` numbers in bfloat16, and its last
  elements are unused. bfloat16 rounds a key to 8 bits; these keys have up to 15. Rounded values cost no
  quality (docs/log.md).
- int8: a key or a value has `d` integers, then the bits of its scale.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from soothsay.core.functions import total

INTEGERS = (torch.int16, torch.int8)
SCALE_BYTES = 4

NORM = 32700.0
"""Euclidean norm of a row of 16-bit integers.

No integer is larger, so 16 bits hold it. Rounding lengthens a row of `d` numbers by sqrt(d) / 2 at most. So
no part of the sum of a product of two rows is larger than (NORM + sqrt(d) / 2)^2, by the inequality of Cauchy
and Schwarz. This is below 2^31 for every `d` up to 2^28."""

MOST_BYTE = 127.0
"""The largest number of a row of 8-bit integers."""

LEAST_SIZE = 1e-15
"""A row of a smaller norm or largest number becomes zeros. Squares would lose bits in float32."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Elements of a pool's row for `size` numbers."""
    return size + SCALE_BYTES // dtype.itemsize if dtype in INTEGERS else size


def kv_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes that a token takes in a pool: for each layer, its heads and their size."""
    return sum(heads * row_size(size, dtype) for heads, size in shapes) * dtype.itemsize


def integers(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[..., d]` float32 as integers `[..., d]` of `dtype`, and their scales `[..., 1]` float32."""
    if dtype == torch.int8:
        size, whole = x.abs().amax(-1, keepdim=True), MOST_BYTE
    else:
        size, whole = total(x.square()).sqrt(), NORM
    inverse = torch.where(size > LEAST_SIZE, torch.full_like(size, whole) / size, 0.0)
    return (x * inverse).round().to(dtype), size / whole


def written(keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values `[H_kv, N, d]` float32 as rows of a pool of `dtype`, `[2 * H_kv, N, row]`."""
    if dtype == torch.int8:
        return _with_scales(torch.cat([keys, values]), dtype)
    if dtype != torch.int16:
        return torch.cat([keys, values]).to(dtype)
    halves = values.bfloat16().view(torch.int16)
    unused = halves.new_zeros(*halves.shape[:-1], SCALE_BYTES // dtype.itemsize)
    return torch.cat([_with_scales(keys, dtype), torch.cat([halves, unused], -1)])


def _with_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    whole, scales = integers(x, dtype)
    return torch.cat([whole, scales.view(dtype)], -1)


def _parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The integers `[..., d]` and the scales `[..., 1]` of rows."""
    scale = SCALE_BYTES // rows.dtype.itemsize
    return rows[..., :-scale], rows[..., -scale:].contiguous().view(torch.float32)


def key_products(q: Tensor, keys: Tensor) -> Tensor:
    """Products of queries `[B, M, d]` float32 and rows of keys `[B, K, row]`: `[B, M, K]` float32.

    Queries are rounded to integers if keys are. The sums of integers are exact.
    """
    if keys.dtype not in INTEGERS:
        return torch.bmm(q, keys.float().transpose(1, 2))
    whole, scale = integers(q, keys.dtype)
    own, scales = _parts(keys)  # [B, K, d], [B, K, 1]
    sums = torch.bmm(whole.double(), own.double().transpose(1, 2))
    return sums.float() * (scales.transpose(1, 2) * scale)


def read_values(rows: Tensor) -> Tensor:
    """Rows of values `[..., row]` as `[..., d]` float32."""
    if rows.dtype not in INTEGERS:
        return rows.float()
    whole, scales = _parts(rows)
    if rows.dtype == torch.int8:
        return whole * scales
    return whole.contiguous().view(torch.bfloat16).float()
