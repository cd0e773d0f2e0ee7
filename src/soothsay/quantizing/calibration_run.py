"""Runs calibration text through a model block by block, while the blocks' layers become integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import exp
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.batch import Rows
from soothsay.model.blocks import Block, unrecord
from soothsay.model.transformer import Transformer

ROWS = 2048
"""Largest number of tokens that go through a block in one call."""


class CalibrationRun:
    """Calibration text and held-out text on their way through a model.

    Calibration text shows what inputs the layers get. Held-out text measures perplexity: once through the
    blocks as they were, once through the blocks as they become. For each block in order: call `measure`,
    change the block's layers, and call `advance`.

    Args:
        model: its blocks are changed by the caller.
        text: `[n, tokens]` int64.
        held_out: share of the samples that are held out, rounded down: one in `held_out` + 1.
    """

    def __init__(self, model: Transformer, text: Tensor, held_out: int):
        held = len(text) // (held_out + 1)
        self.blocks = [cast(Block, block) for block in model.blocks]
        unrecord(model)
        self._text = _SampleStates(model, text[held:])
        self._before, self._after = _SampleStates(model, text[:held]), _SampleStates(model, text[:held])

    def measure(self, block: Block, paths: Iterable[str]) -> dict[str, Tensor]:
        """Sum `X^T X` over the inputs `X` of the layers at `paths` in `block`.

        Call it before the block is changed.

        Returns:
            `[inputs, inputs]` float32 by path. A layer that the text never reaches, such as an expert that no
            token is sent to, is missing.
        """
        self._before.advance(block)
        sums: dict[str, Tensor] = {}

        def add(path: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].float()
            if path not in sums:
                sums[path] = x.new_zeros(x.shape[1], x.shape[1])
            sums[path].addmm_(x.t(), x)

        hooks = [block.get_submodule(path).register_forward_pre_hook(partial(add, path)) for path in paths]
        for _ in self._text.through(block):
            pass
        for hook in hooks:
            hook.remove()
        return sums

    def advance(self, block: Block) -> None:
        """Move on to the next block. `block` is the current one, with its layers changed."""
        self._text.advance(block)
        self._after.advance(block)

    def perplexity(self) -> tuple[float, float] | None:
        """Perplexity of the held-out text with the blocks as they were, and as they are. None without text.

        Call it after the last block.
        """
        if not len(self._before.samples):
            return None
        return self._before.perplexity(), self._after.perplexity()


class _SampleStates:
    """Samples, and their hidden states at the input of the next block."""

    def __init__(self, model: Transformer, samples: Tensor):
        self.model, self.samples = model, samples
        step = max(1, ROWS // samples.shape[1])
        requests = [Rows(ids, 0) for ids in samples.numpy()]
        self.batches = [model.pack(requests[i : i + step]) for i in range(0, len(requests), step)]
        # the layer's input for each batch, [rows, H]
        self.states = [model.stream.enter(model.embedding(batch.tokens)) for batch in self.batches]

    def through(self, block: Block) -> Iterator[Tensor]:
        """The outputs of `block`, batch by batch."""
        rope = self.model.ropes[block.rope_number]
        for batch, state in zip(self.batches, self.states, strict=True):
            yield block(state, rope(batch.positions), batch, None)

    def advance(self, block: Block) -> None:
        """Replace the states by the outputs of `block`."""
        for i, state in enumerate(self.through(block)):
            self.states[i] = state

    def perplexity(self) -> float:
        """Perplexity of the samples. Valid after the last block."""
        model, loss = self.model, 0.0
        states = torch.cat(self.states).view(*self.samples.shape, -1)
        for ids, state in zip(self.samples, states, strict=True):
            logits = model.logits(model.final(state[:-1].contiguous()))
            loss += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        return exp(loss / self.samples[:, 1:].numel())
