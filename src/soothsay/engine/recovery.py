"""What happens after a step has failed: the requests that cause the failure end, and all others go on.

An error does not say whose it is, because drafters and the target see all requests of a step together. So the
engine takes the failed step back, by preempting its requests, and repeats it with one request at a time. A
request that fails alone ends. Answers do not depend on the batch or on preemption, so those of the others
keep their tokens.
"""

import logging
from collections import deque
from collections.abc import Sequence
from traceback import extract_tb

from soothsay.core.request import Request
from soothsay.core.turn import Turn
from soothsay.engine.scheduler import Scheduler
from soothsay.errors import SoothsayError, reason_of

log = logging.getLogger("soothsay.engine")

MAX_DOUBLINGS = 6
"""After 1, 2, 3, ... joint steps that failed in a row, each request has 1, 2, 4, ... steps alone, at most 2
to the power of this. So a batch that fails together and never alone spends little on failing again."""


class Recovery:
    """Says which request the next step runs alone, and ends those that fail alone.

    Every suspect gets further than it was before the failed step, or ends. So a failure that comes back
    whenever requests run together makes them slow, but cannot stop them.

    Args:
        scheduler: of the engine.
    """

    def __init__(self, scheduler: Scheduler):
        self.num_failed = 0  # steps that failed
        self._scheduler = scheduler
        self._told: object = None  # the last error: its reason and its place
        self._suspects: deque[tuple[Request, int]] = deque()  # and the cached tokens that it must get beyond
        self._in_a_row = 0  # joint steps that failed since the last one that did not

    @property
    def alone(self) -> Request | None:
        """The request that the next step runs alone; None: the step runs all."""
        while self._suspects and self._suspects[0][0].finish_reason is not None:
            self._suspects.popleft()
        return self._suspects[0][0] if self._suspects else None

    def passed(self, alone: Request | None, turns: Sequence[Turn]) -> None:
        """Note a step that did not fail. `alone` is the request that it ran alone."""
        if alone is None:
            self._in_a_row = 0 if turns else self._in_a_row
        elif not turns or alone.cached > self._suspects[0][1]:
            self._suspects.popleft()

    def failed(self, error: Exception, alone: Request | None, turns: Sequence[Turn] | None) -> None:
        """Take back a step that failed. Ends the request that was alone in it.

        Args:
            error: that the step raised.
            alone: the request that the step ran alone.
            turns: of the step; None: it failed while requests were scheduled.
        """
        self.num_failed += 1
        told = reason_of(error), extract_tb(error.__traceback__)[-1:]
        repeated = alone is not None and told == self._told  # a trace is told once
        trace = None if repeated or isinstance(error, SoothsayError) else error  # whose message says all
        facts = {"alone": alone is not None, "reason": told[0]}
        log.log(logging.INFO if repeated else logging.ERROR, "step failed", exc_info=trace, extra=facts)
        self._told = told
        if alone is not None:
            self._scheduler.fail(alone, error)
            return
        scheduler = self._scheduler
        suspects = [*scheduler.running, *scheduler.waiting[:1]]
        if turns is not None:
            suspects = [turn.request for turn in turns]
        rounds = 2 ** min(self._in_a_row, MAX_DOUBLINGS)
        self._in_a_row += 1
        self._suspects.extend((request, request.cached) for request in suspects)
        self._suspects.extend((request, -1) for _ in range(1, rounds) for request in suspects)
        for request in reversed(suspects):
            scheduler.preempt(request)
