"""What a frozen target computes for examples, kept for later epochs or since it answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.recorded import read_states
from soothsay.train.sequences import Sequences


class FeatureStore:
    """The final states and taps of examples, in memory, in bfloat16, or from a folder of features.

    The target reads an example once instead of in each epoch: it takes most of the time of a step. When the
    memory is full, further examples are computed each time. What is kept was computed beside other examples,
    so a run that was interrupted goes on with slightly other numbers than one that was not.

    Args:
        target: the model.
        taps: layers whose input is kept, with the final states.
        size: bytes that may be kept; 0: nothing is.
    """

    def __init__(self, target: Transformer, taps: Sequence[int], size: int = 0):
        self.target, self.taps, self.left = target, taps, size
        self._kept: dict[int, tuple[Example, Tensor]] = {}  # by the example's identity, which is held

    @torch.no_grad()
    def read(self, examples: Sequence[Example], batch: Sequences) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's final states `[B * T, H]`, and its taps. `batch` has the examples, padded."""
        known = [self._known(example) for example in examples]
        if all(states is not None for states in known):
            return self._restored(cast(list[Tensor], known), batch)
        hidden, taps = self.target(batch, taps=self.taps)
        if self.left > 0:
            whole = torch.stack([hidden, *taps]).bfloat16().view(1 + len(taps), *batch.shape, -1)
            for row, example in enumerate(examples):
                self._keep(example, whole[:, row, : len(example.tokens)])
        return hidden, taps

    def _keep(self, example: Example, states: Tensor) -> None:
        if id(example) not in self._kept and states.numel() * states.itemsize <= self.left:
            self._kept[id(example)] = example, states.clone()
            self.left -= states.numel() * states.itemsize

    def _known(self, example: Example) -> Tensor | None:
        """The states of an example in memory or on disk, `[1 + taps, n, H]` bfloat16; None if not kept."""
        kept = self._kept.get(id(example))
        return read_states(example, self.taps, self.target.config) if kept is None else kept[1]

    def _restored(self, kept: Sequence[Tensor], batch: Sequences) -> tuple[Tensor, tuple[Tensor, ...]]:
        whole = kept[0].new_zeros(len(kept[0]), *batch.shape, kept[0].shape[-1])
        for row, states in enumerate(kept):
            whole[:, row, : states.shape[1]] = states
        hidden, *taps = whole.float().flatten(1, 2)
        return hidden, tuple(taps)
