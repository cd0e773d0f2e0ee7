"""A drafter's one look at the target's features, in one call."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int, c_void_p

import torch
from torch import Tensor

from soothsay.drafters.ops.refinement import Looked
from soothsay.model.kernels import LookLayers
from soothsay.model.native.linear import NativeLinear

LAYERS = "look", "guesses", "cell_read", "cell_token", "cell_out", "head"
"""The linear layers of a look."""


class _Looking(Structure):
    """`soothsay_looking` of csrc/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in LAYERS),
        ("norm", c_void_p),
        ("eps", c_float),
        *((name, c_int) for name in ("embedding", "depths")),
    )


class NativeLook:
    """Computes a `FusedLook`. Outputs of layers are float32, whatever type they were made to have.

    Args:
        run: the library's `soothsay_look`.
        layers: pass `fit`.
    """

    def __init__(self, run: Callable[..., None], layers: LookLayers):
        self._run, self._layers = run, layers  # which the library reads
        linear: list[NativeLinear] = [getattr(layers, name) for name in LAYERS]
        read, head = linear[LAYERS.index("cell_read")], linear[LAYERS.index("head")]
        self._units, self._tokens, norm = read.out_features, head.out_features, layers.norm
        self._looking = _Looking(
            *(one.address for one in linear),
            norm.weight.data_ptr(),
            norm.eps,
            read.in_features,
            layers.depths,
        )

    @staticmethod
    def fit(layers: LookLayers) -> bool:
        """Whether the library's call computes each layer."""
        return all(isinstance(getattr(layers, name), NativeLinear) for name in LAYERS)

    def __call__(self, features: Tensor, embedded: Tensor) -> Looked:
        """See `FusedLook`."""
        features, embedded = features.float().contiguous(), embedded.contiguous()
        rows, depths = len(features), self._layers.depths
        out = Looked(
            logits=torch.empty(rows * depths, self._tokens),
            read=torch.empty(rows * depths, self._units),
            states=torch.empty(rows, self._units),
        )
        self._run(
            byref(self._looking),
            features.data_ptr(),
            embedded.data_ptr(),
            rows,
            *(part.data_ptr() for part in out),
        )
        return out
