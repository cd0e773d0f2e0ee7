"""Products of rows with weights, for tiles of rows and outputs.

Inputs are cut into splits, whose sums are added in order. A split's sum is one accumulator over rising
inputs, so a tile's size, its warps and its stages change no bit. A program computes `each` splits in turn and
writes their sum. Grid: (tiles of rows, tiles of outputs, splits / each).
"""

import triton
import triton.language as tl

PANEL = tl.constexpr(64)  # outputs whose integers are stored together
STEP = tl.constexpr(64)  # inputs whose integers are stored together

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

NO_OFFSET = tl.constexpr(0)
MINIMUMS = tl.constexpr(1)
ZEROS = tl.constexpr(2)


@triton.jit(do_not_specialize=["M", "each"])
def multiply_floats(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    span,
    each,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`x` `[M, K]` times `weight` `[N, K]` into `out` `[splits / each, M, N]`; `bias` `[N]` float32 or None.

    `span`: inputs of a split. BLOCK_K divides it, and K.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    inputs = tl.arange(0, BLOCK_K)
    is_row = rows[:, None] < M
    x_rows = x + (rows[:, None].to(tl.int64) * K + inputs[None, :])
    w_columns = weight + (tl.minimum(columns, N - 1)[None, :].to(tl.int64) * K + inputs[:, None])
    # only where all rows are in one tile is a weight read once
    keep: tl.constexpr = "evict_first" if BLOCK_M < 128 else ""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in range(part * each, (part + 1) * each):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(split * span, tl.minimum((split + 1) * span, K), BLOCK_K):
            a = tl.load(x_rows + k, mask=is_row, other=0.0)
            b = tl.load(w_columns + k, eviction_policy=keep)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        total += acc
    _write(total, bias, out, part, rows, columns, M, N)


@triton.jit
def _write(total, bias, out, part, rows, columns, M, N):
    is_column = columns < N
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    place = out + (part * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(place, total, mask=(rows[:, None] < M) & is_column[None, :])


@triton.jit(do_not_specialize=["M"])
def quantize_rows(
    x,
    values,
    scales,
    sums,
    M,
    K,
    steps,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Round rows `x` `[M, K]` to integers from -127 to 127, with a scale for each row and group of inputs.

    Writes `values` `[padded rows, steps * STEP]` int8, and `[groups, padded rows]` float32: `scales`, and
    `sums` of a group's integers, times the scale if OFFSET is MINIMUMS. All are 0 where there is no input.
    Grid: (padded rows / BLOCK_M, inputs / BLOCK_K).
    """
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_input = (rows[:, None, None] < M) & (inputs[None, :, :] < K)
    at = rows[:, None, None].to(tl.int64) * K + inputs[None, :, :]
    exact = tl.load(x + at, mask=is_input, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(exact), axis=2)
    end = tl.full((BLOCK_M, GROUPS), 127.0, tl.float32)
    inverse = tl.where(largest > 0, tl.div_rn(end, tl.where(largest > 0, largest, end)), 0.0)
    # adding 1.5 * 2**23 rounds to the nearest integer, ties to even
    magic: tl.constexpr = 12582912.0
    integers = ((exact * inverse[:, :, None] + magic) - magic).to(tl.int32)
    size = steps * STEP
    place = rows[:, None, None].to(tl.int64) * size + inputs[None, :, :]
    tl.store(values + place, integers.to(tl.int8), mask=(inputs < size)[None, :, :])
    padded = tl.num_programs(0) * BLOCK_M
    factor = groups[None, :] * padded + rows[:, None]
    is_group = (groups * GROUP < size)[None, :]
    scale, total = tl.div_rn(largest, end), tl.sum(integers, axis=2).to(tl.float32)
    tl.store(scales + factor, scale, mask=is_group)
    tl.store(sums + factor, scale * total if OFFSET == MINIMUMS else total, mask=is_group)


@triton.jit
def _halves(pairs, SIGNED: tl.constexpr):
    """The lower and the upper four bits of bytes; if signed, times 16: int8. A device takes four at once."""
    if IS_INTERPRETED:
        if SIGNED:
            low, high = (pairs << 4).to(tl.int8), (pairs & 0xF0).to(tl.int8)
        else:
            low, high = (pairs & 15).to(tl.int8), (pairs >> 4).to(tl.int8)
    else:
        low, high = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;"
            if SIGNED
            else "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;",
            "=&r,=r,r",
            [pairs],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _factor(word, shift, WIDTH: tl.constexpr):
    """The factor of WIDTH bits at bit `shift` of int32 words, in float32. Bytes have 128 added to them."""
    if WIDTH == 32:
        factor = word.to(tl.float32, bitcast=True)
    elif WIDTH == 16:
        factor = (word >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:  # as the last bits of 2**23 + byte: devices take long to convert a byte
        factor = (word >> shift & 255 | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 128)
    return factor


@triton.jit
def _multiply_group(a_step, w_low, w_high, sums, group: tl.constexpr, GROUP: tl.constexpr):
    """Add the products of a group. `a_step`: pointers to the first run of its step, `[RUN, BLOCK_M]`."""
    RUN: tl.constexpr = STEP // 2
    HALF: tl.constexpr = group * GROUP // RUN
    w = w_low if HALF == 0 else w_high
    if GROUP == STEP:
        sums = tl.dot(w_low, tl.load(a_step), sums, out_dtype=tl.int32)
        sums = tl.dot(w_high, tl.load(a_step + RUN), sums, out_dtype=tl.int32)
    elif GROUP == RUN:
        sums = tl.dot(w, tl.load(a_step + HALF * RUN), sums, out_dtype=tl.int32)
    else:  # zeros in place of the other inputs of a run
        is_own = tl.arange(0, RUN)[:, None] // GROUP == group - HALF * (RUN // GROUP)
        a = tl.load(a_step + HALF * RUN, mask=is_own, other=0)
        sums = tl.dot(w, a, sums, out_dtype=tl.int32)
    return sums


@triton.jit(do_not_specialize=["M", "steps", "span", "each"])
def multiply_integers(
    values,
    x_scales,
    x_sums,
    packed,
    factors,
    units,
    bias,
    out,
    M,
    N,
    steps,
    span,
    each,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Quantized rows (see `quantize_rows`) times integers in groups of inputs.

    A step's integers are in two runs of 32 inputs. With 8 bits they follow each other; with 4 bits a byte has
    one of the first run in its lower half and one of the second run in its upper half. Those of 4 bits with
    minimums are not signed.

    Args:
        packed: `[panels, steps, PANEL, 32]` uint8, or `[panels, steps, 2, PANEL, 32]` int8.
        factors: `[panels, steps, WORDS, PANEL]` int32: of each group a scale, and a minimum or zero.
        units: `[panels, steps / UNIT_STEPS, PANEL]` int32, two of float16, for scales and minimums; or None.
        out: `[splits / each, M, N]`.
        span: steps of a split.
    """
    RUN: tl.constexpr = STEP // 2
    GROUPS: tl.constexpr = STEP // GROUP
    SIZE: tl.constexpr = WIDTH if OFFSET == NO_OFFSET else 2 * WIDTH  # bits of a group's factors
    SHARING: tl.constexpr = 1 if SIZE >= 32 else 32 // SIZE if SIZE * GROUPS > 32 else GROUPS
    BYTES: tl.constexpr = STEP * PANEL * BITS // 8
    SIGNED: tl.constexpr = OFFSET != MINIMUMS
    ONE: tl.constexpr = 16 if BITS == 4 and OFFSET != MINIMUMS else 1  # as `_halves` has it
    keep: tl.constexpr = "evict_first" if BLOCK_M < 128 else ""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    panel, part = tl.program_id(1), tl.program_id(2)
    padded = tl.num_programs(0) * BLOCK_M
    n, run = tl.arange(0, PANEL), tl.arange(0, RUN)
    first = panel.to(tl.int64) * steps
    a_rows = values + (rows[None, :].to(tl.int64) * (steps * STEP) + run[:, None])
    w_panel = packed + (first * BYTES + n[:, None] * RUN + run[None, :])
    f_panel = factors + (first * (WORDS * PANEL) + n)
    total = tl.zeros((PANEL, BLOCK_M), dtype=tl.float32)
    for split in range(part * each, (part + 1) * each):
        acc = tl.zeros((PANEL, BLOCK_M), dtype=tl.float32)
        for step in tl.range(split * span, tl.minimum((split + 1) * span, steps), num_stages=STAGES):
            w_low = tl.load(w_panel + step * BYTES, eviction_policy=keep)
            if BITS == 4:
                w_low, w_high = _halves(w_low, SIGNED)
            else:
                w_high = tl.load(w_panel + (step * BYTES + RUN * PANEL), eviction_policy=keep)
            if units is not None:
                pair = tl.load(units + (first // UNIT_STEPS + step // UNIT_STEPS) * PANEL + n)
            for block in tl.static_range(GROUPS // SHARING):
                words = f_panel + (step * WORDS + block * SHARING * SIZE // 32) * PANEL
                word = tl.load(words)
                last_word = tl.load(words + PANEL) if SIZE > 32 else word
                for place in tl.static_range(SHARING):
                    at = (step * GROUPS + (block * SHARING + place)) * padded + rows
                    x_scale = tl.load(x_scales + at)
                    scale = _factor(word, place * SIZE, WIDTH)
                    if units is not None:
                        scale *= _factor(pair, 0, 16)
                    sums = tl.zeros((PANEL, BLOCK_M), dtype=tl.int32)
                    if OFFSET != NO_OFFSET:
                        offset = _factor(last_word, place * SIZE + WIDTH, WIDTH)
                        x_sum = tl.load(x_sums + at)
                        if OFFSET == ZEROS:
                            sums -= (offset.to(tl.int32) * ONE)[:, None] * x_sum.to(tl.int32)[None, :]
                        else:
                            if units is not None:
                                offset *= _factor(pair, 16, 16)
                            acc += offset[:, None] * x_sum[None, :]
                    a_step = a_rows + step * STEP
                    sums = _multiply_group(a_step, w_low, w_high, sums, block * SHARING + place, GROUP)
                    acc += sums.to(tl.float32) * (scale[:, None] * (x_scale * (1 / ONE))[None, :])
        total += acc
    _write(tl.trans(total), bias, out, part, rows, panel * PANEL + n, M, N)


@triton.jit(do_not_specialize=["splits"])
def add_splits(parts, bias, out, splits, N, BLOCK: tl.constexpr):
    """Add `parts` `[splits, M, N]` in order, and `bias` `[N]` or None, into `out` `[M, N]`.

    Grid: (M, N / BLOCK).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        place = parts + (split * tl.num_programs(0) + row) * N + columns
        total += tl.load(place, mask=is_column, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0)
    tl.store(out + row * N + columns, total, mask=is_column)


@triton.jit
def read_integers(
    rows,
    packed,
    factors,
    units,
    out,
    N,
    K,
    steps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of a packed weight (see `multiply_integers`) as floats: `rows` `[n]` int64, to `out` `[n, K]`.

    A row that is missing is NaN. Grid: (n, K / BLOCK).
    """
    RUN: tl.constexpr = STEP // 2
    COLUMNS: tl.constexpr = 1 if OFFSET == NO_OFFSET else 2
    row = tl.load(rows + tl.program_id(0))
    is_there = (row >= 0) & (row < N)
    panel, n = tl.where(is_there, row, 0) // PANEL, tl.where(is_there, row, 0) % PANEL
    inputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.minimum(inputs, steps * STEP - 1)
    step, run, place = panel * steps + at // STEP, at % STEP // RUN, at % RUN
    if BITS == 4:
        byte = tl.load(packed + (step * PANEL + n) * RUN + place).to(tl.int32)
        integers = byte >> 4 * run & 15
        if OFFSET != MINIMUMS:
            integers = (integers ^ 8) - 8
    else:
        integers = tl.load(packed + ((step * 2 + run) * PANEL + n) * RUN + place).to(tl.int32)
    bit = at % STEP // GROUP * COLUMNS * WIDTH
    words = factors + step * (WORDS * PANEL) + n
    scale = _factor(tl.load(words + bit // 32 * PANEL), bit % 32, WIDTH)
    if units is not None:
        pair = tl.load(units + (step // UNIT_STEPS) * PANEL + n)
        scale *= _factor(pair, 0, 16)
    if OFFSET != NO_OFFSET:
        bit += WIDTH
        offset = _factor(tl.load(words + bit // 32 * PANEL), bit % 32, WIDTH)
    if OFFSET == ZEROS:
        integers -= offset.to(tl.int32)
    floats = integers.to(tl.float32) * scale
    if OFFSET == MINIMUMS:
        floats += offset if units is None else offset * _factor(pair, 16, 16)
    floats = tl.where(is_there, floats, float("nan"))
    tl.store(out + tl.program_id(0).to(tl.int64) * K + inputs, floats, mask=inputs < K)
