"""A part of a model: consecutive layers, with what these layers keep of tokens. It may run elsewhere."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import KVPool, Move


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of a KV pool, in all layers of a model."""

    num_blocks: int
    block_size: int  # slots in a block
    requests: int = 1  # whose states it holds at a time, if the model has states
    snapshots: int = 0  # copies of states that it holds beside these
    nodes: int = 1  # of the largest tree, the root included
    is_filled: bool = False  # with noise, as memory in use is; else with zeros


class StagePass(NamedTuple):
    """One pass through some consecutive layers."""

    x: Tensor  # [N, hidden] float32, the first layer's input
    batch: Batch  # N rows
    cache: KVPool | None  # keys and values; None: they live within the pass
    layers: Sequence[int]  # the layers to run, ascending; at least one
    taps: Collection[int]  # those of `layers` whose input is returned, and others, which are ignored
    embeddings: Tensor | None  # [layers, N, size] float32, if these layers read embeddings of their own


class Layers(Protocol):
    """Consecutive layers of a model. `soothsay.model.transformer.LocalStage` has them in this process."""

    @property
    def layers(self) -> range:
        """The numbers of the layers."""

    def run(self, at: StagePass) -> dict[int, Tensor]:
        """Return `[N, hidden]` float32 inputs by tap, and the last output by `self.layers.stop`."""

    def commit(self, cache: KVPool, moves: Sequence[Move]) -> None:
        """Take in the accepted nodes of the last pass: their KV, and what they do to states."""

    def copy_state(self, cache: KVPool, source: int, target: int) -> None:
        """Copy a state from slot to slot."""


class Stage(Layers, Protocol):
    """Layers of a model that another process runs.

    It keeps a pool of its own for each pool of the model, so that a slot means the same token in all of them.
    Any method may raise `StageError`.
    """

    @property
    def memory(self) -> int:
        """Bytes of memory that were free there once the layers were loaded."""

    @property
    def machine(self) -> str:
        """The name of its machine."""

    def follow(self, cache: KVPool, size: PoolSize) -> None:
        """Make the pool that belongs to `cache`. It is freed with `cache`."""

    def close(self) -> None:
        """End it. Idempotent."""
