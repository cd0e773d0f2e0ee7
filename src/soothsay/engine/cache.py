"""Paged keys and values: memory in slots, blocks of slots handed to requests, prefixes shared between them.

`KVPool` is memory. `BlockAllocator` says which block belongs to whom and what it holds. They are apart
because several pools (the target's, and one for each drafter with keys of its own) follow one allocator: a
slot number means the same token in all of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from soothsay.machine import mapped_zeros

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """Of one request: KV at `sources` goes to consecutive offsets from `start` on."""

    table: IntArray
    sources: Sequence[int]
    start: int


class KVPool:
    """Keys and values of every layer, `[layers, 2 * H_kv, slots, d]`: the keys' heads first, then the
    values'.

    The memory starts as zeros, because masked slots are multiplied by zero and must be finite. On a CPU a
    pool costs what is used of it.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        num_layers, num_kv_heads, head_dim = shape
        self.block_size = block_size
        self.num_slots = slots = num_blocks * block_size
        size = (num_layers, 2 * num_kv_heads, slots, head_dim)
        on_cpu = device.type == "cpu"
        self.data = mapped_zeros(size, dtype) if on_cpu else torch.zeros(size, dtype=dtype, device=device)
        self.layers = tuple(self.data.unbind(0))  # each [2 * H_kv, slots, d]

    def commit(self, moves: Iterable[Move]) -> None:
        """Copy the KV of accepted nodes next to their contexts, in all layers; what stays costs nothing."""
        sources: list[int] = []
        targets: list[int] = []
        for move in moves:
            for target, source in enumerate(move.sources, start=move.start):
                if source != target:
                    sources.append(self._slot(move.table, source))
                    targets.append(self._slot(move.table, target))
        if sources:
            device = self.data.device
            rows = self.data.index_select(2, torch.tensor(sources, device=device))
            self.data.index_copy_(2, torch.tensor(targets, device=device), rows)

    def _slot(self, table: IntArray, offset: int) -> int:
        return int(table[offset // self.block_size]) * self.block_size + offset % self.block_size


def block_digest(parent: bytes, tokens: IntArray) -> bytes:
    """Identity of a full block: its tokens and, through the parent's digest, all tokens before it."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


class BlockAllocator:
    """Hands out blocks of `block_size` slots, counts who refers to them, and finds blocks by what they hold.

    A block whose holders are gone keeps its content until the room is needed; the least recently used goes
    first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share = share
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._empty = list(
            range(num_blocks - 1, -1, -1)
        )  # hold nothing; the lowest number is handed out first
        self._unused: OrderedDict[int, None] = (
            OrderedDict()
        )  # hold something, nobody refers to them; oldest first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._empty) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, in use or not."""
        return len(self._by_digest)

    def digest(self, block: int) -> bytes | None:
        """The content that a block is registered under, if it is."""
        return self._digests[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises `MemoryError` if there are not as many."""
        if count > self.num_free:
            raise MemoryError(f"{count} KV blocks wanted, {self.num_free} free")
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._unused.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. Of a prefix, the last blocks are the first to go later."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._unused[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full block findable. The first block with a content stays the one that is found."""
        if self.share and digest not in self._by_digest:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The longest run of blocks that hold `digests`, from the first on, each with one more reference."""
        blocks: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            self._unused.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
