"""Decoder blocks fused into one call of the library."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from ctypes import Array, Structure, addressof, c_float, c_int, c_int64, c_void_p
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.core.states import LayerStates
from soothsay.model.attention_layer import Attention, AttentionBesideStates
from soothsay.model.blocks import Block
from soothsay.model.convolution_layer import ConvolutionLayer
from soothsay.model.delta_layer import DeltaLayer
from soothsay.model.feed_forward import Experts, FeedForward
from soothsay.model.kernels import Norm, Ropes
from soothsay.model.native.delta import Delta
from soothsay.model.native.experts import ACTIVATIONS, Mixture, is_native, native_layers
from soothsay.model.native.kv_format import KV_FORMATS
from soothsay.model.native.layout import path_pointers, strand_plan
from soothsay.model.native.linear import NativeLinear, address
from soothsay.model.native.states import Convolution, States
from soothsay.model.state_space_layer import StateSpaceLayer


class _Parts(Structure):
    """`soothsay_parts` of csrc/kernels.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "gates", "delta")),
        *((name, c_void_p) for name in ("convolution", "mixture")),
        *((name, c_void_p) for name in ("attention_norm", "attention_post_norm")),
        *((name, c_void_p) for name in ("mlp_norm", "mlp_post_norm", "q_norm", "k_norm", "sinks")),
        ("window", c_int64),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        *((name, c_int) for name in ("is_bf16", "qkv_is_bf16", "hidden", "queries", "keys", "d")),
        *((name, c_int) for name in ("activation", "is_local")),
        ("gate_heads", c_int),
    ]


class NativeBlocks:
    """Computes `Blocks.forward` in one call, with the same bits: the library itself calls its kernels.

    Other calls of the library read a block's `soothsay_parts` at its place in `addresses`, and need `scratch`
    bytes a row for each of three buffers.

    Args:
        run: the library's `soothsay_blocks`.
        blocks: of one configuration; each passes `fit`.
    """

    def __init__(self, run: Callable[..., None], blocks: Sequence[Block]):
        self._run = run
        # keep alive what the library reads
        mixtures = [Mixture(block.mlp) if isinstance(block.mlp, Experts) else None for block in blocks]
        rules = [(_rule(block), _convolution(block)) for block in blocks]
        held = [(_layers(block), _gates(block), _norms(block), _sinks(block)) for block in blocks]
        self._held = held, mixtures, rules
        parts = zip(blocks, mixtures, rules, strict=True)
        self._parts = [_parts(block, mixture, *own) for block, mixture, own in parts]
        self._keeps_state = [not isinstance(block.attention, Attention) for block in blocks]
        self.addresses = [addressof(parts) for parts in self._parts]
        c, self._dtype = blocks[0].attention.config, _qkv_dtype(blocks)
        self._kv, self._has_states = (2 * c.num_kv_heads, c.head_dim), c.states is not None
        sizes = [_scratch(block) for block in blocks]
        self.scratch = [-(-max(places) // 64) * 64 for places in zip(*sizes, strict=True)]  # aligned

    @staticmethod
    def fit(block: Block) -> bool:
        """Whether the library's call computes each part of a block."""
        plain = isinstance(block.attention, StateSpaceLayer | AttentionBesideStates)
        if plain or not block.attention.config.has_native_blocks:
            return False
        if isinstance(mlp := block.mlp, Experts):
            whole = is_native(mlp.router) and mlp.shared_gate is None and mlp.latent_in is None
            if not (whole and Mixture.fit(mlp)):
                return False
        gates = [] if (own := _gates(block)) is None else [own]
        qkv, *others = _layers(block)
        if not is_native(qkv) or (not isinstance(block.attention, Attention) and qkv.dtype != block.dtype):
            return False
        return all(is_native(layer) and layer.dtype == block.dtype for layer in others + gates)

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
        within = torch.empty(self._kv[0], rows, self._kv[1], dtype=self._dtype) if kv is None else None
        pool = within if kv is None else next((m for m in kv if isinstance(m, Tensor)), None)
        memory = [self._memory(layer, within, kv) for layer in layers]
        *begins, end = accumulate((rows * size for size in self.scratch), initial=0)
        scratch = torch.empty(end, dtype=torch.uint8)
        stream, place, kept = x, x.data_ptr(), dict[int, Tensor]()
        streams = [place]
        for layer in layers:
            if layer in taps:
                kept[layer] = stream
            if layer in taps or stream is x:  # otherwise a block overwrites its input
                stream = torch.empty(x.shape)
                place = stream.data_ptr()
            streams.append(place)
        self._run(
            _array([self.addresses[layer] for layer in layers]),
            len(layers),
            _array(streams),
            address(inputs),
            inputs is not None and inputs.dtype == torch.bfloat16,
            _array([part.data_ptr() for rope in ropes for part in rope]),
            rows,
            batch.slots.data_ptr(),
            *path_pointers(batch),
            strand_plan(batch.strands) if self._has_states else None,
            _array([place for place, _ in memory]),
            0 if pool is None else pool.shape[1],
            KV_FORMATS[self._dtype if pool is None else pool.dtype],
            *[scratch.data_ptr() + begin for begin in begins],
        )
        return {**kept, len(self._parts): stream}

    def _memory(
        self, layer: int, within: Tensor | None, kv: Sequence[LayerMemory] | None
    ) -> tuple[int | None, object]:
        """The address of a layer's memory, and what has to outlive the call."""
        if kv is None:
            return None if self._keeps_state[layer] else address(within), within
        own = kv[layer]
        if isinstance(own, Tensor):
            return own.data_ptr(), own
        states = States.of(cast(LayerStates, own))
        return addressof(states), states


def _array(addresses: Sequence[int | None]) -> Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)


def _qkv_dtype(blocks: Sequence[Block]) -> torch.dtype:
    """Element type of keys and values before they are in a pool."""
    own = [_layers(block)[0].dtype for block in blocks if isinstance(block.attention, Attention)]
    return own[0] if own else blocks[0].dtype


def _layers(block: Block) -> list[NativeLinear]:
    attention = block.attention
    if isinstance(attention, DeltaLayer | ConvolutionLayer):
        first = attention.qkvz if isinstance(attention, DeltaLayer) else attention.bcx
    else:
        first = cast(Attention, attention).qkv
    layers = [first, attention.o]
    if isinstance(block.mlp, FeedForward):
        layers += native_layers(block.mlp)
    return [cast(NativeLinear, layer) for layer in layers]


def _gates(block: Block) -> NativeLinear | None:
    attention = block.attention
    return cast(NativeLinear, attention.gates) if isinstance(attention, DeltaLayer) else None


def _rule(block: Block) -> Delta | None:
    attention = block.attention
    return Delta.of(attention.recurrence) if isinstance(attention, DeltaLayer) else None


def _convolution(block: Block) -> Convolution | None:
    attention = block.attention
    return Convolution.of(attention.taps.weight) if isinstance(attention, ConvolutionLayer) else None


def _norms(block: Block) -> list[Norm | None]:
    around = [block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm]
    attention = block.attention
    if not isinstance(attention, Attention):
        return [*around, None, None]
    return [*around, attention.q_norm, attention.k_norm]


def _scratch(block: Block) -> tuple[int, int, int]:
    """Bytes a row of three scratch buffers; see csrc/kernels.h."""
    c, size, (qkv, o, *_) = block.attention.config, block.dtype.itemsize, _layers(block)
    gates, values = _gates(block), 4 * o.in_features
    inner = cast(NativeLinear, block.mlp.down).in_features if isinstance(block.mlp, FeedForward) else 0
    rows = qkv.dtype.itemsize * qkv.out_features + size * (0 if gates is None else gates.out_features)
    return (
        size * max(o.out_features, inner),
        max(rows + values if c.gated_attention else rows, size * o.out_features, values),
        max(size * 2 * inner, values, 4 * o.out_features),
    )


def _sinks(block: Block) -> Tensor | None:
    sinks = block.attention.sinks if isinstance(block.attention, Attention) else None
    return None if sinks is None else sinks.sinks


def _parts(
    block: Block, mixture: Mixture | None, rule: Delta | None, convolution: Convolution | None
) -> _Parts:
    attention, c = block.attention, block.attention.config
    eps, layers, gates = cast(Norm, block.mlp_norm).eps, _layers(block), _gates(block)
    return _Parts(
        *(layer.address for layer in layers),
        *(() if mixture is None else (None, None)),
        None if gates is None else gates.address,
        *(None if own is None else addressof(own) for own in (rule, convolution)),
        None if mixture is None else mixture.address,
        *(None if norm is None else address(norm.weight) for norm in _norms(block)),
        address(_sinks(block)),
        *(attention.window or 0, eps, c.attention_scale, c.attention_softcap or 0.0),
        *(block.dtype == torch.bfloat16, layers[0].dtype == torch.bfloat16),
        *(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim),
        *(ACTIVATIONS[c.activation], block.rope_number, c.num_heads if c.gated_attention else 0),
    )
