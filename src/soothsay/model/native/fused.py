"""Decoder blocks fused into one call of the library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_int64, c_void_p
from typing import cast

import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.model.feed_forward import Experts, FeedForward
from soothsay.model.kernels import Norm, Ropes
from soothsay.model.native.experts import ACTIVATIONS, Mixture, is_native, native_layers
from soothsay.model.native.linear import NativeLinear, address
from soothsay.model.transformer import Attention, Block


class _Parts(Structure):
    """`soothsay_parts` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "mixture")),
        *((name, c_void_p) for name in ("attention_norm", "attention_post_norm")),
        *((name, c_void_p) for name in ("mlp_norm", "mlp_post_norm", "q_norm", "k_norm", "sinks")),
        ("window", c_int64),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        *((name, c_int) for name in ("is_bf16", "hidden", "queries", "keys", "d", "activation", "is_local")),
    ]


class NativeBlocks:
    """Computes `Blocks.forward` in one call, with the same bits: the library itself calls its kernels.

    Args:
        run: the library's `soothsay_blocks`.
        blocks: of one configuration; each passes `fit`.
    """

    def __init__(self, run: Callable[..., None], blocks: Sequence[Block]):
        self._run = run
        # keep alive what the library reads
        mixtures = [Mixture(block.mlp) if isinstance(block.mlp, Experts) else None for block in blocks]
        self._held = [(_layers(block), _norms(block), _sinks(block)) for block in blocks], mixtures
        self._parts = [_parts(block, mixture) for block, mixture in zip(blocks, mixtures, strict=True)]
        self._addresses = [addressof(parts) for parts in self._parts]
        attention = blocks[0].attention
        c, self._dtype = attention.config, blocks[0].dtype
        self._kv = 2 * c.num_kv_heads, c.head_dim
        # bytes a row of three scratch buffers; see csrc/kernels.h
        size, queries = self._dtype.itemsize, 4 * c.num_heads * c.head_dim
        qkv, o, *_ = _layers(blocks[0])
        dense = [cast(NativeLinear, block.mlp.down) for block in blocks if isinstance(block.mlp, FeedForward)]
        inner = max((down.in_features for down in dense), default=0)
        self._scratch = (
            size * max(o.out_features, inner),
            max(size * qkv.out_features, size * o.out_features, queries),
            max(size * 2 * inner, queries, 4 * o.out_features),
        )

    @staticmethod
    def fit(block: Block) -> bool:
        """Whether the library's call computes each part of a block."""
        if not block.attention.config.has_common_blocks:
            return False
        if isinstance(block.mlp, Experts) and not (Mixture.fit(block.mlp) and is_native(block.mlp.router)):
            return False
        return all(is_native(layer) and layer.dtype == block.dtype for layer in _layers(block))

    def __call__(
        self,
        x: Tensor,
        ropes: Ropes,
        batch: Batch,
        kv: Sequence[LayerMemory] | None,
        layers: Sequence[int],
        taps: Collection[int],
        inputs: Tensor | None,
    ) -> dict[int, Tensor]:
        """See `FusedBlocks`."""
        rows = len(x)
        pool = [torch.empty(self._kv[0], rows, self._kv[1], dtype=self._dtype)]
        if kv is not None:  # no layer keeps a state
            pool = cast(list[Tensor], kv)
        scratch = [torch.empty(rows * size, dtype=torch.uint8) for size in self._scratch]
        stream, streams, kept = x, [x.data_ptr()], dict[int, Tensor]()
        for layer in layers:
            if layer in taps:
                kept[layer] = stream
            if layer in taps or stream is x:  # otherwise a block overwrites its input
                stream = torch.empty(x.shape)
            streams.append(stream.data_ptr())
        self._run(
            _array([self._addresses[layer] for layer in layers]),
            len(layers),
            _array(streams),
            address(inputs),
            inputs is not None and inputs.dtype == torch.bfloat16,
            _array([part.data_ptr() for rope in ropes for part in rope]),
            rows,
            batch.slots.data_ptr(),
            *batch.paths.pointers,
            _array([pool[0 if kv is None else layer].data_ptr() for layer in layers]),
            pool[0].shape[1],
            *[place.data_ptr() for place in scratch],
        )
        return {**kept, len(self._parts): stream}


def _array(addresses: Sequence[int]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)


def _layers(block: Block) -> list[NativeLinear]:
    layers = [block.attention.qkv, block.attention.o]
    if isinstance(block.mlp, FeedForward):
        layers += native_layers(block.mlp)
    return [cast(NativeLinear, layer) for layer in layers]


def _norms(block: Block) -> list[Norm | None]:
    attention = cast(Attention, block.attention)
    return [
        *(block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm),
        *(attention.q_norm, attention.k_norm),
    ]


def _sinks(block: Block) -> Tensor | None:
    sinks = cast(Attention, block.attention).sinks
    return None if sinks is None else sinks.sinks


def _parts(block: Block, mixture: Mixture | None) -> _Parts:
    attention, c = block.attention, block.attention.config
    eps, layers = cast(Norm, block.mlp_norm).eps, _layers(block)
    return _Parts(
        *(layer.address for layer in layers),
        *(() if mixture is None else (None, None)),
        None if mixture is None else mixture.address,
        *(None if norm is None else address(norm.weight) for norm in _norms(block)),
        address(_sinks(block)),
        *(attention.window or 0, eps, c.attention_scale, c.attention_softcap or 0.0),
        *(block.dtype == torch.bfloat16, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim),
        *(ACTIVATIONS[c.activation], block.rope_number),
    )
