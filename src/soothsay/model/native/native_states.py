"""Layers with a state in the library: convolutions, the gated delta rule and Mamba-2."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p

from torch import Tensor

from soothsay.core.states import LayerStates
from soothsay.model.ops.delta_rule import Recurrence
from soothsay.model.ops.state_space import StateSpace
from soothsay.model.ops.token_rule import TokenRule


class Convolution(Structure):
    """`soothsay_convolution` of csrc/kernels.h."""

    _fields_ = [("taps", c_void_p), *((name, c_int) for name in ("taps_count", "channels"))]

    @classmethod
    def of(cls, taps: Tensor) -> Convolution:
        """The taps `[taps, channels]` float32 of a layer, which have to outlive it."""
        return cls(taps.data_ptr(), *taps.shape)


class States(Structure):
    """`soothsay_states` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("matrices", "inputs", "journal", "gates")),
        ("nodes", c_int64),
    ]

    @classmethod
    def of(cls, states: LayerStates) -> States:
        """The states of a layer, which have to outlive it."""
        return cls(*places_of(states))


def places_of(states: LayerStates) -> tuple[int, ...]:
    """The fields of `States`: the addresses of its parts, and the nodes that the journal has room for."""
    return *(part.data_ptr() for part in states), states.journal.shape[1]


class Delta(Structure):
    """`soothsay_delta` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "log_rates", "offsets", "scale")),
        *((name, c_int) for name in ("key_heads", "value_heads", "key_size", "value_size")),
        *((name, c_int) for name in ("taps_count", "tiled")),
        ("eps", c_float),
    ]

    @classmethod
    def of(cls, weights: Recurrence) -> Delta:
        """The weights of a layer, which have to outlive it."""
        c, parts = weights.spec, (weights.taps, weights.log_rates, weights.offsets, weights.scale)
        return cls(
            *(part.data_ptr() for part in parts),
            *(c.key_heads, c.value_heads, c.key_size, c.value_size, c.taps, c.tiled, weights.eps),
        )


class StateSpaceWeights(Structure):
    """`soothsay_state_space` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "bias", "log_rates", "offsets", "skips", "scale")),
        *((name, c_int) for name in ("heads", "groups", "head_size", "state_size", "taps_count")),
        ("norm_first", c_int),
        ("eps", c_float),
    ]

    @classmethod
    def of(cls, weights: StateSpace) -> StateSpaceWeights:
        """The weights of a layer, which have to outlive it."""
        c, scale = weights.spec, weights.scale
        parts = (weights.taps, weights.bias, weights.log_rates, weights.offsets, weights.skips)
        return cls(
            *(part.data_ptr() for part in parts),
            None if scale is None else scale.data_ptr(),
            *(c.heads, c.groups, c.head_size, c.state_size, c.taps, c.norm_first, weights.eps),
        )


def rule_structure(rule: TokenRule) -> tuple[str, Structure]:
    """The operation of a layer's rule, and its weights, which have to outlive the structure."""
    if isinstance(rule, Recurrence):
        return "delta", Delta.of(rule)
    assert isinstance(rule, StateSpace)
    return "state_space", StateSpaceWeights.of(rule)
