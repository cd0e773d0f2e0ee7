"""Kernels of draws: noise, the best tokens of parts of a row, and sums of probabilities in whole numbers.

A part of a row is BLOCK tokens that follow each other. What is joined over parts are whole numbers, so no
order of parts, tiles or threads counts. M are rows, V tokens of the vocabulary.
"""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _logarithm(x):
    """`core.noise.logarithm`."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    e = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    w = z * z
    odd = w * (w * 0.24279078841 + 0.40000972152)
    even = z * (w * 0.28498786688 + 0.66666662693)
    half = f * 0.5 * f
    return s * (half + (odd + even)) + e * 9.0580006145e-06 - half + f + e * 6.9313812256e-01


@triton.jit
def _gumbel(keys, row, token):
    """`core.noise.gumbel` of tokens under the key of a row."""
    first, second = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    hashed = _mix(_mix(token.to(tl.uint32) * 0x9E3779B1 + first) + second)
    u = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    rest = 1.0 - u
    lost = (0.0 - u) - (rest - 1.0)
    return 0.0 - _logarithm(0.0 - (_logarithm(rest) + tl.div_rn(lost, rest)))


@triton.jit
def _rank(x, token):
    """A whole number, larger for larger numbers, and for smaller tokens of equal ones. NaN is the largest."""
    bits = tl.where(x == x, (x + 0.0).to(tl.int32, bitcast=True), 0x7FC00000)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def noise(keys, tokens, out, token_stride, W, BLOCK: tl.constexpr):
    """keys [M, 2], tokens [M or 1, W] int64 -> out [M, W] float32, Gumbel noise. Grid (M, W / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row * token_stride + place, mask=place < W, other=0)
    tl.store(out + row * W + place, _gumbel(keys, row, token), mask=place < W)


@triton.jit
def ranks(x, out, V, BLOCK: tl.constexpr):
    """x [M, V] float32 -> out [M, V] int64, the ranks of all numbers. Grid (M, parts)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * V + token, mask=token < V, other=0.0)
    tl.store(out + row * V + token, _rank(number, token), mask=token < V)


@triton.jit
def best(
    x,
    temperatures,
    floors,
    lasts,
    keys,
    out,
    V,
    COUNT: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The ranks of the COUNT best numbers of each part: out [M, parts, COUNT] int64, the best first.

    With noise: of number / temperature + noise, where number / temperature is at least the floor, and the
    number's rank is at least the last one. Of the others, it is minus infinity. Grid (M, parts).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * V + token, mask=token < V, other=0.0)
    if HAS_NOISE:
        scaled = tl.div_rn(number, tl.load(temperatures + row))
        is_cut = (scaled < tl.load(floors + row)) | (_rank(number, token) < tl.load(lasts + row))
        number = tl.where(is_cut, -float("inf"), scaled + _gumbel(keys, row, token))
    nothing = -0x7FFFFFFFFFFFFFFF
    rank = tl.where(token < V, _rank(number, token), nothing)
    out += (row * tl.num_programs(1) + part) * COUNT
    for i in tl.static_range(COUNT):
        top = tl.max(rank, axis=0)
        tl.store(out + i, top)
        rank = tl.where(rank == top, nothing, rank)


@triton.jit
def masses(x, temperatures, tops, floors, lasts, tokens, out, V, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Probabilities of a part, in units of 2^-40 of the likeliest token's: out [M, parts, COUNT + 1] int64.

    They are the sums over tokens that come before each of COUNT tokens [M, COUNT], and over all, of what
    `best` does not cut. tops [M]: the largest numbers, divided by temperatures. Grid (M, parts).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * V + token, mask=token < V, other=-float("inf"))
    temperature = tl.load(temperatures + row)
    scaled = tl.div_rn(number, temperature)
    rank = _rank(number, token)
    below = scaled - tl.load(tops + row)
    counts = (scaled >= tl.load(floors + row)) & (rank >= tl.load(lasts + row)) & (below <= 0.0)
    mass = tl.where(counts, (tl.exp(tl.where(counts, below, 0.0)) * 1099511627776.0).to(tl.int64), 0)
    out += (row * tl.num_programs(1) + part) * (COUNT + 1)
    for i in tl.static_range(COUNT):
        other = tl.load(tokens + row * COUNT + i)
        first = _rank(tl.load(x + row * V + other), other)
        tl.store(out + i, tl.sum(tl.where(rank > first, mass, 0), axis=0))
    tl.store(out + COUNT, tl.sum(mass, axis=0))
