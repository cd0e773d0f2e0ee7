"""The residual stream: what layers read and add to, from the embeddings to the last norm."""

from __future__ import annotations

from torch import Tensor, nn


class Stream(nn.Module):
    """A stream of rows of the hidden size. Another kind of stream is a subclass.

    It is divided by `multiplier`. So layers add to it without multiplying what they add. They compute the
    same, since each begins with a norm.
    """

    def __init__(self, multiplier: float = 1.0):
        super().__init__()
        self.multiplier = multiplier

    def enter(self, x: Tensor) -> Tensor:
        """Embeddings `[N, hidden]` float32 to the first layer's input `[N, width]`."""
        return x if self.multiplier == 1.0 else x / self.multiplier

    def tap(self, x: Tensor) -> Tensor:
        """What a drafter sees of a layer's input: `[N, width] -> [N, hidden]`."""
        return x if self.multiplier == 1.0 else x * self.multiplier

    def leave(self, x: Tensor) -> Tensor:
        """The last layer's output as final states, before their norm: `[N, width] -> [N, hidden]`."""
        return self.tap(x)
