"""One forward pass over many requests: their rows packed end to end, and the keys that each row attends to.

A request contributes its pending tokens, which have no KV yet, and a draft tree below the last of them. There
is no prefill, decode or verify phase: a prefill chunk is many tokens without a tree, and plain decoding is
one token with a tree of one node.

Example: a request has KV for 5 tokens and 2 pending tokens, a and b. Its tree has the children c and d of the
root b, and the child e of c. With `start` 5, `ctx` is 6:

    row       0   1   2   3   4
    token     a   b   c   d   e
    node      -   0   1   2   3
    offset    5   6   7   8   9     where its KV goes
    position  5   6   7   7   8     for the rotary embedding
    logits    no  yes yes yes yes

Besides the 5 cached tokens, row 3 sees a b d and row 4 sees a b c e.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.forms import HasForms
from soothsay.core.paths import Lanes, Path, stack_paths
from soothsay.core.strands import WITHIN, Marks, Strand, Strands, marked
from soothsay.core.transfer import send, upload
from soothsay.core.tree import DraftTree

Windows = Sequence[int | None]
"""The windows of a model's layers, as in `ModelSpec`; None: no window."""


class Rows(NamedTuple):
    """The rows of one request in a pass.

    With `ctx = start + len(tokens) - 1`, the root's KV offset: token j of `tokens` has offset and position
    `start + j`; node i of the tree has offset `ctx + i` and position `ctx + depth(i)`.
    """

    tokens: IntArray  # [p] pending tokens, committed and without KV; the last is the root
    start: int  # number of tokens that have KV
    table: IntArray | None = None  # the request's KV blocks; None: keys and values live within the pass
    tree: DraftTree | None = None  # None: no logits are wanted
    first: int = 1  # nodes before this one have KV (a tree grown level by level)
    first_key: int = 0  # the first offset whose key is visible to these rows; at most `start`
    state: int | None = None  # the slot of the request's state, for models that have states
    marks: Marks = ()
    adapter: str | None = None  # by name, as in `soothsay.model.ops.lora`; None: the model alone
    source: int = 0  # the first tokens, which an encoder reads; see `soothsay.core.sides`

    @property
    def num_rows(self) -> int:
        """Number of rows in the pass."""
        return len(self.tokens) + (0 if self.tree is None else len(self.tree) - self.first)


class Layout(NamedTuple):
    """Where the rows of a pass stand. The tensors are int64, on the CPU, the first four as in `Batch`."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    asked: Sequence[int]  # number of logit rows of each request
    paths: Sequence[Path]
    num_slots: int
    lanes: Sequence[Tensor] = ()  # of `stack_paths`; empty for kernels that do not read them


class LayoutOps:
    """Lays out passes, brings them to the device, and moves KV: stock operations. Kernels may do it in C."""

    def pack_rows(
        self, requests: Sequence[Rows], block_size: int, group: int, windows: Windows, device: torch.device
    ) -> Batch:
        """Lay out the rows of requests one after the other. See `Batch.pack`."""
        layout = self.lay_out(requests, block_size, group)
        host = [layout.tokens, layout.positions, layout.slots, layout.logit_rows, *layout.lanes]
        tokens, positions, slots, logit_rows, *stacked = self.upload(host, device)
        own = tokens, positions, slots, logit_rows, layout.asked, layout.paths, layout.num_slots
        return Batch(*own, group, windows, requests=requests, stacked=stacked)

    def lay_out(self, requests: Sequence[Rows], block_size: int, group: int) -> Layout:
        """Lay out the rows of requests one after the other.

        Args:
            requests: at least one row in all.
            block_size: slots of a KV block.
            group: query heads that share a key head.
        """
        packer = _Packer(block_size)
        for request in requests:
            packer.add(request)
        return packer.finish(group)

    def upload(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Bring all that a pass needs to the device, in one copy. On a CPU it stays as it is."""
        return upload(tensors, device)

    def padded(self, rows: int) -> int:
        """Rows that a pass of `rows` rows computes."""
        return rows

    def move(self, parts: Iterable[Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots within parts of a KV pool, `[layers, heads, slots, row]` each.

        No slot is a target before it is a source.
        """
        for part in parts:
            old, new = send([sources, targets], part.device)
            part.index_copy_(2, new, part.index_select(2, old))


@dataclass(frozen=True)
class Batch(HasForms):
    """N rows of R requests, ready for `Transformer.forward`. Index tensors serve all layers."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, for the rotary embedding
    slots: Tensor  # [N] int64, where each row's KV goes
    logit_rows: Tensor  # [M] int64, rows of tree nodes, the roots included
    asked: Sequence[int]  # number of logit rows of each request
    paths: Sequence[Path]  # the keys that the rows attend to
    num_slots: int  # size of the smallest pool with all slots in use here
    group: int
    windows: Windows
    requests: Sequence[Rows] = field(default=(), kw_only=True)
    stacked: Sequence[Tensor] = field(default=(), kw_only=True)  # `Layout.lanes` on the device
    inputs: Tensor | None = field(default=None, kw_only=True)  # [N, H], what heads read beside the tokens
    across: Batch | None = field(default=None, kw_only=True)  # the same rows over the keys of their sources

    @classmethod
    def pack(
        cls,
        requests: Sequence[Rows],
        *,
        block_size: int = 1,
        group: int = 1,
        windows: Windows = (None,),
        device: torch.device | str = "cpu",
        ops: LayoutOps | None = None,
    ) -> Batch:
        """Lay out the rows of `requests` one after the other.

        Args:
            requests: at least one row in all.
            block_size: slots of a KV block.
            group: query heads that share a key head.
            windows: those of the model's layers, as in `ModelSpec`; None: no window.
            device: of the index tensors.
            ops: the kernels; None: stock operations.
        """
        return (ops or LayoutOps()).pack_rows(requests, block_size, group, windows, torch.device(device))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Each request's part of the logit rows."""
        return tuple(pairwise(accumulate(self.asked, initial=0)))

    def reading(self, inputs: Tensor) -> Self:
        """The same rows with `inputs`."""
        same = copy(self)
        vars(same)["inputs"] = inputs
        return same

    def select_logit_rows(self, x: Tensor) -> Tensor:
        """`[N, size] -> [M, size]`: the rows of tree nodes. They rise, so all rows need no copy."""
        return x if len(self.logit_rows) == len(x) else x.index_select(0, self.logit_rows)

    @cached_property
    def strands(self) -> Strands:
        """The rows as layers with a state read them."""
        strands, first = list[Strand](), 0
        for request in self.requests:
            strands.append(_strand(request, first))
            first = strands[-1].end
        return Strands(tuple(strands))

    @cached_property
    def lanes(self) -> tuple[Lanes, ...]:
        """The paths padded to rectangles, for stock operations."""
        _, *parts = self._stacked
        lanes = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        return tuple(Lanes.of(rows, keys, positions, self.windows) for rows, keys, positions in lanes)

    @property
    def lane_rows(self) -> Tensor:
        """`[N]` int64: each row's place in the lanes' concatenated rows."""
        return self._stacked[0]

    @cached_property
    def _stacked(self) -> Sequence[Tensor]:
        if self.stacked:
            return self.stacked
        return upload(stack_paths(self.paths, len(self.tokens), self.group), self.tokens.device)


def blind(request: Rows) -> ValueError:
    """The error for rows whose first visible key comes after them."""
    return ValueError(
        f"a row at offset {request.start} sees no keys below {request.first_key}: not even its own"
    )


def _strand(request: Rows, first: int) -> Strand:
    """The rows of a request, the first of which is row `first` of the pass."""
    pending, tree = len(request.tokens), request.tree
    advancing = pending - 1 if tree is not None and pending else pending
    start = request.start if pending else request.start - 1  # tokens in the state
    return Strand(
        first=first,
        advancing=advancing,
        first_node=0 if pending else request.first,
        parents=() if tree is None else tree.parents,
        slot=WITHIN if request.state is None else request.state,
        is_new=start <= 0,
        marks=marked(request.marks, start, advancing),
    )


@dataclass(slots=True)
class _Packer:
    block_size: int
    tokens: list[IntArray] = field(default_factory=list)
    positions: list[IntArray] = field(default_factory=list)
    slots: list[IntArray] = field(default_factory=list)
    logit_rows: list[range] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    num_rows: int = 0
    num_slots: int = 0

    def add(self, request: Rows) -> None:
        if request.first_key > request.start:
            raise blind(request)
        base, pending, ctx = self.num_rows, len(request.tokens), request.start + len(request.tokens) - 1
        positions = offsets = np.arange(request.start, ctx + 1)
        tokens = request.tokens
        if request.tree is not None and len(request.tree) > request.first:
            tree, first = request.tree, request.first
            tokens = np.concatenate([tokens, np.array(tree.tokens[first:], dtype=np.int64)])
            positions = np.concatenate([positions, np.array(tree.depths[first:], dtype=np.int64) + ctx])
            offsets = np.concatenate([offsets, np.arange(ctx + first, ctx + len(tree))])
        self.num_rows += len(tokens)
        self.tokens.append(tokens)
        self.positions.append(positions)
        slots = self._slots(request, base, offsets)
        self.slots.append(slots)
        asks = self.num_rows if request.tree is not None else base
        self.logit_rows.append(range(base + max(pending - 1, 0) if asks > base else asks, asks))
        if len(slots):
            self._add_paths(request, base, ctx, positions)

    def _slots(self, request: Rows, base: int, offsets: IntArray) -> IntArray:
        if request.table is None:
            return offsets + base
        return request.table[offsets // self.block_size] * self.block_size + offsets % self.block_size

    def _add_paths(self, request: Rows, base: int, ctx: int, positions: IntArray) -> None:
        """Add a path for each leaf of the tree. A node on several paths is a row of the first one."""
        tree, pending, first, hidden = request.tree, len(request.tokens), request.first, request.first_key
        size = 1 if tree is None else len(tree)
        slots = self._slots(request, base, np.arange(hidden, ctx + size))
        self.num_slots = max(self.num_slots, int(slots.max()) + 1)
        positions = positions - hidden  # a path starts at the first visible key
        if tree is None or size == max(tree.depths) + 1:  # a chain
            keys = slots[: int(positions[-1]) + 1]
            self.paths.append(Path(range(base, base + len(positions)), positions, keys))
            return
        context, nodes = slots[: ctx - hidden + 1], slots[ctx - hidden :]
        placed = set(range(first))
        lead, shared = range(pending), 0  # pending tokens are rows of the first path
        for path in tree.paths():
            new = [node for node in path if node not in placed]
            placed.update(new)
            rows = [*lead, *(pending + node - first for node in new)]
            lead = range(0)
            if rows:
                keys = np.concatenate([context, nodes.take(path[1:])])
                self.paths.append(Path([base + row for row in rows], positions.take(rows), keys, shared))
                shared = len(context)

    def finish(self, group: int) -> Layout:
        def tensor(parts: Iterable[Sequence[int] | IntArray]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]))

        return Layout(
            tokens=tensor(self.tokens),
            positions=tensor(self.positions),
            slots=tensor(self.slots),
            logit_rows=tensor(self.logit_rows),
            asked=[len(rows) for rows in self.logit_rows],
            paths=tuple(self.paths),
            num_slots=self.num_slots,
            lanes=stack_paths(self.paths, self.num_rows, group),
        )
