"""What a layer reads in a pass beside its rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import KVAndStates, LayerMemory
from soothsay.core.states import LayerStates
from soothsay.model.ops.operands import Rotation


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Where the rows of a pass stand, and the memory of one layer."""

    batch: Batch
    rope: Rotation
    kv: Tensor | None = None
    """`[heads, S, row]`, keys and values; None: they live within the pass."""
    states: LayerStates | None = None
    """None: states live within the pass."""
    inputs: Tensor | None = None
    """`[N, in]`, what attention reads in place of the normed stream."""
    embedding: Tensor | None = None
    """`[N, size]` float32, the layer's own embedding of each token."""

    @classmethod
    def of(
        cls,
        batch: Batch,
        rope: Rotation,
        memory: LayerMemory | None,
        inputs: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> LayerPass:
        """The pass of a layer with this memory; None: everything lives within the pass."""
        return cls(batch, rope, *parts_of(memory), inputs, embedding)

    def keys(self, heads: int, size: int, like: Tensor) -> Tensor:
        """The keys and values. Within the pass, row i is in slot i, with the dtype of `like`."""
        return like.new_empty(heads, len(like), size) if self.kv is None else self.kv


def parts_of(memory: LayerMemory | None) -> tuple[Tensor | None, LayerStates | None]:
    """The keys and values in a layer's memory, and the states."""
    if isinstance(memory, KVAndStates):
        return memory.kv, memory.states
    return (None, memory) if isinstance(memory, LayerStates) else (memory, None)
