"""Mixtures of experts in one call of the library."""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int, c_void_p
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.model.decoder.feed_forward import DensePart, Experts
from soothsay.model.native.native_linear import NativeLinear, address
from soothsay.model.specs.feed_forward_spec import RoutingSpec

_ORDER = "silu gelu_tanh gelu clipped_swiglu relu2 relu plain_gelu_tanh plain_gelu"
ACTIVATIONS = {name: number for number, name in enumerate(_ORDER.split())}
"""As `Activation` of csrc/activations.h counts them."""


class Routing(Structure):
    """`soothsay_routing` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("correction", "scales")),
        *((name, c_int) for name in ("count", "each", "sigmoid", "normalize", "groups", "kept", "best")),
        ("scale", c_float),
        ("scales_inputs", c_int),
    ]

    @classmethod
    def of(cls, c: RoutingSpec, correction: Tensor | None, scales: Tensor | None) -> Routing:
        """How `c` chooses experts. `correction` and `scales` `[experts]` float32 have to outlive it."""
        return cls(
            *(address(correction), address(scales), c.count, c.chosen, c.sigmoid, c.normalize),
            *(c.groups, c.groups_chosen, c.group_best, c.scale, c.scales_inputs),
        )


class _Expert(Structure):
    """`soothsay_expert` of csrc/kernels.h."""

    _fields_ = [("gate_up", c_void_p), ("down", c_void_p)]

    @classmethod
    def of(cls, layers: tuple[NativeLinear, NativeLinear]) -> _Expert:
        return cls(*(layer.address for layer in layers))


class _Mixture(Structure):
    """`soothsay_mixture` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("router", "experts", "shared")),
        ("routing", Routing),
        *((name, c_int) for name in ("activation", "is_bf16")),
        ("ran", c_void_p),
    ]


class Mixture:
    """The experts of a layer as the library reads them, at an `address`. They pass `fit`."""

    def __init__(self, experts: Experts):
        parts = [cast(DensePart, part) for part in experts.experts]
        layers = [native_layers(part) for part in parts]
        shared = native_layers(cast(DensePart, experts.shared)) if experts.mixes_shared else None
        vectors = [None if v is None else v.value for v in (experts.correction, experts.scales)]
        router = experts.router if isinstance(experts.router, NativeLinear) else None
        each = (_Expert * len(layers))(*(_Expert.of(pair) for pair in layers))
        beside = None if shared is None else _Expert.of(shared)
        self._struct = _Mixture(
            None if router is None else router.address,
            addressof(each),
            None if beside is None else addressof(beside),
            Routing.of(experts.spec.routing, *vectors),
            *(ACTIVATIONS[parts[0].activation], layers[0][1].dtype == torch.bfloat16),
            experts.ran.data_ptr(),
        )
        # keeps alive what the library reads
        self._held = layers, shared, vectors, router, each, beside, experts.ran
        self.address = addressof(self._struct)

    @staticmethod
    def fit(experts: Experts) -> bool:
        """Whether the library computes all of it, but perhaps for the router's scores."""
        if not isinstance(experts.experts[0], DensePart):
            return False
        parts = [cast(DensePart, part) for part in experts.experts]
        shared = [] if experts.shared is None else [experts.shared]
        layers = [layer for part in (*parts, *shared) for layer in (part.first, part.down)]
        router = [experts.router] if is_native(experts.router) else []
        dtype = layers[0].dtype
        return all(is_native(layer) and layer.dtype == dtype for layer in layers + router)


def native_layers(part: DensePart) -> tuple[NativeLinear, NativeLinear]:
    """The two layers of a part whose layers are the library's."""
    return cast(NativeLinear, part.first), cast(NativeLinear, part.down)


def is_native(layer: nn.Module) -> bool:
    """Whether the library multiplies by this layer."""
    return isinstance(layer, NativeLinear)
