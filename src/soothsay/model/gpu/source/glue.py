"""Operations between linear layers. A row's bits depend on the row alone.

One program owns the rows that it sums, and its shape depends on their size alone. Exponentials are
approximations on a device, but functions of one number. A pointer is None where there is nothing to read.
"""

import triton
import triton.language as tl

from soothsay.model.gpu.source.attention import bounded_score


@triton.jit
def inverse_rms(squares, size, eps):
    """`1 / rms`, of the sums of squares of rows of `size` numbers."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, size * 1.0) + eps))


@triton.jit
def normed(v, weight, bias, at, exists, size, eps, CENTRED: tl.constexpr):
    """The norm of a row `v`, whose missing numbers are zeros."""
    if CENTRED:
        mean = tl.div_rn(tl.sum(v, axis=0), size * 1.0)
        v = tl.where(exists, v - mean, 0.0)
    scale = inverse_rms(tl.sum(v * v, axis=0), size, eps)
    v = (v * scale) * tl.load(weight + at, mask=exists, other=0.0)
    return v if bias is None else v + tl.load(bias + at, mask=exists, other=0.0)


@triton.jit
def add_norm(
    x,
    delta,
    post,
    weight,
    bias,
    total,
    out,
    size,
    post_eps,
    eps,
    POST_CENTRED: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = x + delta, or x plus the norm `post` of delta; out = its norm. One program a row.

    Without delta, total is x, and it is not written.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    exists = at < size
    v = tl.load(x + row * size + at, mask=exists, other=0.0).to(tl.float32)
    if delta is not None:
        d = tl.load(delta + row * size + at, mask=exists, other=0.0).to(tl.float32)
        if post is not None:
            d = normed(d, post, None, at, exists, size, post_eps, POST_CENTRED)
        v = v + d
        tl.store(total + row * size + at, v, mask=exists)
    if weight is not None:
        v = normed(v, weight, bias, at, exists, size, eps, CENTRED)
        tl.store(out + row * size + at, v.to(out.dtype.element_ty), mask=exists)


@triton.jit
def stored(x, kind: tl.constexpr):
    """`x` as a KV pool keeps it. What float16 cannot hold becomes its largest number."""
    if kind == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(kind)


@triton.jit
def head_norm(x, inverse, weight, is_own, at, SIZE: tl.constexpr):
    """The numbers `at` of some heads, `[HEADS, D]`, of which a part is normed."""
    if weight is not None:
        own = tl.load(weight + at, mask=at < SIZE, other=0.0)[None, :]
        x = tl.where(is_own[:, None], (x * inverse) * own, x)
    return x


@triton.jit(do_not_specialize_on_alignment=["places"])
def rotate_store(
    qkv,
    q_weight,
    k_weight,
    v_weight,
    cos,
    sin,
    q,
    kv,
    places,
    slots,
    queries,
    gates,
    keys,
    q_eps,
    k_eps,
    v_eps,
    scale,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Norm and rotate heads of a row. Queries go to q, keys and values to slot `places[row]` of kv.

    qkv `[N, queries + gates + 2 * keys, SIZE]`; cos, sin `[N, SIZE]`; q `[N, queries, SIZE]`;
    kv `[2 * keys, slots, SIZE]`. One program a row and `HEADS` of its heads.
    """
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    partner = tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)  # rotates with d
    is_q, is_v = head < queries, head >= queries + keys
    real = (head < queries + 2 * keys)[:, None] & (d < SIZE)[None, :]
    source = (row * (queries + gates + 2 * keys) + tl.where(is_q, head, head + gates))[:, None] * SIZE
    x = tl.load(qkv + source + d[None, :], mask=real, other=0.0).to(tl.float32)
    y = tl.load(qkv + source + partner[None, :], mask=real, other=0.0).to(tl.float32)
    eps = tl.where(is_q, q_eps, tl.where(is_v, v_eps, k_eps))
    inverse = inverse_rms(tl.sum(x * x, axis=1), SIZE, eps)[:, None]
    is_k = (head >= queries) & (head < queries + keys)
    x = head_norm(x, inverse, q_weight, is_q, d, SIZE)
    x = head_norm(x, inverse, k_weight, is_k, d, SIZE)
    x = head_norm(x, inverse, v_weight, is_v, d, SIZE)
    y = head_norm(y, inverse, q_weight, is_q, partner, SIZE)
    y = head_norm(y, inverse, k_weight, is_k, partner, SIZE)
    turns = row * SIZE + d
    c = tl.load(cos + turns, mask=d < SIZE, other=0.0)[None, :]
    s = tl.load(sin + turns, mask=d < SIZE, other=0.0)[None, :]
    x = tl.where(is_v[:, None], x, x * c + y * s)
    out = (row * queries + head)[:, None] * SIZE + d[None, :]
    tl.store(q + out, (x * scale).to(q.dtype.element_ty), mask=real & is_q[:, None])
    if keys > 0:
        slot = tl.load(places + row)
        out = ((head - queries).to(tl.int64) * slots + slot)[:, None] * SIZE + d[None, :]
        tl.store(kv + out, stored(x, kv.dtype.element_ty), mask=real & (head >= queries)[:, None])


@triton.jit
def sigmoid(x):
    """`1 / (1 + e^-x)`."""
    return tl.div_rn(1.0, tl.exp(-x) + 1.0)


@triton.jit
def error_function(x):
    """Within 1.5e-7 of erf (Abramowitz and Stegun 1964, 7.1.26)."""
    size = tl.abs(x)
    t = tl.div_rn(1.0, size * 0.3275911 + 1.0)
    sums = ((((t * 1.061405429 - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    share = 1.0 - sums * tl.exp(-(x * x))
    return tl.where(x < 0, -share, share)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """See `ACTIVATIONS` and `UNGATED` in `soothsay.core.functions`."""
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2" or ACTIVATION == "gated_relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "silu" or ACTIVATION == "plain_silu":
        y = tl.div_rn(x, tl.exp(-x) + 1.0)
    elif ACTIVATION == "gelu" or ACTIVATION == "plain_gelu":
        y = x * 0.5 * (error_function(x * 0.7071067811865476) + 1.0)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh" or ACTIVATION == "plain_gelu_tanh")
        y = x * 0.5 * (bounded_score(0.7978845608028654 * (x + 0.044715 * (x * x * x)), 1.0) + 1.0)
    return y


@triton.jit
def gated(gate_up, out, size, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """The activation of the first half of a row times the second: `[N, 2 * size]` to `[N, size]`.

    Without GATED it is that of `[N, size]`. One program a row and `BLOCK` numbers.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    if not GATED:
        x = activated(tl.load(gate_up + row * size + at, mask=exists, other=0.0).to(tl.float32), ACTIVATION)
    else:
        gate_at = gate_up + row * (2 * size) + at
        gate = tl.load(gate_at, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(gate_at + size, mask=exists, other=0.0).to(tl.float32)
        if ACTIVATION == "clipped_swiglu":
            gate = tl.minimum(gate, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0)
            x = gate * sigmoid(1.702 * gate) * (up + 1.0)
        else:
            x = activated(gate, ACTIVATION) * up
    tl.store(out + row * size + at, x.to(out.dtype.element_ty), mask=exists)
