"""The operations between linear layers, and attention, on kernels of a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from soothsay.core.batch import Batch, Layout, Rows
from soothsay.core.functions import UNGATED
from soothsay.model.gpu import gpu_plan
from soothsay.model.gpu.launching import launch
from soothsay.model.gpu.source import attention, glue
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.operands import PLAIN, HeadForm, Norm, Rotation, Scoring

LARGEST_HEAD = 256
"""Numbers of a head that attention's tiles hold. Larger heads take the stock operations."""
HEADS = 4
"""Heads of a row that a program takes. Sums over a head depend on it: part of the numeric mode."""
BLOCK = 1024
"""Numbers of a row that a program takes where nothing is summed."""


class GpuLayers(Kernels):
    """Norms, rotary positions, attention and activations in Triton.

    A row's bits depend on the row alone. Queries are rounded to the type of the KV pool, and the outputs of
    attention have the type of the queries.
    """

    programs = 264
    """Programs that share the items of attention, best two for each multiprocessor. No bit depends on it."""

    def lay_out(self, requests: Sequence[Rows], block_size: int, group: int) -> Layout:
        """See `LayoutOps`."""
        return gpu_plan.lay_out(requests, block_size, group)

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        return self._add_norm(x, None, None, norm, dtype)[1]

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """See `Kernels`."""
        return self._add_norm(x, delta, post, None, x.dtype)[0]

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return self._add_norm(x, delta, post, norm, dtype)

    def _add_norm(
        self, x: Tensor, delta: Tensor | None, post: Norm | None, norm: Norm | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The sum, `x` itself without `delta`; and its norm, the sum itself without `norm`."""
        x, size = aligned(x), x.shape[-1]
        total = x if delta is None else torch.empty_like(x)
        out = total if norm is None else torch.empty_like(x, dtype=dtype)
        weights, eps = zip(*(map(_read, (post, norm))), strict=True)
        launch(
            *(glue.add_norm, (x.numel() // size,), x, delta if delta is None else aligned(delta)),
            *(*weights, None if norm is None else norm.bias, total, out, size, *eps),
            POST_CENTRED=post is not None and post.centred,
            CENTRED=norm is not None and norm.centred,
            BLOCK=next_power_of_2(size),
            warps=warps_of(size),
        )
        return total, out

    def rotate_store(self, qkv: Tensor, rope: Rotation, kv: Tensor, slots: Tensor, form: HeadForm) -> Tensor:
        """See `Kernels`. Keys have no centre, since no KV pool here is in int8."""
        qkv, (cos, sin) = aligned(qkv), map(aligned, rope)
        rows, heads, size = qkv.shape
        queries, keys = form.counts(heads, kv)
        q = qkv.new_empty(rows, queries, size, dtype=kv.dtype)
        weights, eps = zip(*map(_read, (*(form.norms or (None, None)), form.value_norm)), strict=True)
        launch(
            *(glue.rotate_store, (rows, cdiv(queries + 2 * keys, HEADS)), qkv, *weights, cos, sin),
            *(q, kv, slots, kv.shape[1], queries, form.gates, keys, *eps, form.scale),
            SIZE=size,
            D=next_power_of_2(size),
            HEADS=HEADS,
        )
        return q

    def attend(self, q: Tensor, kv: Tensor, batch: Batch, how: Scoring = PLAIN) -> Tensor:
        """See `Kernels`."""
        softcap, window, sinks, _ = how
        size, heads = q.shape[-1], len(kv) // 2
        if size > LARGEST_HEAD or not heads:  # one head that is both keys and values
            stock = batch.form(_listed)
            return super().attend(q.float(), kv, stock, how)
        plan, numbers = batch.form(gpu_plan.plan_of)
        q = aligned(q)
        rows, all_heads, _ = q.shape
        out, group = torch.empty_like(q), all_heads // heads
        whole: dict[str, Any] = {
            "CHUNK": gpu_plan.CHUNK,
            "SIZE": size,
            "D": max(next_power_of_2(size), 16),
        }
        # larger tiles of large heads do not fit into registers
        most = plan.tile if size <= 128 else gpu_plan.TILES[0]
        m = max(most, next_power_of_2(group))
        tile = whole | {"KEYS": gpu_plan.KEYS, "PAGE": plan.page, "ROWS": plan.rows, "M": m, "GROUP": group}
        tile |= {"SOFTCAP": softcap is not None, "warps": 4 if m <= 16 and size <= 128 else 8}
        run, sizes = gpu_plan.RUN, (heads, kv.shape[1], window or 0, softcap or 0.0)
        if plan.folds:
            grid = plan.folds, heads, cdiv(plan.rows, m // group)
            launch(attention.attend_rows, grid, q, kv, numbers, sinks, out, *sizes, **tile, RUN=run, stages=3)
        if plan.items:
            sums = q.new_empty(plan.places, all_heads, 2, dtype=torch.float32)
            parts = q.new_empty(plan.places, all_heads, size, dtype=torch.float32)
            few = self.programs
            launch(attention.attend_chunks, (few,), q, kv, numbers, sums, parts, *sizes, **tile, PROGRAMS=few)
            launch(
                *(attention.join_chunks, (rows, cdiv(all_heads, HEADS))),
                *(numbers, sums, parts, sinks, out, all_heads, window or 0),
                **whole,
                RUN=run,
                HEADS=HEADS,
            )
        return out.flatten(1)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`."""
        gate_up = aligned(gate_up)
        rows, width = gate_up.shape
        size = width if activation in UNGATED else width // 2
        out = gate_up.new_empty(rows, size)
        grid = rows, cdiv(size, BLOCK)
        launch(glue.gated, grid, gate_up, out, size, ACTIVATION=activation, GATED=size < width, BLOCK=BLOCK)
        return out


def _read(norm: Norm | None) -> tuple[Tensor | None, float]:
    """What kernels read of a norm."""
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def aligned(x: Tensor) -> Tensor:
    """`x` in one piece, from a multiple of 16 bytes on. The compiler chooses the order of sums by that."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def warps_of(size: int) -> int:
    """Warps of a program that owns a row. Sums over a row depend on it: part of the numeric mode."""
    return 4 if size <= 2048 else 8


def cdiv(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is not below `x`."""
    return 1 << (x - 1).bit_length()


def _listed(batch: Batch) -> Batch:
    """The pass with lists of keys, as stock operations read them."""
    return replace(batch, stacked=())
