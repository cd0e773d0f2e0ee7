"""What a step may take while requests decode, learnt from the time that steps take."""

from collections.abc import Sequence

from soothsay.core.request import Request

SLOW_MASK = 0.01
"""Seconds of masks for a token that make a request slow. Usual grammars take 0.00001 to 0.001."""

MAX_DEBT = 1.0
"""Seconds that slow requests sit out in a row, at most."""

STEP_SHARE = 0.05
"""Seconds that masks of slow requests may take in a step, as far as the last masks tell."""

MIN_PREFILL_ROWS = 32
"""Rows of prefill that every step may have. With fewer, reading the weights would not be worth it."""

SMOOTHING = 0.3
"""Weight of the newest step in the running mean, 0 to 1."""


class Pace:
    """The number of rows that fit into a given time.

    A prefill chunk makes all decoding requests wait. Most engines bound it by a number of rows, which takes
    milliseconds on one machine and seconds on another. Here the bound is a time: Sarathi-Serve's bound on
    stalls (Agrawal et al. 2024, arXiv 2403.02310), with the cost of a row measured as steps run.

    Args:
        seconds: that a step may take; None: any time.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._per_row: float | None = None

    def rows(self, most: int, requests: int) -> int:
        """Rows that fit into the time, at most `most`; at least one a request and `MIN_PREFILL_ROWS`."""
        if self._seconds is None or self._per_row is None:
            return most
        return min(most, max(requests + MIN_PREFILL_ROWS, int(self._seconds / self._per_row)))

    def follow(self, rows: int, seconds: float) -> None:
        """Learn from a step. Small steps are ignored: loading the weights dominates them, so they say nothing
        about the cost of a row.

        A slow step counts for no more than twice the mean: another process may have had the processor.
        """
        if rows < MIN_PREFILL_ROWS:
            return
        per_row = seconds / rows
        if self._per_row is None:
            self._per_row = per_row
        else:
            self._per_row += SMOOTHING * (min(per_row, 2 * self._per_row) - self._per_row)


class MaskPace:
    """Holds back requests whose grammars take long, so that they take at most half of the time.

    All requests of a step wait for the masks of each. After a step with masks of slow requests, these sit out
    until steps without them have taken as long. If all requests are slow, nobody waits for them. A step has
    as many slow requests as fit into `STEP_SHARE`, in turn.
    """

    def __init__(self) -> None:
        self._debt = 0.0  # seconds that the others are to get
        self._line: dict[Request, None] = {}  # slow requests; those that had the last turn are at the end

    def select(self, running: Sequence[Request]) -> Sequence[Request]:
        """The requests that may have a turn in the next step, in order."""
        if not self._line:
            return running
        slow = [request for request in self._line if request in running]
        self._line = dict.fromkeys(slow)
        if not slow:
            return running
        alone, seconds = len(slow) == len(running), 0.0
        chosen = set[Request]()
        for request in slow if alone or self._debt <= 0 else ():
            seconds += mask_seconds(request)
            if chosen and seconds > STEP_SHARE:
                break
            chosen.add(request)
        return [request for request in running if request in chosen or request not in self._line]

    def follow(self, requests: Sequence[Request], seconds: float) -> None:
        """Learn from a step: its requests with grammars, and the seconds that it took without masks."""
        masks = 0.0
        for request in requests:
            self._line.pop(request, None)
            if (own := mask_seconds(request)) > SLOW_MASK:
                masks += own
                if request.finish_reason is None:
                    self._line[request] = None
        self._debt = min(max(self._debt + masks - seconds, 0.0), MAX_DEBT)


def mask_seconds(request: Request) -> float:
    """Seconds that the masks of a request's last token took."""
    return 0.0 if request.constraint is None else request.constraint.seconds
