"""Who takes part in the next step: admission, shared prefixes, growth, preemption, the budget of rows."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from soothsay.config import EngineConfig
from soothsay.engine.cache import BlockAllocator
from soothsay.engine.pace import Pace
from soothsay.engine.request import Request


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part in a step: how many of its pending tokens go in."""

    request: Request
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last committed token is among them, so that a tree can hang below it."""
        return self.num_tokens == self.request.num_pending


class Scheduler:
    """Lower priorities first, and among equals first come, first served. Blocks are given as requests grow;
    when they run out, the last in that order starts over.

    A preempted request loses its blocks, not its tokens: it waits in its old place, before all that come
    behind it in order, and recomputes what it cannot find in the prefix cache.

    A priority decides who is admitted first, whose prompt is read first and who has to go. Nobody who runs
    has to go only because another came, and nobody's priority changes by waiting: as long as requests with
    lower ones keep coming, the others may wait for ever.
    """

    def __init__(self, config: EngineConfig, allocator: BlockAllocator, on_evict: Callable[[Request], None]):
        self.config = config
        self.allocator = allocator
        self.on_evict = on_evict  # called when a request loses its blocks, for drafters to forget it
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.pace = Pace(config.max_stall)
        self._arrivals = count()

    def add(self, request: Request) -> None:
        """Put a request in the line."""
        request.arrival = next(self._arrivals)
        insort(self.waiting, request, key=_place)

    def next(self) -> list[Share]:
        """The shares of the next step, with blocks for all rows they can bring."""
        rows, line = self._budget(), len(self.waiting)
        shares = self._share(rows, self.running)
        if len(self.waiting) == line:  # nobody had to go, so there may be room for more
            shares += self._share(rows - sum(share.num_tokens for share in shares), self._admit())
        rows = self.config.max_rows - sum(share.num_tokens for share in shares)
        ends = [share for share in shares if share.reaches_end]
        for i, share in enumerate(ends):
            rows -= self._grant_tree(share.request, rows // (len(ends) - i)) - 1
        return shares

    def remove(self, request: Request) -> None:
        """Take a finished or cancelled request out and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self._evict(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _budget(self) -> int:
        """Rows of a step before any guesses: prompts are read slowly where somebody would wait for it."""
        most, decoding = self.config.max_rows, any(request.num_pending == 1 for request in self.running)
        return self.pace.rows(most, len(self.running)) if decoding else most

    def _share(self, rows: int, requests: Sequence[Request]) -> list[Share]:
        """As many of the rows as these requests have a use for; one at least for each, as far as rows go."""
        shares: list[Share] = []
        while rows and len(shares) < len(requests):
            request = requests[len(shares)]
            behind = len(requests) - len(shares) - 1  # each of them gets a row too
            num_tokens = min(request.num_pending, max(rows - behind, 1))
            if not self._grow(request, num_tokens):
                break  # it was the last one, and there is no room even for it
            rows -= num_tokens
            shares.append(Share(request, num_tokens))
        return shares

    def _admit(self) -> list[Request]:
        """Those that begin to run, in order."""
        size, admitted = self.allocator.block_size, list[Request]()
        while self.waiting and len(self.running) < self.config.max_requests:
            request = self.waiting[0]
            num_full = (len(request.tokens) - 1) // size  # the last token is computed anyway, for its logits
            found = self.allocator.find([request.digest(i) for i in range(num_full)])
            needed = -(-len(request.tokens) // size) - len(found)
            reserve = len(self.running)  # a block in hand for everyone who runs, lest one goes at once
            if needed + reserve > self.allocator.num_free or self._is_being_computed(request, len(found)):
                self.allocator.release(found)
                break
            request.blocks = found + self.allocator.allocate(needed)
            request.cached = len(found) * size
            if request.num_preemptions == 0:
                request.num_prefix_hits = request.cached
            insort(self.running, self.waiting.pop(0), key=_place)
            admitted.append(request)
        return admitted

    def _is_being_computed(self, request: Request, block: int) -> bool:
        """Whether a running request is about to compute the very block that this one lacks."""
        size = self.allocator.block_size
        if not self.allocator.share or len(request.tokens) <= (block + 1) * size:
            return False
        return any(
            other.cached < (block + 1) * size <= len(other.tokens)
            and other.digest(block) == request.digest(block)
            for other in self.running
        )

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens`, at the cost of those behind it. False: it had to go itself."""
        while (missing := self._missing_blocks(request, num_tokens)) > self.allocator.num_free:
            victim = self.running.pop()
            victim.num_preemptions += 1
            self._evict(victim)
            insort(self.waiting, victim, key=_place)
            if victim is request:
                return False
        request.blocks += self.allocator.allocate(max(missing, 0))
        return True

    def _grant_tree(self, request: Request, spare: int) -> int:
        """Set and return how many nodes a tree may have: as rows, drafter, request, use and blocks allow."""
        nodes = 1 + max(0, min(spare, request.drafter.max_nodes - 1, self.config.max_tree - 1))
        if request.max_guesses is not None:
            nodes = min(nodes, 1 + request.max_guesses)
        if request.max_depth < 1:
            nodes = 1
        size = self.allocator.block_size
        room = (len(request.blocks) + self.allocator.num_free) * size - len(request.tokens) + 1
        request.max_nodes = min(nodes, room)
        missing = self._missing_blocks(request, request.num_pending + request.max_nodes - 1)
        request.blocks += self.allocator.allocate(max(missing, 0))
        return request.max_nodes

    def _missing_blocks(self, request: Request, num_rows: int) -> int:
        return -(-(request.cached + num_rows) // self.allocator.block_size) - len(request.blocks)

    def _evict(self, request: Request) -> None:
        self.allocator.release(request.blocks)
        request.blocks = []
        request.cached = 0
        self.on_evict(request)


def _place(request: Request) -> tuple[int, int]:
    """Whose is lower goes first."""
    return request.priority, request.arrival
