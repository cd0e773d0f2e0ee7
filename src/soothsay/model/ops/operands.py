"""What operations of layers take beside tensors."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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


class HeadForm(NamedTuple):
    """What becomes of the heads of a product, `[N, H_q + gates + 2 * keys, d]`, before they are used."""

    scale: float = 1.0
    """Factor of the queries."""
    norms: tuple[Norm, Norm] | None = None
    """The norms of queries and of keys. Each head is normed before it is rotated."""
    value_norm: Norm | None = None
    """The norm of each head of values."""
    gates: int = 0
    """Heads after the queries that are left out."""
    keys: int | None = None
    """Heads of keys; None: all that the pool has. 0: nothing is written."""
    centre: Tensor | None = None
    """`[H_kv, d]` float32, subtracted from rotated keys; None: zeros."""

    def counts(self, heads: int, kv: Tensor) -> tuple[int, int]:
        """How many of `heads` are queries, and how many keys, for a KV pool."""
        keys = kv.shape[0] // 2 if self.keys is None else self.keys
        return heads - self.gates - 2 * keys, keys


class Scoring(NamedTuple):
    """How scores of keys become weights."""

    softcap: float | None = None
    """Smooth bound of the scores' size (Gemma 2)."""
    window: int | None = None
    """A row sees only the last `window` positions, its own included. Negative: see `AttentionSpec`."""
    sinks: Tensor | None = None
    """`[H_q]` float32, for each head a score of a key without a value, which all rows see (Xiao et al. 2023,
    arXiv 2309.17453; gpt-oss learns it)."""
    relative: Tensor | None = None
    """`[H_q, 2 * most + 1]` float32, added to scores by the distance from a row to its key: for a key that is
    `most` or more before the row, ..., and `most` or more after it. The first key of each path has position
    0."""


PLAIN = Scoring()
"""Scores become weights by a softmax over all keys."""
