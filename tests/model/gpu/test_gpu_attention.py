"""Attention of a GPU in the interpreter: its plan, its stock twin, and each row against itself elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import interpreter
import numpy as np
import pytest
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.batch import Batch, LayoutOps, Rows
from soothsay.core.paths import Path as KeyPath
from soothsay.core.tree import DraftTree
from soothsay.model.gpu import gpu_layers, gpu_plan
from soothsay.model.gpu.gpu_layers import GpuLayers
from soothsay.model.gpu.source import attention
from soothsay.model.ops.attention import AttentionOps
from soothsay.model.ops.operands import Scoring

attend = AttentionOps().attend

PAGE, BLOCKS = 8, 160
HEADS, GROUP, SIZE = 2, 3, 32
WINDOWS = None, 40, -48

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "pieces": {"window": -48},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 2, HEADS * GROUP)},
}
FORMS["bounded"] = FORMS["window"] | FORMS["softcap"] | FORMS["sinks"]
QUICK = "plain", "pieces", "bounded"  # which have all that the others have


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short blocks, chunks and runs, so that few keys have many of them."""
    for name, value in {"KEYS": 32, "CHUNK": 64, "RUN": 2}.items():
        monkeypatch.setattr(gpu_plan, name, value)
    monkeypatch.setattr(gpu_layers, "HEADS", 8)


def tree_of(parents: Sequence[int]) -> DraftTree:
    tree = DraftTree(1)
    for node, parent in enumerate(parents, start=1):
        tree.add(parent, node + 1, -1.0)
    return tree


def requests() -> list[Rows]:
    """Trees across borders of blocks, chunks and runs, prompts, single tokens, and a tree that grew."""
    blocks = 1 + np.random.default_rng(0).permutation(BLOCKS - 1)  # a lost mask reads block 0
    kinds: list[tuple[int, int, DraftTree | None, int, int]] = [
        (126, 1, tree_of([0, 0, 1, 2, 1, 3, 3]), 1, 0),  # its root is the last but one key of a run
        (63, 1, tree_of([0, 0, 1]), 1, 0),  # its root is the last key of a chunk
        (90, 9, None, 1, 0),  # a part of a prompt
        (127, 2, tree_of([0, 0, 2]), 1, 0),  # the end of a prompt, with a tree
        (0, 1, tree_of([]), 1, 0),  # a single token
        (30, 0, tree_of([0, 0, 1, 1, 2, 3]), 3, 0),  # a tree two of whose nodes have keys
        (69, 2, tree_of([0, 1, 2]), 1, 5),  # a chain, and hidden keys
        (69, 1, tree_of([0, 0, 1]), 1, 7),
    ]
    rows = []
    for start, pending, tree, first, hidden in kinds:
        used = -(-(start + pending + (0 if tree is None else len(tree))) // PAGE)
        table, blocks = blocks[:used].astype(np.int64), blocks[used:]
        start = start if pending else start + 1
        rows.append(Rows(np.arange(pending), start, table, tree, first, hidden))
    return rows


@dataclass(frozen=True)
class Row:
    """A row of a pass, and its keys in order of position."""

    keys: IntArray
    request: Rows


def listed(rows: Sequence[Rows]) -> list[Row]:
    """The rows as the stock operations lay them out."""
    layout = LayoutOps().lay_out(rows, PAGE, 1)
    keys: dict[int, IntArray] = {}
    for path in layout.paths:
        for row, position in zip(path.rows, path.positions, strict=True):
            keys[row] = path.keys[: position + 1]
    own = [request for request in rows for _ in range(request.num_rows)]
    return [Row(keys[row], request) for row, request in enumerate(own)]


def planned(numbers: IntArray, plan: gpu_plan.AttentionPlan) -> dict[int, dict[int, list[int]]]:
    """The slots that a plan gives to each row, by chunk. Asserts that results have places of their own."""
    items, folds, count, fold_at, row_at, table_at, node_at, _ = numbers[:8].tolist()
    positions, places = numbers[row_at : row_at + 2 * count].reshape(-1, 2).T.tolist()
    found: dict[int, dict[int, list[int]]] = {row: {} for row in range(count)}
    taken = set()
    width = 4 + plan.rows
    for at in range(8, fold_at + folds * width, width):
        nodes, ctx, shift, chunk, *own = numbers[at : at + width].tolist()
        for row in (row for row in own if row >= 0):
            whole = at >= fold_at
            begin, end = (0, positions[row] + 1) if whole else (chunk * gpu_plan.CHUNK,) * 2
            end = end if whole else min(begin + gpu_plan.CHUNK, positions[row] + 1)
            if begin >= end:
                continue
            slots = []
            for p in range(begin, end):
                offset = shift + (p if p <= ctx else ctx + numbers[node_at + nodes + p - ctx])
                slots.append(numbers[table_at + offset // plan.page] * plan.page + offset % plan.page)
            assert chunk not in found[row]
            found[row][chunk] = slots
            assert (places[row] < 0) == whole
            if not whole:
                place = places[row] + chunk
                assert place not in taken
                assert place < plan.places
                taken.add(place)
    assert (items, folds, len(taken)) == (plan.items, plan.folds, plan.places)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fold", [128, 4])
@pytest.mark.parametrize("group", [1, 3])
def test_a_plan_has_the_keys_of_each_path(group: int, fold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "FOLD", fold)
    layout = gpu_plan.lay_out(requests(), PAGE, group)
    stock = LayoutOps().lay_out(requests(), PAGE, group)
    for name in ("tokens", "positions", "slots", "logit_rows"):
        assert torch.equal(getattr(layout, name), getattr(stock, name))
    assert (layout.asked, [len(path.keys) for path in layout.paths]) == (
        stock.asked,
        [len(path.keys) for path in stock.paths],
    )
    assert stock.num_slots <= layout.num_slots <= BLOCKS * PAGE
    assert isinstance(layout.paths, gpu_plan.AttentionPlan)
    numbers = layout.lanes[0].numpy()
    assert numbers.dtype == np.int32
    assert len(numbers) % 2 == 0  # `upload` takes numbers of 8 bytes
    found = planned(numbers, layout.paths)
    for row, own in enumerate(listed(requests())):
        chunks = found[row]
        assert sorted(chunks) == list(range(len(chunks)))
        assert [slot for chunk in sorted(chunks) for slot in chunks[chunk]] == own.keys.tolist()


def test_random_plans_have_the_keys_of_each_path(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    monkeypatch.setattr(gpu_plan, "FOLD", 20)
    for _ in range(60):
        rows = []
        for _ in range(rng.integers(1, 5)):
            start, pending, size = rng.integers(0, 140), rng.integers(1, 40), rng.integers(0, 20)
            tree = None if size == 0 else tree_of([int(rng.integers(0, n)) for n in range(1, size)])
            used = -(-int(start + pending + size) // PAGE)
            table = None if start % 4 == 0 else rng.permutation(BLOCKS)[:used].astype(np.int64)
            hidden = int(rng.integers(0, start + 1)) if start % 3 == 0 else 0
            rows.append(Rows(np.arange(pending), int(start), table, tree, 1, hidden))
        layout = gpu_plan.lay_out(rows, PAGE, 2)
        assert isinstance(layout.paths, gpu_plan.AttentionPlan)
        found = planned(layout.lanes[0].numpy(), layout.paths)
        for row, own in enumerate(listed(rows)):
            assert [slot for chunk in sorted(found[row]) for slot in found[row][chunk]] == own.keys.tolist()


def test_rows_without_blocks_are_refused() -> None:
    rows = [Rows(np.arange(1), PAGE - 2, np.arange(1), tree_of([0, 0])), Rows(np.arange(1), 0, np.arange(1))]
    with pytest.raises(IndexError, match="fewer KV blocks"):
        gpu_plan.lay_out(rows, PAGE, 1)


def pool(dtype: torch.dtype, heads: int = HEADS, size: int = SIZE) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2 * heads, BLOCKS * PAGE, size).to(dtype)


def queries(rows: int, heads: int = HEADS * GROUP, size: int = SIZE) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(rows, heads, size) * 0.4


def packed(rows: Sequence[Rows], group: int = GROUP, **windows: Any) -> tuple[GpuLayers, Batch]:
    ops = GpuLayers()
    ops.programs = 2
    return ops, Batch.pack(rows, block_size=PAGE, group=group, windows=WINDOWS, ops=ops)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "form",
    [pytest.param(form, marks=() if form in QUICK else pytest.mark.slow) for form in FORMS],
)
def test_attention_is_that_of_stock_operations(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "window" in FORMS[form]:  # what is left out looks like a result
        empty = Tensor.new_empty
        monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(7))
    ops, batch = packed(requests())
    q, kv = queries(len(batch.tokens)), pool(torch.float32)
    stock = Batch.pack(requests(), block_size=PAGE, group=GROUP, windows=WINDOWS)
    used = np.unique(np.concatenate([row.keys for row in listed(requests())]))
    own = torch.full_like(kv, torch.nan)
    own[:, used] = kv[:, used]
    torch.testing.assert_close(
        ops.attend(q, own, batch, Scoring(**FORMS[form])),
        attend(q, kv, stock, Scoring(**FORMS[form])),
        rtol=1e-5,
        atol=2e-6,
    )


def committed(rows: Sequence[Row], kv: Tensor) -> tuple[list[Rows], Tensor]:
    """Each row as the only token of a request, as plain decoding has it, with its keys copied there."""
    alone, filled = [], 0
    parts = []
    for row in rows:
        used = -(-len(row.keys) // PAGE)
        own = kv.new_zeros(len(kv), used * PAGE, kv.shape[2])
        own[:, : len(row.keys)] = kv[:, torch.from_numpy(row.keys)]
        parts.append(own)
        table = np.arange(filled, filled + used)
        alone.append(Rows(np.zeros(1, dtype=np.int64), len(row.keys) - 1, table, DraftTree(0)))
        filled += used
    return alone, torch.cat(parts, dim=1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        ("plain", "hopper", torch.bfloat16),
        ("bounded", "plain", torch.float16),
        pytest.param("pieces", "plain", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_rows_keep_their_bits_when_their_keys_are_committed(form: str, kind: str, dtype: torch.dtype) -> None:
    every, kv = listed(requests()), pool(dtype)
    ops, batch = packed(requests())
    q = queries(len(every))
    some = range(len(form) % 3, len(every), 3)  # all rows in the three cases
    alone, copied = committed([every[row] for row in some], kv)
    with interpreter.dots(kind):
        together = ops.attend(q, kv, batch, Scoring(**FORMS[form]))[some]
        ops, batch = packed(alone)
        assert torch.equal(ops.attend(q[some], copied, batch, Scoring(**FORMS[form])), together)
        ops, batch = packed(alone[-1:])
        assert torch.equal(ops.attend(q[some[-1:]], copied, batch, Scoring(**FORMS[form])), together[-1:])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", [pytest.param("plain", marks=pytest.mark.slow), "bounded"])
def test_rows_keep_their_bits_in_other_tiles(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where one program folds all chunks: a run of three chunks has an order."""
    for name, value in {"CHUNK": 32, "RUN": 3}.items():
        monkeypatch.setattr(gpu_plan, name, value)
    kv, results, rows = pool(torch.bfloat16), list[Tensor](), requests()[2:5]
    for tiles, fold, programs in (((16, 64), 128, 2), ((16, 16), 128, 5), ((32, 128), 1, 3)):
        monkeypatch.setattr(gpu_plan, "TILES", tiles)
        monkeypatch.setattr(gpu_plan, "FOLD", fold)
        ops, batch = packed(rows)
        ops.programs = programs
        assert isinstance(batch.paths, gpu_plan.AttentionPlan)
        assert (batch.paths.folds > 0) == (fold == 1)
        results.append(ops.attend(queries(len(batch.tokens)), kv, batch, Scoring(**FORMS[form])))
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_keep_their_bits_in_blocks_of_full_size() -> None:
    """The constants that devices use, with a border of chunks and of runs between context and tree."""
    start = gpu_plan.RUN * gpu_plan.CHUNK - 3
    table = np.random.default_rng(1).permutation(BLOCKS)[: start // PAGE + 3].astype(np.int64)
    tree = Rows(np.zeros(1, dtype=np.int64), start, table, tree_of([0, 1, 2, 1, 4, 5]))
    kv, [*rows] = pool(torch.bfloat16, 1, 16), listed([tree])
    q = queries(len(rows), 1, 16)
    ops, batch = packed([tree], group=1)
    together = ops.attend(q, kv, batch)
    deep = len(rows) - 1
    alone, copied = committed(rows[deep:], kv)
    ops, batch = packed(alone, group=1)
    assert torch.equal(ops.attend(q[deep:], copied, batch), together[deep:])


def test_no_sum_has_an_order_that_tiles_decide() -> None:
    """On a device `tl.sum` adds as the tile's layout has it. The interpreter cannot tell."""
    assert "tl.sum" not in Path(attention.__file__).read_text()


def test_sinks_of_any_size() -> None:
    ops, batch = packed([Rows(np.arange(3), 4, np.arange(3), None)])
    q, kv, each = queries(3), pool(torch.bfloat16), torch.ones(HEADS * GROUP)
    none = ops.attend(q, kv, batch)
    assert torch.equal(ops.attend(q, kv, batch, Scoring(sinks=each * -torch.inf)), none)
    assert torch.equal(ops.attend(q, kv, batch, Scoring(sinks=each * 1e4)), torch.zeros_like(none))


def test_rows_that_fill_a_pass_are_copies_of_the_last_one() -> None:
    [single] = [Rows(np.arange(1), 20, np.arange(3), DraftTree(0))]
    ops, batch = packed([single])
    q, kv = queries(1), pool(torch.bfloat16)
    out = ops.attend(q.repeat(5, 1, 1), kv, batch)
    assert torch.equal(out, ops.attend(q, kv, batch).expand(5, -1))


@pytest.mark.parametrize("size", [16, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_of_all_sizes(size: int, dtype: torch.dtype) -> None:
    prompt = [Rows(np.arange(18), 3, np.arange(5, 9), None)]
    ops, batch = packed(prompt, group=2)
    q, kv = queries(18, 2, size).to(dtype), pool(dtype, 1, size)
    stock = Batch.pack(prompt, block_size=PAGE, group=2)
    out = ops.attend(q, kv, batch)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), attend(q.float(), kv, stock), rtol=0.02, atol=0.01)


def test_keys_within_the_pass() -> None:
    rows = [Rows(np.arange(5), 0, None, None), Rows(np.arange(11), 0, None, tree_of([0, 0]))]
    ops, batch = packed(rows)
    q, kv = queries(len(batch.tokens)), pool(torch.float32)[:, : len(batch.tokens)].contiguous()
    stock = Batch.pack(rows, block_size=PAGE, group=GROUP)
    torch.testing.assert_close(ops.attend(q, kv, batch), attend(q, kv, stock), rtol=1e-5, atol=2e-6)


def test_paths_that_were_laid_out_elsewhere() -> None:
    """A block of a drafter: all rows see all keys."""
    ops, batch = packed([Rows(np.arange(6), 0, None, None)])
    keys = np.random.default_rng(2).permutation(BLOCKS * PAGE)[:30]
    paths = [KeyPath([0, 1, 2], np.full(3, 29), keys), KeyPath([3, 4, 5], np.array([1, 2, 3]), keys[:4])]
    elsewhere = replace(batch, paths=paths, stacked=())
    q, kv = queries(6), pool(torch.float32)
    out = ops.attend(q, kv, elsewhere)
    torch.testing.assert_close(out, attend(q, kv, replace(elsewhere)), rtol=1e-5, atol=2e-6)


def test_heads_that_do_not_fit_take_stock_operations() -> None:
    ops, batch = packed([Rows(np.arange(6), 0, None, None)], group=1)
    q, kv = queries(6, 1, 512), pool(torch.float32, 1, 512)
    stock = Batch.pack(batch.requests, block_size=PAGE, windows=WINDOWS)
    assert torch.equal(ops.attend(q, kv, batch), attend(q, kv, stock))
