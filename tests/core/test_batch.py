"""Batch.pack against a brute-force oracle: which slots does each row see, and in which order?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from kernels import FASTEST, STOCK

from soothsay.core.batch import Batch, Rows
from soothsay.core.paths import KEY_BLOCK, Lanes, Path
from soothsay.core.tree import DraftTree
from soothsay.model.native.layout import FlatPaths
from soothsay.model.ops.kernels import StockKernels

Pack = Callable[..., Batch]
BLOCK_SIZE = 8
WINDOWS = (None, 1, 5, 200)
KINDS = ("chunk", "single", "chain", "tree", "level")


@dataclass(frozen=True)
class Row:
    """The expected content of a row of the pass."""

    token: int
    position: int
    slot: int
    sees: list[int]  # slots of its own path, in order of position
    asks: bool  # for logits


def random_tree(rng: np.random.Generator, root: int, nodes: int) -> DraftTree:
    tree = DraftTree(root)
    while len(tree) < nodes:
        tree.add(int(rng.integers(len(tree))), int(rng.integers(100)))
    return tree


def random_rows(rng: np.random.Generator, kind: str, free: list[int] | None) -> Rows:
    """A request of this kind; `free` are blocks to take its table from, None for KV in the pass itself."""
    start = 0 if free is None else int(rng.choice([0, 1, 7, 8, 40, 120, 127, 128, 300]))
    pending = 1 if kind == "single" else int(rng.integers(1, 12))
    if kind == "level":
        start, pending = start + 1, 0
    tokens = rng.integers(0, 100, pending)
    root = int(tokens[-1]) if pending else 0
    tree = {
        "chunk": None,
        "single": DraftTree(root),
        "chain": DraftTree(root),
        "tree": random_tree(rng, root, int(rng.integers(2, 17))),
        "level": random_tree(rng, root, int(rng.integers(2, 17))),
    }[kind]
    if kind == "chain" and tree is not None:
        tree.extend(rng.integers(0, 100, int(rng.integers(1, 8))).tolist())
    first = int(rng.integers(1, len(tree))) if kind == "level" and tree is not None else 1
    table = None
    if free is not None:
        offsets = start + pending + (0 if tree is None else len(tree))
        blocks = [free.pop() for _ in range(-(-offsets // BLOCK_SIZE))]
        table = np.array(blocks, dtype=np.int64)
    return Rows(tokens, start, table, tree, first)


def expected(request: Rows, base: int) -> list[Row]:
    """The rows of one request whose first row in the pass is `base`, from the definitions in `Rows`."""

    def slot(offset: int) -> int:
        if request.table is None:
            return base + offset
        return int(request.table[offset // BLOCK_SIZE]) * BLOCK_SIZE + offset % BLOCK_SIZE

    tree, ctx = request.tree, request.start + len(request.tokens) - 1
    rows = []
    for position, token in enumerate(request.tokens.tolist(), start=request.start):
        sees = [slot(offset) for offset in range(position + 1)]
        rows.append(Row(token, position, slot(position), sees, tree is not None and position == ctx))
    for node in range(request.first, len(tree) if tree is not None else 0):
        assert tree is not None
        path = [slot(offset) for offset in range(ctx + 1)] + [slot(ctx + n) for n in tree.path(node)[1:]]
        rows.append(Row(tree.tokens[node], ctx + tree.depths[node], slot(ctx + node), path, True))
    return rows


def lane_of(batch: Batch, row: int) -> tuple[Lanes, int, int]:
    """Where a row's result is read from: lanes, number of the lane, place in it."""
    place = int(batch.lane_rows[row])
    for lanes in batch.lanes:
        num, m, _ = lanes.size
        if place < num * m:
            return lanes, place // m, place % m
        place -= num * m
    raise AssertionError(f"row {row} is in no lane")


def sees(batch: Batch, row: int, window: int | None) -> tuple[list[int], list[int]]:
    """Slots that a row sees, and their indices in the list of keys."""
    lanes, lane, place = lane_of(batch, row)
    num, m, num_keys = lanes.size
    assert int(lanes.rows.view(num, m)[lane, place]) == row
    bias = lanes.bias[window][lane, place, 0]
    assert bool(((bias == 0) | (bias == -np.inf)).all())
    visible = (bias == 0).nonzero()[:, 0]
    return lanes.keys.view(num, num_keys)[lane, visible].tolist(), visible.tolist()


def seen_flat(batch: Batch) -> dict[int, list[int]]:
    """Slots that each row sees, by the other layout: paths end to end."""
    flat, found = FlatPaths.of(batch.paths).lists, {}
    keys, rows = pairwise(flat.key_begin.tolist()), pairwise(flat.row_begin.tolist())
    for (key, _), (begin, end) in zip(keys, rows, strict=True):
        for row, position in zip(
            flat.rows[begin:end].tolist(), flat.positions[begin:end].tolist(), strict=True
        ):
            assert row not in found, "a row is computed once"
            found[row] = flat.keys[key : key + position + 1].tolist()
    own = np.split(flat.keys, flat.key_begin[1:-1])
    assert flat.shared[0] == 0
    for (before, path), shared in zip(pairwise(own), flat.shared[1:].tolist(), strict=True):
        assert path[:shared].tolist() == before[:shared].tolist()
    return found


def check(batch: Batch, requests: list[Rows]) -> None:
    rows: list[Row] = []
    spans, asked = [], []
    for request in requests:
        own = expected(request, len(rows))
        assert request.num_rows == len(own)
        begin = len(asked)
        asked += [len(rows) + i for i, row in enumerate(own) if row.asks]
        spans.append((begin, len(asked)))
        rows += own
    assert batch.tokens.tolist() == [row.token for row in rows]
    assert batch.positions.tolist() == [row.position for row in rows]
    assert batch.slots.tolist() == [row.slot for row in rows]
    assert batch.logit_rows.tolist() == asked
    assert list(batch.spans) == spans
    for number, row in enumerate(rows):
        for window in WINDOWS:
            first = 0 if window is None else max(0, row.position + 1 - window)
            slots, indices = sees(batch, number, window)
            assert slots == row.sees[first:]
            assert indices == list(range(first, row.position + 1)), "a key stands where plain decoding has it"
    assert seen_flat(batch) == {number: row.sees for number, row in enumerate(rows)}


@pytest.fixture(params=["stock", "native"])
def pack(request: pytest.FixtureRequest) -> Pack:
    """`Batch.pack` with each of its layouts."""
    if request.param == "native" and isinstance(FASTEST, StockKernels):
        pytest.skip("no native kernels run here")
    return partial(Batch.pack, ops=STOCK if request.param == "stock" else FASTEST)


@pytest.mark.parametrize("seed", range(40))
def test_each_row_sees_its_own_path_in_order_of_position(pack: Pack, seed: int) -> None:
    rng = np.random.default_rng(seed)
    free = rng.permutation(600).tolist()
    requests = [random_rows(rng, str(kind), free) for kind in rng.choice(KINDS, int(rng.integers(1, 7)))]
    check(pack(requests, block_size=BLOCK_SIZE, group=1 + seed % 8, windows=WINDOWS), requests)


@pytest.mark.parametrize("seed", range(10))
def test_without_a_pool_slots_are_rows_of_the_pass(pack: Pack, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.choice([kind for kind in KINDS if kind != "level"], 4)
    requests = [random_rows(rng, str(kind), None) for kind in kinds]
    batch = pack(requests, group=2, windows=WINDOWS)
    check(batch, requests)
    assert all(slot == row for row, slot in enumerate(batch.slots.tolist()))


@pytest.mark.parametrize("pending", [255, 256, 257, 600])
def test_a_long_chunk_sees_what_a_short_one_sees(pack: Pack, pending: int) -> None:
    tokens, tree = np.arange(pending), DraftTree(pending - 1)
    tree.extend([1, 2, 3])
    requests = [
        Rows(tokens, 0, np.arange(100), DraftTree(pending - 1)),
        Rows(tokens, 5, np.arange(100, 200), tree),
        Rows(tokens, 3, np.arange(200, 300)),
    ]
    check(pack(requests, block_size=BLOCK_SIZE, group=3, windows=WINDOWS), requests)


@pytest.mark.parametrize("group", range(1, 9))
def test_lanes_hold_enough_queries_and_not_many_more(group: int) -> None:
    """At least eight, or twelve where they do not come in fours; fewer would have other bits."""
    rng = np.random.default_rng(group)
    free = rng.permutation(600).tolist()
    requests = [random_rows(rng, kind, free) for kind in KINDS * 2]
    batch = Batch.pack(requests, block_size=BLOCK_SIZE, group=group)
    for lanes in batch.lanes:
        num, m, num_keys = lanes.size
        assert m * group >= (12 if m * group % 4 else 8)
        assert m & (m - 1) == 0
        assert num_keys % KEY_BLOCK == 0
        assert lanes.bias[None].shape == (num, m, 1, num_keys)
        assert int(lanes.keys.min()) >= 0
        assert int(lanes.keys.max()) < 600 * BLOCK_SIZE
    alone = Batch.pack(requests[1:2], block_size=BLOCK_SIZE, group=group)
    (lanes,) = alone.lanes
    assert (lanes.size[1] // 2) * group < 12, "half as many would be too few"


def test_a_filler_row_repeats_its_lane_s_first_row() -> None:
    requests = [Rows(np.array([3, 4, 5]), 0), Rows(np.array([6, 7]), 0)]
    (lanes,) = Batch.pack(requests, group=1).lanes
    assert lanes.size == (2, 8, KEY_BLOCK)
    assert lanes.rows.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 3, 4, 3, 3, 3, 3, 3, 3]
    assert (lanes.bias[None][1, :, 0] == 0).sum(-1).tolist() == [1, 2, 1, 1, 1, 1, 1, 1]


def test_a_short_request_is_not_padded_to_a_long_neighbour() -> None:
    table = np.arange(400)
    lengths = [0, 130, 500, 2500]
    requests = [Rows(np.array([1]), length, table, DraftTree(1)) for length in lengths]
    requests.append(Rows(np.arange(200), 0, table))
    batch = Batch.pack(requests, block_size=BLOCK_SIZE, group=8)
    for row, length in enumerate(lengths):
        lanes, _, _ = lane_of(batch, row)
        needed = -(-(length + 1) // KEY_BLOCK)
        assert lanes.size[2] // KEY_BLOCK < 2 * needed
        assert lanes.size[1] == 1


def test_a_node_on_several_paths_is_computed_once() -> None:
    tree = DraftTree(9)
    for tail in ([1, 2, 3], [1, 2, 4], [1, 5], [6]):
        tree.extend(tail)
    batch = Batch.pack([Rows(np.array([8, 9]), 0, None, tree)], group=8)
    assert batch.tokens.tolist() == [8, 9, 1, 2, 3, 4, 5, 6]
    widths = [lanes.size[1] for lanes in batch.lanes for _ in range(lanes.size[0])]
    assert sorted(widths) == [1, 1, 1, 8], "five rows, filled up, and one for each further path"


def test_a_request_without_rows_takes_no_part() -> None:
    """A tree all of whose nodes have their KV, say."""
    tree = DraftTree(9)
    tree.extend([1, 2])
    idle = Rows(np.empty(0, dtype=np.int64), 4, np.arange(3), tree, first=3)
    busy = Rows(np.array([9]), 3, np.arange(3, 6), DraftTree(9))
    assert idle.num_rows == 0
    batch = Batch.pack([idle, busy], block_size=BLOCK_SIZE)
    assert batch.tokens.tolist() == [9]
    assert batch.spans == ((0, 0), (0, 1))


@pytest.mark.skipif(isinstance(FASTEST, StockKernels), reason="no native kernels run here")
def test_native_kernels_lay_out_the_same_batch() -> None:
    """Down to the order of paths, and to what they share: bits of sums in shared contexts depend on it."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        free = rng.permutation(600).tolist() if rng.random() < 0.8 else None
        kinds = [kind for kind in KINDS if kind != "level" or free is not None]
        requests = [random_rows(rng, str(kind), free) for kind in rng.choice(kinds, int(rng.integers(1, 7)))]
        keys = [rows.start + min(len(rows.tokens), 1) for rows in requests]  # of which the root's is the last
        firsts = [int(rng.integers(count)) for count in keys]
        requests = [rows._replace(first_key=first) for rows, first in zip(requests, firsts, strict=True)]
        stock, native = (Batch.pack(requests, block_size=BLOCK_SIZE, ops=own) for own in (STOCK, FASTEST))
        for name in ("tokens", "positions", "slots", "logit_rows"):
            assert getattr(stock, name).tolist() == getattr(native, name).tolist()
        assert (stock.spans, stock.num_slots) == (native.spans, native.num_slots)
        assert plain(stock.paths) == plain(native.paths)


def plain(paths: Sequence[Path]) -> list[object]:
    return [(list(path.rows), path.positions.tolist(), path.keys.tolist(), path.shared) for path in paths]


@pytest.mark.parametrize("tree", [None, DraftTree(1)])
def test_a_request_with_too_few_blocks(pack: Pack, tree: DraftTree | None) -> None:
    with pytest.raises(IndexError):
        pack([Rows(np.array([1, 2]), 7, np.arange(1), tree)], block_size=BLOCK_SIZE)


def test_nodes_need_blocks_too(pack: Pack) -> None:
    tree = DraftTree(2)
    rows = Rows(np.array([1, 2]), BLOCK_SIZE - 2, np.arange(1), tree)
    assert len(pack([rows], block_size=BLOCK_SIZE).tokens) == 2
    tree.extend([3])
    with pytest.raises(IndexError):
        pack([rows], block_size=BLOCK_SIZE)
