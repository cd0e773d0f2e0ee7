"""A decoder block in one call of the library."""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from soothsay.engine.batch import Batch
from soothsay.model.kernels import Norm
from soothsay.model.transformer import Block, FeedForward
from soothsay.native.linear import NativeLinear

if TYPE_CHECKING:
    from soothsay.native.kernels import NativeKernels

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class _Weights(Structure):
    """`soothsay_weights` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "scales", "zeros", "bias")),
        *((name, c_int) for name in ("bits", "inputs", "outputs", "group")),
    ]


class _Parts(Structure):
    """`soothsay_parts` of csrc/kernels.h."""

    _fields_ = [
        *((name, _Weights) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "attention_post_norm")),
        *((name, c_void_p) for name in ("mlp_norm", "mlp_post_norm", "q_norm", "k_norm")),
        ("window", c_int64),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        *((name, c_int) for name in ("is_bf16", "queries", "keys", "d", "activation")),
    ]


class NativeBlock:
    """What `Block.forward` computes, with the same bits: the library's kernels, called by the library.

    Args:
        kernels: whose library it is.
        block: one that `fits`.
    """

    def __init__(self, kernels: NativeKernels, block: Block):
        c, attention = block.attention.config, block.attention
        mlp = cast(FeedForward, block.mlp)
        layers = [cast(NativeLinear, one) for one in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
        norms = (
            *(block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm),
            *(attention.q_norm, attention.k_norm),
        )
        self.kernels, self.dtype = kernels, block.dtype
        self._held = layers, norms  # the library has their addresses
        self._parts = _Parts(
            *(_weights(layer) for layer in layers),
            *(_address(norm) for norm in norms),
            *(attention.window or 0, block.mlp_norm.eps, c.attention_scale, c.attention_softcap or 0.0),
            *(self.dtype == torch.bfloat16, c.num_heads, c.num_kv_heads, c.head_dim),
            ACTIVATIONS[c.activation],
        )
        self._pointer = byref(self._parts)
        # bytes a row of what is written on the way, in three places; see csrc/kernels.h
        size, queries = self.dtype.itemsize, 4 * c.num_heads * c.head_dim
        qkv, o, gate_up, down = layers
        self._scratch = (
            size * max(o.out_features, down.in_features),
            max(size * qkv.out_features, size * o.out_features, queries),
            max(size * gate_up.out_features, queries),
        )
        self._kv = 2 * c.num_kv_heads, c.head_dim

    @staticmethod
    def fits(block: Block) -> bool:
        """Whether all that the block consists of is the library's."""
        attention, mlp = block.attention, block.mlp
        if not isinstance(mlp, FeedForward):
            return False
        layers = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        return all(isinstance(layer, NativeLinear) and layer.dtype == block.dtype for layer in layers)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Tensor | None, inputs: Tensor | None
    ) -> Tensor:
        """See `Block.forward`."""
        rows = len(x)
        if kv is None:
            kv = torch.empty(self._kv[0], rows, self._kv[1], dtype=self.dtype)
        out = torch.empty(x.shape)
        scratch = [torch.empty(rows * size, dtype=torch.uint8) for size in self._scratch]
        self.kernels.run_block(
            self._pointer,
            x.data_ptr(),
            None if inputs is None else inputs.data_ptr(),
            inputs is not None and inputs.dtype == torch.bfloat16,
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            rows,
            batch.slots.data_ptr(),
            *batch.flat.pointers,
            kv.data_ptr(),
            kv.shape[1],
            *[place.data_ptr() for place in scratch],
            out.data_ptr(),
        )
        return out


def _weights(layer: NativeLinear) -> _Weights:
    data, bits, scales, zeros, bias, inputs, outputs, group = layer.weights
    return _Weights(data, scales, zeros, bias, bits, inputs, outputs, group)


def _address(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
