"""Attention of rows to their own paths over paged keys and values.

A row sees the keys of its path up to its own position, or the last of them. Keys count from position 0:
blocks of `KEYS` with a running softmax, chunks of `CHUNK`, runs of `RUN` chunks. A run is the left fold of
its chunks, and a row's result is the left fold of its runs. So no bit depends on which rows share a tile, on
which keys are nodes of a tree, or on whether one program takes all chunks of a row (`attend_rows`) or many
take one each (`attend_chunks`, then `join_chunks`; FlashDecoding, Dao et al. 2023).

`soothsay.model.gpu.gpu_plan` describes the plan that says who sees what.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""The largest score of no keys."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def bounded_score(s, softcap):
    """`softcap * tanh(s / softcap)`, by an exponential of the number alone."""
    e = tl.exp(tl.div_rn(s, softcap) * 2.0)
    return softcap - tl.div_rn(2.0 * softcap, e + 1.0)


@triton.jit
def first_key(position, window):
    """The first position that rows see; see `AttentionSpec.window`. 0: all."""
    size = tl.maximum(window, -window)
    first = tl.where(window > 0, position - size + 1, position // tl.maximum(size, 1) * size)
    return tl.where(window == 0, 0, tl.maximum(first, 0))


@triton.jit
def join(top, total, acc, its_top, its_total, its_acc):
    """Join two running softmaxes: largest scores and sums `[M]`, weighed values `[M, D]`.

    One over no keys changes no bit of the other.
    """
    higher = tl.maximum(top, its_top)
    mine, its = tl.exp2(top - higher), tl.exp2(its_top - higher)
    has_keys = its_total > 0
    acc = tl.where(has_keys[:, None], acc * mine[:, None] + its_acc * its[:, None], acc)
    total = tl.where(has_keys, total * mine + its_total * its, total)
    return tl.where(has_keys, higher, top), total, acc


@triton.jit
def load_tile(
    plan,
    item,
    part,
    q,
    head,
    heads,
    window,
    kind: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
):
    """Queries of a tile, `[M, D]`, for one head of keys; their rows, heads, positions, places, first keys."""
    m, d = tl.arange(0, M), tl.arange(0, D)
    slot = part * (M // GROUP) + m // GROUP
    row = tl.load(item + 4 + slot, mask=(m < M // GROUP * GROUP) & (slot < ROWS), other=-1)
    there = row >= 0
    rows = plan + tl.load(plan + 4)
    position = tl.load(rows + 2 * row, mask=there, other=-1)
    place = tl.load(rows + 2 * row + 1, mask=there, other=-1)
    low = tl.where(there, first_key(tl.maximum(position, 0), window), 1 << 30)
    of = head * GROUP + m % GROUP
    at = (row[:, None] * (heads * GROUP) + of[:, None]) * SIZE + d[None, :]
    x = tl.load(q + at, mask=there[:, None] & (d < SIZE)[None, :], other=0.0).to(kind)
    return x, row, of, position, place, low


@triton.jit
def attend_chunk(
    plan,
    item,
    x,
    keys,
    values,
    position,
    low,
    chunk,
    softcap,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
):
    """The running softmax of queries `x` `[M, D]` over the keys of a chunk that they see."""
    tables, nodes = plan + tl.load(plan + 5), plan + tl.load(plan + 6) + tl.load(item)
    ctx, shift = tl.load(item + 1), tl.load(item + 2)
    end = tl.minimum((chunk + 1) * CHUNK, tl.max(position, axis=0) + 1)
    begin = tl.maximum(chunk * CHUNK, tl.min(low, axis=0) // KEYS * KEYS)
    d = tl.arange(0, D)
    real = d < SIZE
    ones = tl.full((KEYS, 16), 1.0, tl.float32).to(x.dtype)
    top = tl.full((M,), LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for at in range(begin, end, KEYS):
        p = at + tl.arange(0, KEYS)
        exists = p < end
        depth = p - ctx
        node = tl.load(nodes + depth, mask=exists & (depth > 0), other=0)
        offset = tl.where(depth > 0, ctx + node, p) + shift
        slot = tl.load(tables + offset // PAGE, mask=exists, other=0) * PAGE + offset % PAGE
        k_mask, v_mask = exists[None, :], exists[:, None]
        if SIZE != D:
            k_mask, v_mask = k_mask & real[:, None], v_mask & real[None, :]
        k = tl.load(keys + slot[None, :] * SIZE + d[:, None], mask=k_mask, other=0.0)  # [D, KEYS]
        v = tl.load(values + slot[:, None] * SIZE + d[None, :], mask=v_mask, other=0.0)  # [KEYS, D]
        s = tl.dot(x, k, input_precision="ieee")
        if SOFTCAP:
            s = bounded_score(s, softcap)
        sees = (p[None, :] <= position[:, None]) & (p[None, :] >= low[:, None])
        s = tl.where(sees, s * LOG2_E, LOWEST)
        higher = tl.maximum(top, tl.max(s, axis=1))
        # a row that sees none of the keys keeps its bits: it shrinks by 1, and zeros are added
        shrink = tl.exp2(top - higher)
        e = tl.where(sees, tl.exp2(s - higher[:, None]), 0.0).to(x.dtype)
        # a product with ones has a fixed order of sums; the order of other sums depends on the tile
        total = total * shrink + tl.max(tl.dot(e, ones, input_precision="ieee"), axis=1)
        acc = acc * shrink[:, None] + tl.dot(e, v, input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize_on_alignment=["plan"])
def attend_chunks(
    q,
    kv,
    plan,
    sums,
    parts,
    heads,
    slots,
    window,
    softcap,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The running softmax of each row over each of its chunks. The number of items is read from the plan.

    q `[N, heads * GROUP, SIZE]`, kv `[2 * heads, slots, SIZE]`. Results are float32: sums
    `[places, heads * GROUP, 2]`, each with its largest score, and parts `[places, heads * GROUP, SIZE]`.
    """
    d = tl.arange(0, D)
    kind: tl.constexpr = kv.dtype.element_ty
    parts_of_tile: tl.constexpr = (ROWS + M // GROUP - 1) // (M // GROUP)
    for index in range(tl.program_id(0), tl.load(plan) * heads * parts_of_tile, PROGRAMS):
        head, part = index % heads, index // heads % parts_of_tile
        item = plan + 8 + (index // heads // parts_of_tile) * (4 + ROWS)
        x, _, of, position, place, low = load_tile(
            plan, item, part, q, head, heads, window, kind, ROWS, M, GROUP, SIZE, D
        )
        chunk = tl.load(item + 3)
        keys = kv + head.to(tl.int64) * slots * SIZE
        values = kv + (heads + head).to(tl.int64) * slots * SIZE
        top, total, acc = attend_chunk(
            plan, item, x, keys, values, position, low, chunk, softcap, SOFTCAP, KEYS, CHUNK, SIZE, D, PAGE, M
        )
        begin = chunk * CHUNK
        sees = (position >= begin) & (low < begin + CHUNK)
        out = ((place + chunk) * (heads * GROUP) + of).to(tl.int64)
        tl.store(sums + out * 2, total, mask=sees)
        tl.store(sums + out * 2 + 1, top, mask=sees)
        tl.store(parts + out[:, None] * SIZE + d[None, :], acc, mask=sees[:, None] & (d < SIZE)[None, :])


@triton.jit
def weighed(total, acc):
    """Weighed values `[M, D]` over their sums; zeros where no key was seen."""
    has_keys = total > 0
    return tl.where(has_keys[:, None], tl.div_rn(acc, tl.where(has_keys, total, 1.0)[:, None]), 0.0)


@triton.jit
def sink(sinks, head, exists):
    """Where the running softmax of heads starts: a score without a value, if there is one."""
    top, total = head * 0.0 + LOWEST, head * 0.0
    if sinks is not None:
        top = tl.load(sinks + head, mask=exists, other=0.0) * LOG2_E
        total = total + 1.0
    return top, total


@triton.jit(do_not_specialize_on_alignment=["plan"])
def join_chunks(
    plan,
    sums,
    parts,
    sinks,
    out,
    heads,
    window,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Join the chunks of a row, for `HEADS` of all `heads`: out `[N, heads, SIZE]`. Padded rows are zeros."""
    row, head, d = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    rows, is_row = plan + tl.load(plan + 4), row < tl.load(plan + 2)
    position = tl.load(rows + 2 * row, mask=is_row, other=-1)
    place = tl.load(rows + 2 * row + 1, mask=is_row, other=0)
    low = first_key(tl.maximum(position, 0), window) // CHUNK
    count = tl.where(place >= 0, (position + CHUNK) // CHUNK, 0)
    exists = head < heads
    real = exists[:, None] & (d < SIZE)[None, :]
    top, total = sink(sinks, head, exists)
    acc = tl.zeros((HEADS, D), tl.float32)
    for run in range(low // RUN, (count + RUN - 1) // RUN):
        run_top = tl.full((HEADS,), LOWEST, tl.float32)
        run_total = tl.zeros((HEADS,), tl.float32)
        run_acc = tl.zeros((HEADS, D), tl.float32)
        for nth in tl.static_range(RUN):
            chunk = run * RUN + nth
            has = (chunk >= low) & (chunk < count)
            at = ((place + chunk) * heads + head).to(tl.int64)
            its_total = tl.load(sums + at * 2, mask=exists & has, other=0.0)
            its_top = tl.load(sums + at * 2 + 1, mask=exists & has, other=LOWEST)
            its_acc = tl.load(parts + at[:, None] * SIZE + d[None, :], mask=real & has, other=0.0)
            run_top, run_total, run_acc = join(run_top, run_total, run_acc, its_top, its_total, its_acc)
        top, total, acc = join(top, total, acc, run_top, run_total, run_acc)
    at = (row * heads + head[:, None]) * SIZE + d[None, :]
    tl.store(out + at, weighed(total, acc).to(out.dtype.element_ty), mask=real & (place >= 0))


@triton.jit(do_not_specialize_on_alignment=["plan"])
def attend_rows(
    q,
    kv,
    plan,
    sinks,
    out,
    heads,
    slots,
    window,
    softcap,
    SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Attention of a tile of rows over all their chunks, for long prompts: out `[N, heads * GROUP, SIZE]`."""
    item = plan + tl.load(plan + 3) + tl.program_id(0) * (4 + ROWS)
    head, d = tl.program_id(1), tl.arange(0, D)
    kind: tl.constexpr = kv.dtype.element_ty
    x, row, of, position, _, low = load_tile(
        plan, item, tl.program_id(2), q, head, heads, window, kind, ROWS, M, GROUP, SIZE, D
    )
    keys = kv + head.to(tl.int64) * slots * SIZE
    values = kv + (heads + head).to(tl.int64) * slots * SIZE
    top, total = sink(sinks, of, row >= 0)
    acc = tl.zeros((M, D), tl.float32)
    count = tl.max(position, axis=0) // CHUNK + 1
    first = tl.min(low, axis=0) // CHUNK
    for run in range(first // RUN, (count + RUN - 1) // RUN):
        run_top = tl.full((M,), LOWEST, tl.float32)
        run_total = tl.zeros((M,), tl.float32)
        run_acc = tl.zeros((M, D), tl.float32)
        for chunk in range(tl.maximum(run * RUN, first), tl.minimum(run * RUN + RUN, count)):
            its_top, its_total, its_acc = attend_chunk(
                plan,
                item,
                x,
                keys,
                values,
                position,
                low,
                chunk,
                softcap,
                SOFTCAP,
                KEYS,
                CHUNK,
                SIZE,
                D,
                PAGE,
                M,
            )
            run_top, run_total, run_acc = join(run_top, run_total, run_acc, its_top, its_total, its_acc)
        top, total, acc = join(top, total, acc, run_top, run_total, run_acc)
    at = (row[:, None] * (heads * GROUP) + of[:, None]) * SIZE + d[None, :]
    real = (row >= 0)[:, None] & (d < SIZE)[None, :]
    tl.store(out + at, weighed(total, acc).to(out.dtype.element_ty), mask=real)
