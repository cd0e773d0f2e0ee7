"""The native attention kernels against stock operations, for every instruction set that runs here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import written
from soothsay.core.tree import DraftTree
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.attention import AttentionOps
from soothsay.model.ops.operands import Scoring

attend = AttentionOps().attend

BLOCK_SIZE, NUM_BLOCKS = 8, 340
HEADS = [(2, 3, 64), (1, 1, 32), (4, 8, 64), (2, 2, 128), (1, 4, 256), (1, 7, 96)]
WINDOWS = (None, 1, 70, -50)
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.int8]


def shape(heads: tuple[int, int, int]) -> str:
    """The name of a case: "2x3x64"."""
    return "x".join(map(str, heads))


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    tree = DraftTree(1)
    while len(tree) < nodes:
        tree.add(int(rng.integers(len(tree))), int(rng.integers(100)))
    return tree


def random_requests(rng: np.random.Generator) -> list[Rows]:
    """A chunk, a token, a tree, and nodes whose ancestors have their KV already; in scattered blocks.

    Kernels join the sums over each 512 keys. The chunk and its windows of 70 keys cross such a border.
    """
    blocks = rng.permutation(NUM_BLOCKS)
    tables = [blocks[:80], blocks[80:100], blocks[100:320], blocks[320:]]
    return [
        Rows(rng.integers(0, 9, 90), int(rng.integers(500, 512)), tables[0]),
        Rows(rng.integers(0, 9, 1), int(rng.integers(0, 140)), tables[1], DraftTree(1)),
        Rows(rng.integers(0, 9, 2), int(rng.integers(1000, 1600)), tables[2], random_tree(rng, 17)),
        Rows(rng.integers(0, 9, 0), 60, tables[3], random_tree(rng, 12), first=4),
    ]


def pack(requests: list[Rows], group: int) -> Batch:
    return Batch.pack(requests, block_size=BLOCK_SIZE, group=group, windows=WINDOWS)


def inputs(heads: int, group: int, d: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = torch.randn(rows, heads * group, d) * 3 / d**0.5
    return q, pool(torch.randn(2 * heads, NUM_BLOCKS * BLOCK_SIZE, d), dtype)


def pool(kv: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values `[2 * H_kv, S, d]` as rows of a KV pool."""
    return written(*kv.chunk(2), dtype)


def sinks(heads: int, group: int, d: int) -> Tensor:
    """Scores below, among and above those of `inputs`."""
    return torch.linspace(-9, 9, heads * group) + 1.5


@pytest.mark.parametrize("heads", HEADS, ids=shape)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_to_stock_operations(
    kernels: NativeKernels, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(sum(heads))
    torch.manual_seed(0)
    batch = pack(random_requests(rng), heads[1])
    q, kv = inputs(*heads, len(batch.tokens), dtype)
    rounded = dtype is not torch.float32 and kernels.multiplies_bfloat16  # weights are rounded to bfloat16
    bounds = {torch.float32: 2e-5, torch.int16: 5e-4, torch.int8: 0.03}  # integers may differ by one
    bound = 0.03 if rounded else bounds.get(dtype, 2e-5)
    for window in WINDOWS:
        for softcap in (None, 2.0):
            expected = attend(q, kv, batch, Scoring(softcap, window))
            result = kernels.attend(q, kv, batch, Scoring(softcap, window))
            assert (result - expected).abs().max() < bound
        expected = attend(q, kv, batch, Scoring(window=window, sinks=sinks(*heads)))
        result = kernels.attend(q, kv, batch, Scoring(window=window, sinks=sinks(*heads)))
        assert (result - expected).abs().max() < bound


@pytest.mark.parametrize("heads", HEADS[:2], ids=shape)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_by_distance(kernels: NativeKernels, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Keys before rows and after them, nearer and farther than the last distance with a number of its own."""
    torch.manual_seed(0)
    batch = pack(random_requests(np.random.default_rng(0)), heads[1])
    paths = [
        replace(path, positions=np.full_like(path.positions, len(path.keys) - 1)) for path in batch.paths
    ]
    q, kv = inputs(*heads, len(batch.tokens), dtype)
    bound = 0.03 if dtype is torch.int8 or kernels.multiplies_bfloat16 else 1e-3
    for rows in (batch, replace(batch, paths=paths, stacked=())):
        for most in (3, 40):
            how = Scoring(relative=3 * torch.randn(heads[0] * heads[1], 2 * most + 1))
            assert (kernels.attend(q, kv, rows, how) - attend(q, kv, rows, how)).abs().max() < bound


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_sink_is_a_key_without_a_value(softcap: float | None) -> None:
    """The result of float64 sums over each row's own keys."""
    torch.manual_seed(0)
    chunk, group = Rows(np.arange(90), 0, np.arange(40)), 3
    batch = pack([chunk], group)
    q, kv = inputs(2, group, 32, 90, torch.float32)
    own, kept = sinks(2, group, 32), list[float]()
    result = attend(q, kv, batch, Scoring(softcap, 70, own)).view(90, 6, 32)
    for row in (0, 20, 89):
        seen = slice(max(0, row - 69), row + 1)
        for head in range(6):
            scores = kv[head // group, seen].double() @ q[row, head].double()
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            weights = torch.cat([scores, own[head : head + 1].double()]).softmax(0)[:-1]
            expected = weights @ kv[2 + head // group, seen].double()
            torch.testing.assert_close(result[row, head].double(), expected, rtol=0, atol=1e-5)
            kept.append(float(weights.sum()))
    assert min(kept) < 0.1 < 0.9 < max(kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_of_any_size(kernels: NativeKernels, dtype: torch.dtype) -> None:
    batch = pack([Rows(np.arange(100), 0, np.arange(NUM_BLOCKS))], 1)
    q, kv = inputs(1, 1, 32, 100, dtype)
    none = kernels.attend(q, kv, batch)
    assert torch.equal(kernels.attend(q, kv, batch, Scoring(sinks=torch.tensor([-1e4]))), none)
    assert torch.equal(kernels.attend(q, kv, batch, Scoring(sinks=torch.tensor([-torch.inf]))), none)
    hidden = kernels.attend(q, kv, batch, Scoring(sinks=torch.tensor([1e4])))
    assert torch.equal(hidden, torch.zeros_like(none))


@pytest.mark.parametrize("heads", HEADS, ids=shape)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_company_or_threads(
    kernels: NativeKernels, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(sum(heads))
    torch.manual_seed(0)
    requests = random_requests(rng)
    together = pack(requests, heads[1])
    q, kv = inputs(*heads, len(together.tokens), dtype)
    for own, window in ((None, None), (sinks(*heads), None), (sinks(*heads), 70)):
        read = partial(kernels.attend, how=Scoring(window=window, sinks=own))
        expected = read(q, kv, together)
        torch.set_num_threads(2)
        assert torch.equal(read(q, kv, together), expected)
        torch.set_num_threads(1)
        begin = 0
        for request in requests:
            end = begin + request.num_rows
            part = read(q[begin:end], kv, pack([request], heads[1]))
            assert torch.equal(part, expected[begin:end])
            begin = end
        chunk = requests[0]
        for row in (0, 1, 63, 64, 89):  # each of a chunk's rows as if it came alone, after those before it
            alone = Rows(chunk.tokens[row : row + 1], chunk.start + row, chunk.table)
            part = read(q[row : row + 1], kv, pack([alone], heads[1]))
            assert torch.equal(part[0], expected[row])


def test_threads_share_a_context_that_is_too_long_for_one_wave(kernels: NativeKernels) -> None:
    """Sums that wait to be joined take 8 MB at most: those of these rows over 18 times 512 keys."""
    torch.manual_seed(0)
    rows, keys = 112, 19 * 512
    chunk = Rows(np.arange(rows), keys - rows, np.arange(keys // BLOCK_SIZE))
    q, kv = torch.randn(rows, 4, 256), pool(torch.randn(2, keys, 256), torch.int16)
    alone = kernels.attend(q, kv, pack([chunk], 4))
    torch.set_num_threads(2)
    assert torch.equal(kernels.attend(q, kv, pack([chunk], 4)), alone)
    torch.set_num_threads(1)


@pytest.mark.parametrize("heads", HEADS, ids=shape)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paths_get_the_same_bits_with_their_common_context_and_each_by_itself(
    kernels: NativeKernels, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    together = pack(random_requests(np.random.default_rng(sum(heads))), heads[1])
    assert max(path.shared for path in together.paths) > 128
    apart = replace(together, paths=tuple(replace(path, shared=0) for path in together.paths))
    q, kv = inputs(*heads, len(together.tokens), dtype)
    for window in WINDOWS:
        for own in (None, sinks(*heads)):
            how = Scoring(window=window, sinks=own)
            results = [kernels.attend(q, kv, batch, how) for batch in (together, apart)]
            assert torch.equal(*results)


def test_large_scores_do_not_overflow(kernels: NativeKernels) -> None:
    batch = pack([Rows(np.arange(100), 0, np.arange(NUM_BLOCKS))], 1)
    q, kv = inputs(1, 1, 32, 100, torch.float32)
    result = kernels.attend(q * 1000, kv, batch)
    assert torch.isfinite(result).all()
    assert (result - attend(q * 1000, kv, batch)).abs().max() < 1e-3


@pytest.mark.parametrize("d", [32, 128, 1024])
@pytest.mark.parametrize("even", [False, True])
def test_the_largest_integer_scores_do_not_overflow(kernels: NativeKernels, d: int, even: bool) -> None:
    """A query and its key point in one direction: along an axis, or along all of them."""
    batch = pack([Rows(np.arange(2), 0, np.arange(NUM_BLOCKS))], 1)
    direction = torch.full((d,), d**-0.5) if even else torch.eye(d)[d // 2]
    keys = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, d)
    keys[0], keys[1] = 300 * direction, -300 * direction
    values = torch.zeros_like(keys)
    values[0] = 1
    q = 0.002 * direction.expand(2, 1, d).contiguous()
    result = kernels.attend(q, written(keys[None], values[None], torch.int16), batch)
    expected = torch.tensor([0.6, -0.6]).softmax(0)[0]
    assert (result[1] - expected).abs().max() < (5e-3 if kernels.multiplies_bfloat16 else 1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e12])
def test_integer_keys_of_any_length(kernels: NativeKernels, size: float) -> None:
    batch = pack([Rows(np.arange(100), 0, np.arange(NUM_BLOCKS))], 1)
    q, kv = torch.randn(100, 1, 32), torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, 32)
    kv[0] *= size
    kv = written(*kv.chunk(2), torch.int16)
    result = kernels.attend(q, kv, batch)
    assert (result - attend(q, kv, batch)).abs().max() < 0.03


def test_integer_keys_are_nearer_than_bfloat16(kernels: NativeKernels) -> None:
    """With one large dimension, which shifts all scores of a query, as models with biases of keys have it."""
    torch.manual_seed(0)
    batch = pack([Rows(np.arange(100), 0, np.arange(NUM_BLOCKS))], 1)
    q, kv = torch.randn(100, 1, 64), torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, 64)
    kv[0, :, 5] += 100
    exact = attend(q, kv, batch)
    errors = [(kernels.attend(q, pool(kv, dtype), batch) - exact).square().mean() for dtype in DTYPES[1:3]]
    assert errors[1] < errors[0] / 20
