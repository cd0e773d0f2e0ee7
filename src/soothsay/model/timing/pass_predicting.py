"""The work of a pass, and a model of the processor: the times of passes until some are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soothsay.core.cache import kv_bytes
from soothsay.model.timing.pass_times import PassTimes
from soothsay.model.transformer import Transformer, linear_shapes

BANDWIDTH = 14e9
"""Bytes that a core reads in a second. An EPYC of Zen 4 reads 29e9 on two cores."""

OPERATIONS = {
    "amx": (1000e9, 500e9),
    "avx512bf16": (240e9, 100e9),
    "avx512vnni": (240e9, 60e9),
    "avx512": (100e9, 60e9),
    "avxvnni": (120e9, 30e9),
    "avx2": (60e9, 30e9),
}
"""Operations that a core does in a second, by instruction set: with weights in integers, and in floats. Those
of `avx512bf16` are measured, on an EPYC of Zen 4, and the others are guesses by the width of instructions."""

OTHER_OPERATIONS = (20e9, 20e9)
"""The same for all other sets of kernels."""

GPU_BANDWIDTH, GPU_OPERATIONS = 1.5e12, (300e12, 150e12)
"""Both for a GPU: about those of an A100."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a pass."""

    bytes: int
    """Bytes read: weights and scales of all linear layers, keys and values of the context, and states."""

    operations: int
    """Operations of linear layers and attention; a multiplication and an addition are two."""

    @classmethod
    def of(cls, model: Transformer, rows: int, context: int) -> Work:
        """Return the work of a pass of `rows` rows. Mixtures of experts count with all experts."""
        c, layers = model.spec, linear_layers(model)
        kv, attention, element = 0, 0, model.dtype.itemsize
        heads_of_all = [0 if layer.attention is None else layer.attention.heads for layer in c.layers]
        shapes = [layer.kv_shape for layer in c.layers]  # no heads where another layer's keys are read
        for window, queries, (heads, size) in zip(c.windows, heads_of_all, shapes, strict=True):
            keys = 0 if not queries else context if window is None else min(abs(window), context)
            kv += kv_bytes([(heads, size)], model.kv_dtype) * keys
            attention += 4 * queries * size * keys
        kv += c.state_bytes(element)
        # a state is read once, and each row multiplies it four times
        attention += 8 * sum(math.prod(state.matrices) for state in c.states.values())
        return cls(
            bytes=sum(held_bytes(layer) for layer, _ in layers) + kv,
            operations=rows * (2 * sum(shape.numel() for _, shape in layers) + attention),
        )

    def floor(self, bandwidth: float, rate: float) -> float:
        """Return the lower bound in seconds, for rates in bytes and operations a second."""
        return max(self.bytes / bandwidth, self.operations / rate)

    def expected(self, times: int, bandwidth: float, rate: float) -> float:
        """The expected seconds of a pass with `times` as many rows, for rates as in `floor`."""
        return math.hypot(self.bytes / bandwidth, times * self.operations / rate)


def linear_layers(model: Transformer) -> list[tuple[nn.Module, torch.Size]]:
    """Return every linear layer with its shape `[out, in]`, which not all kinds of layers store.

    Layers of a model that other processes hold are left out.
    """
    held = dict(model.named_modules())
    return [(held[name], shape) for name, shape in linear_shapes(model.spec).items() if name in held]


def held_bytes(layer: nn.Module) -> int:
    """Return the bytes of all tensors of a linear layer: weights, scales, zeros, bias."""
    holders = layer, *getattr(layer, "parts", ())
    attributes = [value for one in holders for value in vars(one).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers(), *attributes))


def predicted_times(model: Transformer, context: int) -> PassTimes:
    """The times of passes as the model's work and the kind of this processor suggest.

    Their ratios matter more than the times themselves: the first pass that is run tells the scale.

    Args:
        model: the model, on the device where it will run.
        context: the longest context that a request may have.
    """
    threads, name = torch.get_num_threads(), model.kernels.name.rpartition(" ")[2]
    bandwidth, is_plain = BANDWIDTH * threads, model.bits is None
    rate = OPERATIONS.get(name, OTHER_OPERATIONS)[is_plain] * threads
    if model.device.type != "cpu":
        bandwidth, rate = GPU_BANDWIDTH, GPU_OPERATIONS[is_plain]
    rows, contexts = [2**power for power in range(7)], [0, context]
    work = [Work.of(model, 1, tokens) for tokens in contexts]
    seconds = [[one.expected(model.kernels.padded(count), bandwidth, rate) for count in rows] for one in work]
    return PassTimes(rows, contexts, seconds)
