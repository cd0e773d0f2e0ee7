"""What the bits of an engine's answers depend on besides the request. Without torch, for the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numerics:
    """The numeric mode of an engine. Engines with equal ones give equal answers, bit for bit.

    `probe` is what the engine computed for a fixed prompt. It shows differences that `mode` does not name,
    such as other weights under the same path.
    """

    mode: str  # kernels, number formats and versions, for people
    room: int  # tokens of prompt and answer that a request can have
    probe: str  # digest of the log-probabilities of a fixed prompt, by each adapter too

    def differences(self, other: Numerics) -> list[str]:
        """What differs, in words."""
        named = [
            f"{mine!r} and {theirs!r}"
            for mine, theirs in ((self.mode, other.mode), (f"room {self.room}", f"room {other.room}"))
            if mine != theirs
        ]
        if not named and self.probe != other.probe:
            named = ["the weights, or what a processor computes: the same prompt has other log-probabilities"]
        return named


UNKNOWN = Numerics("", 0, "")
"""The numeric mode of an engine that has not named one."""
