"""What operations of layers take beside tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rows, `[N, 1, d]` float32 each; see `soothsay.model.decoder.rope.Rope`."""

Ropes = Sequence[Rotation]
"""Cosines and sines of the ways in which heads rotate, as `Rope` returns them."""


class Norm(Protocol):
    """A root mean square norm: `x / rms(x) * weight` in float32. Centred, it norms `x - mean(x)`."""

    @property
    def weight(self) -> Tensor:
        """`[size]` float32."""

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""

    @property
    def centred(self) -> bool:
        """Whether the mean is subtracted first. Only `Kernels.norm` takes such a norm."""

    @property
    def bias(self) -> Tensor | None:
        """`[size]` float32, added last; None: nothing is added. Only centred norms have one."""


class Mixture(Protocol):
    """A mixture of experts: `soothsay.model.decoder.feed_forward.Experts`."""

    def mixed(self, x: Tensor, scores: Tensor | None = None) -> Tensor:
        """`[N, in] -> [N, in]` float32, of the router's scores `[N, experts]`."""
