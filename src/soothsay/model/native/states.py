"""Short convolutions in the library, and the states of layers."""

from __future__ import annotations

from ctypes import Structure, c_int, c_int64, c_void_p

from torch import Tensor

from soothsay.core.states import LayerStates


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
