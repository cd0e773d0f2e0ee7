"""How the parts of a model read their own weights from a checkpoint."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn


class Table(Protocol):
    """A table of which rows are had when they are needed."""

    @property
    def shape(self) -> torch.Size:
        """`[rows, size]`."""

    def floats(self, rows: Tensor) -> Tensor:
        """Some rows in float32: `[n]` int64, their numbers, to `[n, size]`."""


class StoredWeights(Protocol):
    """The weights of a checkpoint, by our names of modules. `soothsay.model.weights.load` has one.

    All methods raise `ModelError` if tensors are missing or have other shapes.
    """

    @property
    def zero_centred_norms(self) -> bool:
        """Whether a norm's weight w is stored as w - 1."""

    @property
    def rounds_scale(self) -> bool:
        """Whether the scale of embeddings is rounded to the dtype of their table."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the KV pool."""

    def tensor(self, module: str, suffix: str, expected: Tensor) -> Tensor:
        """A plain tensor of a module, in the shape of `expected`."""

    def plain(self, module: str, expected: Tensor) -> Tensor:
        """The weight of a linear layer, dequantized if it is stored in integers."""

    def linear(self, module: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """The kernels' layer of a stored weight and bias in these shapes."""

    def blocks(self, module: str) -> Table | None:
        """The rows of a table in blocks of integers, if they stay so."""


class LoadedPart(nn.Module, ABC):
    """A module with weights of its own in checkpoints."""

    @abstractmethod
    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """Read the weights of the module called `name`. Returns what takes its place: perhaps itself."""


class FloatPart(LoadedPart):
    """A module whose parameters stay plain, in float32. Those that are None are not stored.

    Args:
        convolved: the parameter `[taps, channels]` that is stored as a convolution's `[channels, 1, taps]`.
        stored: our names of parameters, and those in checkpoints. With spaces, as many equal parts.
    """

    def __init__(self, convolved: str | None = None, **stored: str):
        super().__init__()
        self._convolved, self._stored = convolved, stored

    def load(self, weights: StoredWeights, name: str) -> nn.Module:
        """See `LoadedPart`."""
        for own, theirs in self._stored.items():
            expected: Tensor | None = getattr(self, own)
            if expected is None:
                continue
            whole = expected.t()[:, None] if own == self._convolved else expected
            names = theirs.split()
            parts = [whole] if len(names) == 1 else whole.chunk(len(names))
            held = [weights.tensor(name, *part) for part in zip(names, parts, strict=True)]
            read = held[0] if len(held) == 1 else torch.cat(held)
            if own == self._convolved:
                read = read[:, 0].t()
            value = read.float().clone(memory_format=torch.contiguous_format)
            self.register_parameter(own, nn.Parameter(value))
        return self
