"""The gated delta rule in the library."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

from soothsay.model.delta_rule import Recurrence


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
