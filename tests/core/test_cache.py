"""KV blocks: their owners, their contents, the order of eviction, and their memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels import FASTEST, STOCK

from soothsay.core.batch import LayoutOps
from soothsay.core.cache import BlockAllocator, KVPool, Move
from soothsay.core.tenant import block_digest


def filled(allocator: BlockAllocator, names: str) -> list[int]:
    """A block for each letter, held, and registered as holding it."""
    blocks = allocator.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        allocator.register(block, name.encode())
    return blocks


def found(allocator: BlockAllocator, names: str) -> str:
    """Which prefix of `names` is there; holds nothing afterwards."""
    blocks = allocator.find([name.encode() for name in names])
    allocator.release(blocks)
    return names[: len(blocks)]


def test_blocks_are_handed_out_once_lowest_first() -> None:
    allocator = BlockAllocator(4, 16)
    assert allocator.allocate(2) == [0, 1]
    assert allocator.allocate(0) == []
    assert allocator.allocate(2) == [2, 3]
    assert allocator.num_free == 0


def test_too_many_blocks_are_a_memory_error_and_take_nothing() -> None:
    allocator = BlockAllocator(4, 16)
    allocator.allocate(1)
    with pytest.raises(MemoryError, match="4 KV blocks wanted, 3 free"):
        allocator.allocate(4)
    assert allocator.num_free == 3
    assert len(allocator.allocate(3)) == 3


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(2, 16)
    (block,) = filled(allocator, "a")
    assert allocator.find([b"a"]) == allocator.find([b"a"]) == [block]
    for free in (1, 1, 2):
        allocator.release([block])
        assert allocator.num_free == free


def test_a_found_block_is_not_handed_out_to_others() -> None:
    allocator = BlockAllocator(2, 16)
    blocks = filled(allocator, "a")
    allocator.release(blocks)
    assert allocator.find([b"a"]) == blocks
    assert allocator.num_free == 1
    assert set(allocator.allocate(1)).isdisjoint(blocks)
    with pytest.raises(MemoryError):
        allocator.allocate(1)


def test_find_stops_at_the_first_block_that_is_missing() -> None:
    allocator = BlockAllocator(4, 16)
    blocks = filled(allocator, "acd")
    assert allocator.find([b"a", b"b", b"c", b"d"]) == blocks[:1]
    assert allocator.find([b"x", b"a"]) == []
    assert allocator.find([]) == []
    allocator.release(blocks)
    assert allocator.num_free == 3, "only the block that was found is held"


def test_the_first_block_with_a_content_stays_the_one_that_is_found() -> None:
    allocator = BlockAllocator(4, 16)
    (first,) = filled(allocator, "a")
    (second,) = filled(allocator, "a")
    assert allocator.find([b"a"]) == [first]
    assert (allocator.digest(first), allocator.digest(second)) == (b"a", None)
    assert allocator.num_cached == 1
    allocator.release([second])
    assert found(allocator, "a") == "a"


def test_content_outlives_its_holders_until_the_room_is_needed() -> None:
    allocator = BlockAllocator(3, 16)
    allocator.release(filled(allocator, "ab"))
    assert (allocator.num_free, allocator.num_cached) == (3, 2)
    (empty,) = allocator.allocate(1)
    assert empty == 2, "a block that holds nothing goes before one that does"
    assert found(allocator, "ab") == "ab"
    (block,) = allocator.allocate(1)
    assert allocator.digest(block) is None
    assert allocator.num_cached == 1


def test_the_least_recently_used_goes_first() -> None:
    allocator = BlockAllocator(3, 16)
    for name in "abc":
        allocator.release(filled(allocator, name))
    assert found(allocator, "a") == "a"  # used again
    names = [allocator.digest(block) for block in range(3)]
    assert [names[allocator.allocate(1)[0]] for _ in names] == [b"b", b"c", b"a"]


def test_the_end_of_a_prefix_goes_before_its_start() -> None:
    allocator = BlockAllocator(4, 16)
    allocator.release(filled(allocator, "abcd"))
    for left in ("abc", "ab", "a", ""):
        allocator.allocate(1)
        assert found(allocator, "abcd") == left


def test_nothing_is_found_where_nothing_is_shared() -> None:
    allocator = BlockAllocator(2, 16, share=False)
    blocks = filled(allocator, "ab")
    assert allocator.find([b"a"]) == []
    assert (allocator.num_cached, allocator.digest(blocks[0])) == (0, None)
    allocator.release(blocks)
    assert allocator.num_free == 2


def test_a_digest_depends_on_all_tokens_so_far() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 3, (20, 2))
    seen: dict[bytes, tuple[int, ...]] = {}
    for first in blocks:
        for second in blocks:
            digest = block_digest(block_digest(b"", first), second)
            assert seen.setdefault(digest, (*first, *second)) == (*first, *second)
    assert len(seen) == len(set(seen.values()))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_no_block_is_lost_or_handed_out_twice(seed: int, share: bool) -> None:
    """Random requests take, find, register and release, against a plain count of who holds what."""
    rng = random.Random(seed)
    allocator = BlockAllocator(12, 16, share=share)
    held: list[list[int]] = []
    holds: dict[int, bytes] = {}  # what each block was last written with
    for _ in range(600):
        counts = Counter(block for blocks in held for block in blocks)
        assert allocator.num_free == 12 - len(counts)
        action = rng.choice(["start", "start", "grow", "end"])
        if action == "start":  # a prompt over few letters: what is found, then new blocks
            names = [bytes([65 + rng.randrange(2)]) for _ in range(rng.randrange(1, 5))]
            digests = [b"".join(names[: i + 1]) for i in range(len(names))]
            blocks = allocator.find(digests)
            assert [holds[block] for block in blocks] == digests[: len(blocks)]
            counts.update(blocks)
            fresh = min(len(names) - len(blocks), 12 - len(counts))
            new = allocator.allocate(fresh)
            assert counts.keys().isdisjoint(new)
            for digest, block in zip(digests[len(blocks) :], new, strict=False):
                holds[block] = digest
                allocator.register(block, digest)
            held.append(blocks + new)
        elif action == "grow" and held and len(counts) < 12:
            (block,) = allocator.allocate(1)
            assert block not in counts
            holds[block] = b""
            rng.choice(held).append(block)
        elif held:
            allocator.release(held.pop(rng.randrange(len(held))))
    for blocks in held:
        allocator.release(blocks)
    assert allocator.num_free == 12
    assert sorted(allocator.allocate(12)) == list(range(12))
    assert allocator.num_cached == 0


SHAPES = (6, 4), (1, 8), (0, 0), (6, 4)


def pool_of(num_blocks: int, block_size: int, ops: LayoutOps | None = None) -> KVPool:
    pool = KVPool(SHAPES, num_blocks, block_size, torch.float32, torch.device("cpu"), ops=ops)
    for i, layer in enumerate(pool.layers):
        layer.copy_(torch.arange(layer.numel()).view_as(layer) + 1000 * i)
    return pool


def copies(pool: KVPool) -> list[torch.Tensor]:
    return [layer.clone() for layer in pool.layers]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_pool_starts_as_zeros_with_a_view_for_each_layer() -> None:
    pool = KVPool(SHAPES, 5, 8, torch.bfloat16, torch.device("cpu"))
    assert [tuple(layer.shape) for layer in pool.layers] == [(heads, 40, size) for heads, size in SHAPES]
    assert all(layer.dtype is torch.bfloat16 and not layer.any() for layer in pool.layers)
    pool.layers[3][0, 7] = 1
    assert pool.layers[3][0, 7].tolist() == [1.0] * 4
    assert sum(layer.sum().item() for layer in pool.layers) == 4


@pytest.mark.parametrize("ops", [STOCK, FASTEST])
def test_commit_moves_even_where_sources_and_targets_overlap(ops: LayoutOps) -> None:
    pool = pool_of(8, 4, ops)
    before, after = copies(pool), copies(pool)
    moves = [
        Move(np.array([5, 0, 3]), [4, 6, 7, 9], 3),  # chained: 4 -> 3, 6 -> 4, 7 -> 5, 9 -> 6
        Move(np.array([2, 7]), [1, 2, 5], 1),  # the first two stay where they are
        Move(np.array([6]), [], 2),
    ]
    pool.commit(moves)
    for move in moves:
        for target, source in enumerate(move.sources, start=move.start):
            to, of = (int(move.table[at // 4]) * 4 + at % 4 for at in (target, source))
            for new, old in zip(after, before, strict=True):
                new[:, to] = old[:, of]
    assert equal(pool.layers, after)
    assert not equal(pool.layers, before)


@pytest.mark.parametrize("ops", [STOCK, FASTEST])
@pytest.mark.parametrize("seed", range(5))
def test_commit_against_a_copy_on_random_moves(seed: int, ops: LayoutOps) -> None:
    rng = np.random.default_rng(seed)
    pool = pool_of(12, 4, ops)
    before, after = copies(pool), copies(pool)
    tables = rng.permutation(12).reshape(3, 4)
    moves = []
    for table in tables:
        start = int(rng.integers(0, 6))
        sources = np.sort(rng.choice(np.arange(start, 16), int(rng.integers(0, 7)), replace=False)).tolist()
        moves.append(Move(table, sources, start))
        slots = (table[:, None] * 4 + np.arange(4)).reshape(-1)
        for new, old in zip(after, before, strict=True):
            new[:, slots[start : start + len(sources)]] = old[:, slots[sources]]
    pool.commit(moves)
    assert equal(pool.layers, after)


def test_a_chain_costs_nothing_to_commit() -> None:
    pool = pool_of(2, 4)
    versions = [layer._version for layer in pool.layers]
    pool.commit([Move(np.array([1, 0]), [2, 3, 4], 2)])
    pool.commit([])
    assert [layer._version for layer in pool.layers] == versions


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_a_pool_costs_what_is_used_of_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    pool = KVPool([(8, 64)] * 4, 8192, 16, torch.float32, torch.device("cpu"))
    assert sum(layer.nbytes for layer in pool.layers) == 2**30
    assert resident() - before < 2**26
    pool.layers[3][7, -1] = 1
    assert pool.layers[3][7, -1].sum() == 64
    assert not pool.layers[0][0, :64].any()
    assert resident() - before < 2**26
