"""Mamba-2 in the library."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

from soothsay.model.state_space import StateSpace


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
