"""Which requests take part in a step, and what a step changes about them.

The scheduler owns all bookkeeping of requests: admission, shared prefixes, blocks, preemption, the budget of
rows, and what they are once a step is over.
"""

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import count, repeat
from math import inf

from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason
from soothsay.core.cache import BlockAllocator
from soothsay.core.request import Request
from soothsay.core.turn import Turn
from soothsay.engine.pace import MaskPace, Pace, mask_seconds
from soothsay.engine.snapshots import Snapshots

log = logging.getLogger("soothsay.engine")

MAX_LOOKUPS = 1 << 14
"""Blocks that are looked up in a step for requests that cannot start. They take about 4 ms."""

MAX_CANDIDATES = 1 << 10
"""Waiting requests, from the first one on, that a step may admit. To skip them takes about 0.4 ms."""


class Scheduler:
    """Serves requests by priority, lower numbers first. Within a priority, callers take turns, and each one's
    requests are served in order of arrival.

    Requests get KV blocks as they grow. When blocks run out, the last running request in that order is
    preempted: it loses its blocks but keeps its tokens. It returns to its place in the waiting line, and
    later recomputes what the prefix cache does not have.

    Two things keep a request waiting. Where the KV pool has no room for it, others pass it only if it would
    still fit beside all that came after it, or long prompts would wait for ever (EASY backfilling, Lifka
    1995). Where a running request is about to compute a prefix that it shares, others pass it. It waits only
    for requests that are served before it, so newcomers and lower priorities cannot hold it up.

    Priorities decide who is admitted first, whose prompt is read first, and who is preempted. A newcomer
    never preempts a running request, but each caller leaves an eighth of the places to others. Waiting does
    not change a priority: as long as requests with lower numbers keep coming, others may wait for ever.

    Args:
        config: the engine's numbers.
        allocator: of the KV pool's blocks.
        snapshots: of states; None: the model has none.
        clock: seconds, from any starting point.
    """

    def __init__(
        self,
        config: EngineConfig,
        allocator: BlockAllocator,
        snapshots: Snapshots | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.config = config
        self.allocator = allocator
        self.snapshots = snapshots or Snapshots(None, allocator.block_size)
        self.waiting: list[Request] = []  # in order of service
        self.running: list[Request] = []  # in order of service
        self.pace = Pace(config.max_stall)
        self.mask_pace = MaskPace()
        self._clock = clock
        self._scheduled_at = 0.0
        self._arrivals = count()
        self._served = 0  # the last turn that was served

    def add(self, request: Request) -> None:
        """Put a request into the waiting line, a turn behind the last one of its caller.

        A caller who has none in the line waits for one request of each of the others, however many they have
        (self-clocked fair queueing, Golestani 1994).
        """
        caller = request.priority, request.caller
        own = (other.turn for other in reversed(self.waiting) if (other.priority, other.caller) == caller)
        request.arrival, request.turn = next(self._arrivals), 1 + max(next(own, 0), self._served)
        insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, free its blocks, and part it from its drafter."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            request.awaited = None
        else:
            return
        del request.drafter  # which refers to the model; an answer may be kept after `Engine.close`

    def preempt(self, request: Request) -> None:
        """Take the blocks of a running request, and let it wait. Does nothing if it does not run."""
        if request in self.running:
            self.running.remove(request)
            request.num_preemptions += 1
            self._free(request)
            insort(self.waiting, request, key=_order)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an error."""
        request.finish_reason = FinishReason.ERROR
        request.failure = error.with_traceback(None)  # which would keep the step's tensors
        self.remove(request)

    # schedule: who takes part in the next step

    def schedule(self, alone: Request | None = None) -> list[Turn]:
        """The turns of the next step. Their requests have blocks for all rows that they may bring.

        Args:
            alone: the only request that may have a turn; None: all may.
        """
        if alone is not None:
            requests: Sequence[Request] = self._admit_alone(alone)
        else:
            self._admit()
            requests = self.mask_pace.select(self.running)
        # prefill is limited: those who decode and newcomers wait for the step
        num_rows = self.pace.rows(self.config.max_rows, len(self.running))
        turns = self._take_turns(requests, num_rows)
        self._grant_trees(turns)
        self._scheduled_at = self._clock()
        return turns

    def _take_turns(self, requests: Sequence[Request], num_rows: int) -> list[Turn]:
        """Share rows among requests, in order. Each gets at least one row while rows last.

        One half of the rows is shared evenly among the prompts behind the first one, so that a short prompt
        does not wait for long ones. What they leave is taken in order.
        """
        turns: list[Turn] = []
        pending = [request.length - request.cached for request in requests]
        share = max(num_rows // 2 // max(len(pending) - pending.count(1) - 1, 1), 1)
        kept = sum(map(min, pending, repeat(share)))  # for those whose turn is to come
        for request, own in zip([*requests], pending, strict=True):
            if num_rows <= 0 or not request.blocks:  # it was preempted, and so were all after it
                break
            kept -= min(own, share)
            num_tokens = request.whole(request.cached, min(own, max(num_rows - kept, 1)))
            if self._missing_blocks(request, num_tokens) > 0 and not self._grow(request, num_tokens):
                break  # it was the last one, and there is no room even for it
            num_rows -= num_tokens
            if self.snapshots.exist:
                self.snapshots.mark(request, request.cached, request.cached + num_tokens)
            turns.append(Turn(request, num_tokens))
        return turns

    def _admit(self) -> None:
        """Move waiting requests to the running ones, in order, while there is room.

        Those that wait for a shared prefix are passed over. So is the first one that has no room, by those
        that leave it its room. One that was preempted is passed only by callers that have nothing running. A
        step looks up about `MAX_LOOKUPS` blocks for those that cannot start; the next one goes on.
        """
        if not self.waiting:
            return
        most, size = self.config.max_requests, self.allocator.block_size
        num_lookups, is_scarce = 0, False
        room = inf  # blocks for those behind the first one that has no room
        grown = sum(max(self._missing_blocks(other, other.num_pending), 0) for other in self.running)
        callers = {other.caller for other in self.running}
        for request in self.waiting[:MAX_CANDIDATES]:
            if len(self.running) >= most or num_lookups >= MAX_LOOKUPS:
                break
            is_new = request.caller not in callers
            others = 0 if request.caller is None else most // 8  # places for callers that have none
            if not is_new and (is_scarce or len(self.running) >= most - others):
                continue
            in_hand = 0 if is_new else len(self.running)  # a block each, so that nobody is preempted soon
            needed = 1 + -(-request.length // size)
            if _is_coming(request.awaited) or needed + in_hand > room:
                continue
            request.awaited = self._find_awaited(request)
            if request.awaited is None and self._start(request, grown + in_hand):
                room -= needed
                callers.add(request.caller)
                continue
            num_lookups += 1 + request.num_sharable // size
            if request.awaited is None and room == inf:
                room = min(self._room_beside(request), self.allocator.num_free - grown)
                is_scarce = request.num_preemptions > 0

    def _room_beside(self, request: Request) -> int:
        """Blocks that are left when a request and all that came after it have theirs, as they are."""
        later = self.running[bisect_left(self.running, _order(request), key=_order) :]
        size = self.allocator.block_size
        return self.allocator.num_blocks - sum(1 + -(-len(r.tokens) // size) for r in (request, *later))

    def _admit_alone(self, request: Request) -> list[Request]:
        """Make a request run, even if others must be preempted for it. An empty list: there is no room."""
        while request not in self.running:
            if len(self.running) < self.config.max_requests and self._start(request, 0):
                break
            if not self.running:
                return []
            self.preempt(self.running[-1])
        return [request]

    def _start(self, request: Request, reserve: int) -> bool:
        """Make a waiting request run. Returns False if then fewer than `reserve` blocks would be free."""
        size = self.allocator.block_size
        found, usable = self._find(request)
        missing = -(-request.length // size) - len(found)
        if missing + reserve > self.allocator.num_free:
            self.allocator.release(found)
            return False
        # the KV of found blocks that are not usable is computed again, and has the same bits
        request.blocks = found + self.allocator.allocate(missing)
        request.cached = usable * size
        request.awaited = None
        self.snapshots.start(request, len(found))
        if request.num_preemptions == 0:
            request.num_prefix_hits = request.cached
        self.waiting.remove(request)
        self._served = max(self._served, request.turn)
        insort(self.running, request, key=_order)
        return True

    def _find(self, request: Request) -> tuple[list[int], int]:
        """The blocks of a request's prefix that the cache has, and how many of them it can go on after.

        Each block has one more reference then.
        """
        digests = [request.digest(i) for i in range(request.num_sharable // self.allocator.block_size)]
        found = self.allocator.find(digests)
        usable = self.snapshots.usable(digests[: request.drafter.num_known(request, found)])
        return found, request.reusable(usable * self.allocator.block_size) // self.allocator.block_size

    def _find_awaited(self, request: Request) -> tuple[Request, int] | None:
        """A request that is about to compute what a waiting one needs next, and the length of their common
        prefix. None: there is none."""
        others = self.running[: bisect_left(self.running, _order(request), key=_order)]
        if not others or not self.allocator.share:
            return None
        found, usable = self._find(request)
        self.allocator.release(found)
        if self.snapshots.exist:
            return self.snapshots.find_coming(request, usable, others)
        size = self.allocator.block_size
        if request.length <= (usable + 1) * size:
            return None
        for other in others:
            if other.cached < (usable + 1) * size <= len(other.tokens):
                common = request.num_common_blocks(other, (request.length - 1) // size)
                if request.reusable(common * size) > usable * size:
                    return other, common * size
        return None

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` more tokens, preempting the last requests if need be.

        Returns False if the request itself was preempted.
        """
        while (missing := self._missing_blocks(request, num_tokens)) > 0:
            if missing <= self.allocator.num_free:
                request.blocks += self.allocator.allocate(missing)
                break
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _grant_trees(self, turns: Sequence[Turn]) -> None:
        """Share the rows that are left among the requests that may bring a tree."""
        num_rows = self.config.max_rows - sum([turn.num_tokens for turn in turns])
        ends = [turn.request for turn in turns if turn.reaches_end]
        for place, request in enumerate(ends):
            num_rows -= self._grant_tree(request, num_rows // (len(ends) - place)) - 1

    def _grant_tree(self, request: Request, num_rows: int) -> int:
        """Set and return `max_nodes`: what rows, drafter, request, answer length and blocks allow."""
        nodes = 1 + max(0, min(num_rows, request.drafter.max_nodes - 1, self.config.max_tree - 1))
        if request.max_guesses is not None:
            nodes = min(nodes, 1 + request.max_guesses)
        if nodes > 1:  # the root has its slot
            blocks, size = len(request.blocks), self.allocator.block_size
            if request.max_depth < 1:
                nodes = 1
            elif request.length + nodes - 1 > blocks * size:
                nodes = min(nodes, (blocks + self.allocator.num_free) * size - request.length + 1)
                missing = -(-(request.length + nodes - 1) // size) - blocks
                request.blocks += self.allocator.allocate(max(missing, 0))
        request.max_nodes = nodes
        return nodes

    def _missing_blocks(self, request: Request, num_rows: int) -> int:
        return -(-(request.cached + num_rows) // self.allocator.block_size) - len(request.blocks)

    def mark_accepted(self, turns: Sequence[Turn]) -> None:
        """Reserve slots for the snapshots that accepted nodes leave."""
        for turn in turns if self.snapshots.exist else ():
            start = turn.request.cached + turn.num_tokens
            self.snapshots.mark(turn.request, start, start + len(turn.accepted))

    # update: what a step has changed

    def update(self, turns: Sequence[Turn]) -> None:
        """Take in a step: emitted tokens, computed blocks, requests that have ended, the time it took.

        An error concerns one request here, and ends it: some of its tokens may be appended already.
        """
        for turn in turns:
            try:
                self._take_in(turn)
            except Exception as error:
                log.error("request failed", exc_info=True)
                self.fail(turn.request, error)
        masked = [turn.request for turn in turns if turn.request.constraint is not None]
        seconds = max(self._clock() - self._scheduled_at - sum(map(mask_seconds, masked)), 0.0)
        self.pace.follow(sum([turn.num_rows for turn in turns]), seconds)
        self.mask_pace.follow(masked, seconds)

    def _take_in(self, turn: Turn) -> None:
        request, size = turn.request, self.allocator.block_size
        first_new = request.cached // size
        turn.take_in()
        for block in range(first_new, request.cached // size if self.allocator.share else 0):
            self.allocator.register(request.blocks[block], request.digest(block))
        if request.marks:
            self.snapshots.take_in(request)
        if request.finish_reason is not None:
            self.remove(request)

    def _free(self, request: Request) -> None:
        """Free a request's blocks, and let its drafter forget it.

        A drafter that cannot forget it harms no answer, since drafts change no tokens. So the log has its
        error, and the request goes its way.
        """
        self.allocator.release(request.blocks)
        self.snapshots.release(request)
        request.blocks = []
        request.cached = 0
        try:
            request.drafter.release(request)
        except Exception:
            log.error("release failed", exc_info=True, extra={"drafter": request.drafter.name})


def _is_coming(awaited: tuple[Request, int] | None) -> bool:
    """Whether a request runs and has not yet computed this number of tokens."""
    return awaited is not None and bool(awaited[0].blocks) and awaited[0].cached < awaited[1]


def _order(request: Request) -> tuple[int, int, int]:
    """The smallest is served first."""
    return request.priority, request.turn, request.arrival
