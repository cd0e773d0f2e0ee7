"""Which requests hold the slots of states, and which borders of blocks have a copy of a state.

Keys and values of a prefix serve any request that begins with it. A state serves only a request that goes on
after the same token. So a prefix hit is cut to the last border of blocks at which a copy, a snapshot, was
kept. Snapshots are large, so few borders have one:

- the last border in a prompt, for the same prompt again;
- the border up to which a prompt found keys and values but no snapshot: requests part there, as after a
  system prompt, and others will (Pan et al. 2024, arXiv 2411.19379);
- the last border in an answer, for the next turn of a conversation. It moves on with the answer.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from soothsay.core.request import Request
from soothsay.core.states import StatePool


class Snapshots:
    """Slots of a pool of states for requests and snapshots. The least recently used snapshot makes room.

    Args:
        pool: of the target; None: it has no states, and nothing is done.
        block_size: tokens in a block of the KV pool.
        copy: copies a state from slot to slot, in all layers; None: those of `pool` are all.
    """

    def __init__(
        self, pool: StatePool | None, block_size: int, copy: Callable[[int, int], None] | None = None
    ):
        self._pool, self._block_size = pool, block_size
        self._copy = pool.copy if copy is None and pool is not None else copy
        live, copies = (0, 0) if pool is None else (pool.num_requests, pool.num_snapshots)
        self._free = list(range(live - 1, -1, -1))
        self._empty = list(range(live + copies - 1, live - 1, -1))
        # digest of the block before -> slot; oldest first
        self._kept: OrderedDict[bytes, int] = OrderedDict()

    @property
    def exist(self) -> bool:
        """Whether the model has states."""
        return self._pool is not None

    def usable(self, digests: Sequence[bytes]) -> int:
        """How many of these consecutive blocks of a prompt end with a snapshot of the last one's end."""
        if self._pool is None:
            return len(digests)
        ends = (count for count in range(len(digests), 0, -1) if digests[count - 1] in self._kept)
        return next(ends, 0)

    def start(self, request: Request, num_found: int) -> None:
        """Give a request a slot, with the state after `request.cached` tokens.

        Args:
            request: that will run.
            num_found: blocks of its prompt with keys and values, `usable` or not.
        """
        if self._pool is None or self._copy is None:
            return
        request.state = self._free.pop()
        blocks = request.cached // self._block_size
        request.branch = num_found * self._block_size if num_found > blocks else 0
        if blocks:
            digest = request.digest(blocks - 1)
            self._kept.move_to_end(digest)
            self._copy(self._kept[digest], request.state)

    def find_coming(
        self, request: Request, num_usable: int, running: Sequence[Request]
    ) -> tuple[Request, int] | None:
        """A running request that will leave a snapshot for this one, and the tokens before it; None: none."""
        if self._pool is None or not self._pool.num_snapshots:
            return None
        size = self._block_size
        for other in running:
            end = size * request.num_common_blocks(other, request.num_sharable // size)
            if end > max(other.cached, num_usable * size):
                other.branch = max(other.branch, end)
                return other, end
        return None

    def mark(self, request: Request, start: int, end: int) -> None:
        """Reserve slots for the snapshots that a request leaves once more than `start` tokens, and at most
        `end`, are in its state."""
        if self._pool is None or not self._pool.num_snapshots:
            return
        size, answer = self._block_size, request.num_prompt
        borders = {(request.num_prompt - 1) // size * size, request.branch}
        wanted = [border for border in sorted(borders) if start < border <= end]
        if (last := end // size * size) > max(start, answer):
            wanted.append(last)
        for border in wanted:
            replaced = request.last_snapshot if border > answer else None
            slot = None if replaced is None else self._kept.pop(replaced, None)
            if slot is None:
                slot = self._reserve()
            if slot is not None:
                request.marks.append((border, slot))

    def take_in(self, request: Request) -> None:
        """Make the snapshots that a step has left findable."""
        for border, slot in request.marks:
            if border > request.cached:  # the answer ended before
                self._empty.append(slot)
                continue
            digest = request.digest(border // self._block_size - 1)
            if border > request.num_prompt:
                request.last_snapshot = digest
            if digest in self._kept:
                self._empty.append(slot)
                self._kept.move_to_end(digest)
            else:
                self._kept[digest] = slot
        request.marks.clear()

    def release(self, request: Request) -> None:
        """Free a request's slot. Snapshots that a failed step should have left are dropped."""
        self._empty += [slot for _, slot in request.marks]
        request.marks.clear()
        if request.state is not None:
            self._free.append(request.state)
            request.state = None

    def _reserve(self) -> int | None:
        """A slot for a snapshot; None: all slots wait for one."""
        if self._empty:
            return self._empty.pop()
        return self._kept.popitem(last=False)[1] if self._kept else None
