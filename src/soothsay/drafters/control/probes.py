"""Section 5 of docs/controller.md: when a drafter that is not expected to pay is asked again.

All intervals are powers of two of steps, and start at multiples of themselves. So requests probe in the same
step and share the cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from soothsay.drafters.control.constants import MAX_BACK_OFF, NEW_REQUEST_BACK_OFF, PROBE_SHARE

NEVER = 1 << 62
"""A step that is never reached."""


@dataclass(slots=True)
class ProbeSchedule:
    """When one drafter is probed for one request.

    An interval of 1 means that the drafter paid at its last draft. A longer one means that it pauses.
    """

    next_step: int = 0
    interval: int = 1  # steps between two probes

    @property
    def retired(self) -> bool:
        """Whether the drafter is never asked for this request again."""
        return self.next_step == NEVER

    @property
    def pays(self) -> bool:
        """Whether the drafter paid at its last draft, or was never asked."""
        return self.interval == 1

    def retire(self) -> None:
        """Stop all probes."""
        self.next_step = NEVER

    def is_due(self, step: int) -> bool:
        """Whether the drafter pauses and is to be probed in this step."""
        return self.interval > 1 and self.next_step <= step

    def stretch(self, step: int, loss: float) -> None:
        """Lengthen the interval of a drafter that pauses, if probes at this loss were too frequent."""
        if self.interval == 1 or self.retired:
            return
        if self.interval < (shortest := shortest_interval(loss)):
            self._start(step, shortest)

    def pause(self, step: int, loss: float) -> None:
        """Begin to pause, if the drafter was not pausing: its forecast has fallen below its price."""
        if self.interval == 1:
            self._start(step, shortest_interval(loss))

    def record(self, step: int, pays: bool, loss: float) -> None:
        """Set the interval after a draft: 1 if it paid. After a probe that did not pay, back off.

        Args:
            step: the current step.
            pays: whether the draft added more than the drafter's usual price.
            loss: tokens that the draft cost now, with catching up, less those that it was expected to add.
        """
        if pays:
            self._start(step, 1)
            return
        shortest = shortest_interval(loss)
        was_probe = self.next_step <= step  # otherwise it was asked because it was expected to pay
        self._start(step, min(max(self.interval << was_probe, shortest), MAX_BACK_OFF * shortest))

    def _start(self, step: int, interval: int) -> None:
        self.interval, self.next_step = interval, (step // interval + 1) * interval


@dataclass(slots=True)
class StartInterval:
    """The interval that new requests start with, learned from one drafter's drafts for all requests."""

    interval: int = 1

    def new_schedule(self, step: int) -> ProbeSchedule:
        """The schedule of a new request."""
        next_step = 0 if self.interval == 1 else (step // self.interval + 1) * self.interval
        return ProbeSchedule(next_step, self.interval)

    def record(self, pays: bool, loss: float) -> None:
        """Count a draft, as in `ProbeSchedule.record`. `pays`: the request's interval is 1 after it."""
        shortest = shortest_interval(loss)
        self.interval = 1 if pays else min(max(2 * self.interval, shortest), NEW_REQUEST_BACK_OFF * shortest)


def shortest_interval(loss: float) -> int:
    """Steps between probes that lose `loss` tokens each, and `PROBE_SHARE` of the time together."""
    return 1 << int(loss / PROBE_SHARE).bit_length()
