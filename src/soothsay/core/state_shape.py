"""The sizes of what a layer keeps of a request instead of keys and values. Without torch, for specs."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StateShape:
    """The sizes of what one layer keeps of a request: a convolution's last inputs, and perhaps matrices."""

    channels: int  # size of a token's input of the convolution
    taps: int  # tokens that the convolution reads, its own included
    matrices: tuple[int, int, int] = (0, 0, 0)
    gates: int = 0  # numbers by which a token changes and keeps the matrices

    def state_bytes(self, element_size: int) -> int:
        """Bytes of the state of one request."""
        return 4 * math.prod(self.matrices) + (self.taps - 1) * self.channels * element_size

    def journal_bytes(self, element_size: int) -> int:
        """Bytes that a node of a draft tree takes until the tree is verified."""
        return (self.channels + self.gates) * element_size
