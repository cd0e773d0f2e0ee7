"""The paged KV cache: memory in slots, blocks of slots for requests, and prefixes shared between requests.

`KVPool` is the memory. `BlockAllocator` knows who holds a block and what is in it. Several pools follow one
allocator: the target's, and one for each drafter with keys of its own. A slot number means the same token in
all of them.

A pool keeps a key or a value of `d` numbers in a row. A pool of floats has rows of `d` elements. The others
have integers with a float32 scale, a number being scale times integer:

- int16: a key has `d` integers, then the bits of its scale. A value has `d` numbers in bfloat16, and its last
  elements are unused. bfloat16 rounds a key to 8 bits; these keys have up to 15. Rounded values cost no
  quality (docs/log.md).
- int8: a key or a value has `d` integers, then the bits of its scale.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.batch import LayoutOps
from soothsay.core.functions import total
from soothsay.core.states import LayerStates, StatePool
from soothsay.core.strands import Marks
from soothsay.mapped_memory import mapped_zeros

INTEGERS = (torch.int16, torch.int8)
SCALE_BYTES = 4

NORM = 32700.0
"""Euclidean norm of a row of 16-bit integers.

No integer is larger, so 16 bits hold it. Rounding lengthens a row of `d` numbers by sqrt(d) / 2 at most. So
no part of the sum of a product of two rows is larger than (NORM + sqrt(d) / 2)^2, by the inequality of Cauchy
and Schwarz. This is below 2^31 for every `d` up to 2^28."""

MOST_BYTE = 127.0
"""The largest number of a row of 8-bit integers."""

LEAST_SIZE = 1e-15
"""A row of a smaller norm or largest number becomes zeros. Squares would lose bits in float32."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Elements of a pool's row for `size` numbers."""
    return size + SCALE_BYTES // dtype.itemsize if dtype in INTEGERS else size


def kv_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """Bytes that a token takes in a pool: for each layer, its heads and their size."""
    return sum(heads * row_size(size, dtype) for heads, size in shapes) * dtype.itemsize


def integers(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows `[..., d]` float32 as integers `[..., d]` of `dtype`, and their scales `[..., 1]` float32."""
    if dtype == torch.int8:
        size, whole = x.abs().amax(-1, keepdim=True), MOST_BYTE
    else:
        size, whole = total(x.square()).sqrt(), NORM
    inverse = torch.where(size > LEAST_SIZE, torch.full_like(size, whole) / size, 0.0)
    return (x * inverse).round().to(dtype), size / whole


def written(keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values `[H_kv, N, d]` float32 as rows of a pool of `dtype`, `[2 * H_kv, N, row]`."""
    if dtype == torch.int8:
        return _with_scales(torch.cat([keys, values]), dtype)
    if dtype != torch.int16:
        return torch.cat([keys, values]).to(dtype)
    halves = values.bfloat16().view(torch.int16)
    unused = halves.new_zeros(*halves.shape[:-1], SCALE_BYTES // dtype.itemsize)
    return torch.cat([_with_scales(keys, dtype), torch.cat([halves, unused], -1)])


def _with_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    whole, scales = integers(x, dtype)
    return torch.cat([whole, scales.view(dtype)], -1)


def _parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The integers `[..., d]` and the scales `[..., 1]` of rows."""
    scale = SCALE_BYTES // rows.dtype.itemsize
    return rows[..., :-scale], rows[..., -scale:].contiguous().view(torch.float32)


def key_products(q: Tensor, keys: Tensor) -> Tensor:
    """Products of queries `[B, M, d]` float32 and rows of keys `[B, K, row]`: `[B, M, K]` float32.

    Queries are rounded to integers if keys are. The sums of integers are exact.
    """
    if keys.dtype not in INTEGERS:
        return torch.bmm(q, keys.float().transpose(1, 2))
    whole, scale = integers(q, keys.dtype)
    own, scales = _parts(keys)  # [B, K, d], [B, K, 1]
    sums = torch.bmm(whole.double(), own.double().transpose(1, 2))
    return sums.float() * (scales.transpose(1, 2) * scale)


def read_values(rows: Tensor) -> Tensor:
    """Rows of values `[..., row]` as `[..., d]` float32."""
    if rows.dtype not in INTEGERS:
        return rows.float()
    whole, scales = _parts(rows)
    if rows.dtype == torch.int8:
        return whole * scales
    return whole.contiguous().view(torch.bfloat16).float()


class KVAndStates(NamedTuple):
    """Both, of a layer that has attention beside a state."""

    kv: torch.Tensor
    states: LayerStates


LayerMemory = torch.Tensor | LayerStates | KVAndStates
"""What a layer keeps of tokens: keys and values `[heads, slots, row]`, states, or both."""


class Move(NamedTuple):
    """A copy within one request: KV at offsets `sources` goes to consecutive offsets from `start` on.

    Where layers keep states, these advance by the tree's root at offset `start - 1` and the nodes at the
    offsets `sources`.
    """

    table: IntArray
    sources: Sequence[int]
    start: int
    state: int | None = None  # the slot of the request's state
    marks: Marks = ()

    @property
    def nodes(self) -> list[int]:
        """The root and the accepted nodes."""
        return [0, *(source - self.start + 1 for source in self.sources)]


class KVPool:
    """Keys and values of every layer: `layers[i]` is `[heads, slots, row]`. The heads of keys come first.

    A row has the numbers of a head, or is as `soothsay.core.cache` describes it.

    The memory starts as zeros, because masked slots are multiplied by zero and must be finite. On a CPU, a
    pool takes memory only for the slots in use.

    Args:
        shapes: for each layer, its heads, those of keys and of values together, and their size.
        num_blocks: blocks of slots.
        block_size: slots in a block.
        dtype: of the elements.
        device: of the memory.
        states: of the layers that keep a state. Their shapes have no heads, unless they keep both.
        ops: the kernels; None: stock operations.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
        ops: LayoutOps | None = None,
    ):
        self.block_size, self.states, self._ops = block_size, states, ops or LayoutOps()
        self.num_slots = slots = num_blocks * block_size
        zeros = mapped_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
        counts = Counter(shapes)
        self._parts = {  # layers of a shape are one tensor, [layers, heads, slots, row]
            (heads, size): zeros((count, heads, slots, row_size(size, dtype)), dtype=dtype)
            for (heads, size), count in counts.items()
        }
        views = {shape: iter(part.unbind(0)) for shape, part in self._parts.items()}
        kept: dict[int, LayerStates] = {} if states is None else states.layers

        def memory(layer: int, shape: tuple[int, int]) -> LayerMemory:
            own = next(views[shape])
            if layer not in kept:
                return own
            return KVAndStates(own, kept[layer]) if shape[0] else kept[layer]

        self.layers: tuple[LayerMemory, ...] = tuple(memory(*each) for each in enumerate(shapes))

    def kv(self, layer: int) -> torch.Tensor:
        """The keys and values of a layer that has some."""
        own = self.layers[layer]
        return cast(torch.Tensor, own.kv if isinstance(own, KVAndStates) else own)

    def fill(self) -> None:
        """Fill the memory with noise, as memory in use is."""
        for layer in chain(*(own if isinstance(own, KVAndStates) else (own,) for own in self.layers)):
            if isinstance(layer, LayerStates):
                layer.matrices.normal_()
            elif layer.dtype in INTEGERS:
                heads, slots, row = layer.shape
                keys, values = torch.randn(2, heads // 2, slots, row - SCALE_BYTES // layer.dtype.itemsize)
                layer.copy_(written(keys, values, layer.dtype))
            else:
                layer.normal_()

    def commit(self, moves: Iterable[Move]) -> None:
        """Copy the KV of accepted nodes to their final offsets, in all layers. KV in place is free."""
        sources: list[int] = []
        targets: list[int] = []
        size = self.block_size
        for table, offsets, start, *_ in moves:
            blocks = table.data
            for target, source in enumerate(offsets, start):
                if source != target:
                    sources.append(blocks[source // size] * size + source % size)
                    targets.append(blocks[target // size] * size + target % size)
        if sources:
            self._ops.move(self._parts.values(), sources, targets)


class BlockAllocator:
    """Allocates blocks of `block_size` slots, counts references to them, and finds blocks by content.

    A block without references keeps its content until the memory is needed. The least recently used block is
    reused first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.share = share
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        # without content; the lowest number is allocated first
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content, without references; oldest first

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return."""
        return len(self._empty) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be found by content, in use or not."""
        return len(self._by_digest)

    def digest(self, block: int) -> bytes | None:
        """The digest under which a block is registered; None if it is not."""
        return self._digests[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises `MemoryError` if fewer are free."""
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
        """Drop one reference to each block. The last blocks of a prefix will be reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._unused[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full block findable. If several have the same content, `find` returns the first."""
        if self.share and digest not in self._by_digest:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The registered blocks of a prefix of `digests`, the longest one. Each gets one more reference."""
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
