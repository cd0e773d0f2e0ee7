"""What a head must agree with: the model it was trained for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from soothsay.config import ModelConfig
from soothsay.drafters.base import Target
from soothsay.drafters.head import Origin
from soothsay.errors import DrafterError
from soothsay.model.kernels import Kernels, StockKernels
from soothsay.model.transformer import Embedding
from soothsay.native.kernels import NativeKernels

PADDING = 1024
"""Vocabularies whose sizes differ by less than this many rows are one, padded differently (Qwen's 151,936 and
152,064)."""


@dataclass(frozen=True)
class Fit:
    """The model that a head's features, embeddings and output head come from."""

    config: ModelConfig
    embedding: Embedding
    context: int
    kernels: Kernels
    name: str
    """Of the directory that is read, for messages."""

    @classmethod
    def of(cls, target: Target, name: str) -> Fit:
        """For a grown target, the small model that it was made from."""
        origin = Origin.of(target)
        context = target.config.max_context or target.model.config.max_positions
        return cls(origin.config, origin.shared.embedding, context, target.model.kernels, name)

    def kernels_for(self, block: ModelConfig) -> Kernels:
        """The target's, where they can compute this block."""
        native = isinstance(self.kernels, NativeKernels)
        return self.kernels if not native or NativeKernels.fit(block) else StockKernels()

    def has_embedding(self, table: Tensor) -> bool:
        """Whether the model's embedding is this one, so that a copy of it can be left out."""
        own = self.embedding.weight
        same = self.embedding.scale == 1.0 and own.shape == table.shape and not own.is_meta
        return same and torch.equal(own.cpu(), table.to(own.dtype))

    def check(self, *, hidden: int, vocab: int) -> None:
        """Raises `DrafterError` unless the hidden size is the target's, and the vocabulary too but for its
        padding.
        """
        if hidden != self.config.hidden_size:
            self.refuse(
                f"was made for a model of hidden size {hidden}; the target's is {self.config.hidden_size}"
            )
        if abs(vocab - self.config.vocab_size) >= PADDING:
            self.refuse(
                f"was made for a vocabulary of {vocab:,} tokens; the target's has {self.config.vocab_size:,}"
            )

    def check_layers(self, layers: int) -> None:
        """Raises `DrafterError` for a target of another depth."""
        if layers != self.config.num_layers:
            self.refuse(f"was made for a model of {layers} layers; the target has {self.config.num_layers}")

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises `DrafterError` for layers that the target does not have."""
        if not taps or min(taps) < 0 or max(taps) > self.config.num_layers:
            self.refuse(f"reads layers {list(taps)}; the target has {self.config.num_layers}")

    def check_context(self, positions: int) -> None:
        """Warns where requests may become longer than what the head was trained for."""
        if positions < self.context:
            warnings.warn(
                f"{self.name} was made for contexts of {positions:,} tokens, requests may have "
                f"{self.context:,}: beyond the former its guesses may be poor (never the answers)",
                stacklevel=2,
            )

    def refuse(self, why: str) -> None:
        """Raises `DrafterError`: the head is another model's."""
        raise DrafterError(f"{self.name} {why}: take the drafter that was trained for this target")
