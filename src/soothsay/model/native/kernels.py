"""`Kernels` in C: a library for each instruction set, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ExpertsConfig, ModelConfig
from soothsay.core.batch import Batch, Layout, Rows
from soothsay.core.refinement import Candidates, Refinement
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.model.blocks import Block
from soothsay.model.convolution import convolve
from soothsay.model.delta_rule import Recurrence
from soothsay.model.feed_forward import Experts
from soothsay.model.kernels import Norm, layer_norm
from soothsay.model.linear import stock_linear
from soothsay.model.native.automata import SIGNATURES as AUTOMATON_SIGNATURES
from soothsay.model.native.automata import NativeAutomaton
from soothsay.model.native.delta import Delta, States
from soothsay.model.native.experts import ACTIVATIONS, Mixture, NativeExperts, Routing
from soothsay.model.native.fused import NativeBlocks
from soothsay.model.native.kv_format import KV_FORMATS
from soothsay.model.native.layout import native_layout
from soothsay.model.native.linear import NativeLinear, address
from soothsay.model.native.paths import SIGNATURES as PATH_SIGNATURES
from soothsay.model.native.paths import grow
from soothsay.model.quantized import Integers
from soothsay.processors import granted_processors

VARIANTS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "portable")
"""Instruction sets, the fastest first."""

BFLOAT16 = ("amx", "avx512bf16")
"""Instruction sets that multiply bfloat16."""

LANES = 16
"""Sizes of rows must be multiples of this, and head dimensions multiples of twice this."""

SIGNATURES = {
    "soothsay_attend": [
        *(c_void_p, c_void_p, c_int),  # q, kv, format
        *(*[c_void_p] * 6, c_int),  # paths
        *(c_int, c_int, c_int, c_int, c_int64, c_float, c_int64),  # heads, values, group, d, ..., window
        *(c_void_p, c_void_p),  # sinks, out
    ],
    "soothsay_add_norm": [
        *(c_void_p, c_void_p, c_int, c_void_p, c_void_p),  # x, delta, delta_is_bf16, post, weight
        *(c_float, c_int64, c_int),  # eps, rows, n
        *(c_void_p, c_void_p, c_int),  # total, normed, normed_is_bf16
    ],
    "soothsay_rotate_store": [
        *(c_void_p, c_int, *[c_void_p] * 6),  # qkv, is_bf16, ..., slot
        *(c_int64, c_int, c_int, c_int, c_int, c_int64, c_float, c_float),  # rows, ..., scale
        *(c_void_p, c_void_p, c_int),  # q, kv, format
    ],
    "soothsay_open": [c_void_p, c_void_p, c_int, c_int64, c_int64, c_int],  # x, gates, is_bf16, stride, ...
    "soothsay_delta_rule": [
        *(c_void_p, c_int64, c_void_p, c_int, c_void_p),  # rows, stride, gates, is_bf16, delta
        *(c_void_p, c_void_p, c_void_p),  # states, plan, out
    ],
    "soothsay_gated": [c_void_p, c_int, c_int, c_int64, c_int, c_void_p],
    "soothsay_hashed": [c_void_p, c_void_p, c_int, c_int64, c_int64, c_void_p],  # keys, tokens, one_row, ...
    "soothsay_race": [*[c_void_p] * 3, c_int64, c_int64, c_int, c_void_p, c_void_p],  # x, factors, keys, ...
    "soothsay_mass_before": [*[c_void_p] * 5, c_int64, c_int64, c_void_p],  # x, factors, tops, floors, ...
    "soothsay_largest": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p],  # x, factors, ...
    "soothsay_linear": [
        c_void_p,
        c_int,
        c_int64,
        c_void_p,
        c_void_p,
        c_int,
    ],  # x, x_is_bf16, rows, weights, out, ...
    "soothsay_mix": [c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p],  # x, x_is_bf16, rows, ...
    "soothsay_route": [c_void_p, c_int, c_int64, c_void_p, c_void_p, c_void_p],  # scores, are_bf16, rows, ...
    "soothsay_lay_out": [c_void_p, c_int64, c_int64, c_void_p, c_void_p],  # plan, count, block_size, out, ...
    "soothsay_pack": [c_void_p, c_int64, c_int, c_int, c_void_p],  # integers, rows, inputs, bits, data
    "soothsay_rows": [c_void_p, c_int64, c_void_p, c_void_p],  # rows, count, weights, out
    "soothsay_blocks": [
        *(c_void_p, c_int, c_void_p, c_void_p, c_int),  # blocks, count, streams, inputs, inputs_are_bf16
        *(c_void_p, c_int64, c_void_p),  # ropes, rows, slot
        *(*[c_void_p] * 6, c_int),  # paths
        *(c_void_p, c_void_p, c_int64, c_int),  # plan, kv, slots, format
        *(c_void_p, c_void_p, c_void_p),  # three places
    ],
}


class NativeKernels:
    """The kernels of one compiled library.

    A row's bits depend on the row alone, not on other rows or the number of threads. If the library
    multiplies bfloat16 and the KV pool has that type, queries and softmax weights are rounded to bfloat16
    before they are multiplied. With integer keys, queries are rounded to integers, and softmax weights as
    values are.

    Raises `OSError` if the library is missing or cannot run on this processor.
    """

    draws_by_race = True
    integer_keys = True

    def __init__(self, variant: str):
        file = Path(__file__).with_name(f"_{variant}.abi3.so")
        if not file.is_file():
            raise OSError(f"the native kernels for {variant} are not compiled")
        library = ctypes.CDLL(str(file))
        if not library.soothsay_runs_here():
            raise OSError(f"this processor lacks {variant}")
        self.variant, self.multiplies_bfloat16 = variant, variant in BFLOAT16
        self.name = f"native, {variant}"
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = None, types
        for name, (arguments, result) in {**AUTOMATON_SIGNATURES, **PATH_SIGNATURES}.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.soothsay_set_threads.restype, library.soothsay_set_threads.argtypes = None, [c_int]
        self._loaded, self._granted = library, granted_processors()

    @property
    def _library(self) -> ctypes.CDLL:
        """The library, set to torch's number of threads now, but no more than the machine grants."""
        self._loaded.soothsay_set_threads(min(torch.get_num_threads(), self._granted))
        return self._loaded

    @staticmethod
    def fit(config: ModelConfig) -> bool:
        """Whether the kernels can compute a model of these sizes."""
        experts = (0, 0) if config.experts is None else (config.experts.size, config.experts.shared_size)
        own = config.layer_embedding_size or 0
        heads = config.head_dim, 0 if config.global_heads is None else config.global_heads.size
        sizes = (config.hidden_size, config.intermediate_size, *experts, own, *(size // 2 for size in heads))
        fits = not any(size % LANES for size in sizes) and max(heads) <= 1024
        if (latent := config.latent) is not None:
            row = latent.rank + latent.rotated
            odd = row % (2 * LANES) or latent.rank % LANES or (latent.query_rank or 0) % LANES
            fits = fits and not odd and row <= 1024
        if (delta := config.delta) is not None:
            fits = fits and not (delta.key_size % LANES or delta.value_size % LANES)
        return fits and config.activation in ACTIVATIONS

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        if norm.centred:
            return layer_norm(x, norm, dtype)
        out = torch.empty(x.shape, dtype=dtype)
        self._add_norm(x, None, None, norm, None, out)
        return out

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """See `Kernels`."""
        total = torch.empty(x.shape)
        self._add_norm(x, delta, post, None, total, None)
        return total

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        total, out = torch.empty(x.shape), torch.empty(x.shape, dtype=dtype)
        self._add_norm(x, delta, post, norm, total, out)
        return total, out

    def _add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        post: Norm | None,
        norm: Norm | None,
        total: Tensor | None,
        out: Tensor | None,
    ) -> None:
        some = norm or post
        self._library.soothsay_add_norm(
            x.data_ptr(),
            address(delta),
            delta is not None and delta.dtype == torch.bfloat16,
            None if post is None else post.weight.data_ptr(),
            None if norm is None else norm.weight.data_ptr(),
            0.0 if some is None else some.eps,
            len(x),
            x.shape[1],
            address(total),
            address(out),
            out is not None and out.dtype == torch.bfloat16,
        )

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rope: tuple[Tensor, Tensor],
        scale: float,
        kv: Tensor,
        slots: Tensor,
        value_norm: Norm | None = None,
    ) -> Tensor:
        """See `Kernels`."""
        rows, heads, d = qkv.shape
        keys = kv.shape[0] // 2
        q = torch.empty(rows, heads - 2 * keys, d)
        self._library.soothsay_rotate_store(
            qkv.data_ptr(),
            qkv.dtype == torch.bfloat16,
            rope[0].data_ptr(),
            rope[1].data_ptr(),
            None if norms is None else norms[0].weight.data_ptr(),
            None if norms is None else norms[1].weight.data_ptr(),
            None if value_norm is None else value_norm.weight.data_ptr(),
            slots.data_ptr(),
            *(rows, heads - 2 * keys, 0, keys, d, kv.shape[1]),
            0.0 if norms is None else norms[0].eps,  # the norm of values has the same
            scale,
            q.data_ptr(),
            kv.data_ptr(),
            KV_FORMATS[kv.dtype],
        )
        return q

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: Batch,
        *,
        softcap: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels`. Keys are read in place."""
        heads = max(1, kv.shape[0] // 2)
        out = torch.empty(q.shape)
        self._library.soothsay_attend(
            q.data_ptr(),
            kv.data_ptr(),
            KV_FORMATS[kv.dtype],
            *batch.paths.pointers,
            *(heads, len(kv) // 2, q.shape[1] // heads, q.shape[2], kv.shape[1]),
            softcap or 0.0,
            window or 0,
            address(sinks),
            out.data_ptr(),
        )
        return out.view(len(q), -1)

    def open(self, x: Tensor, gates: Tensor) -> Tensor:
        """See `Kernels`."""
        out, gates = x.clone(), gates.contiguous()
        half = gates.dtype == torch.bfloat16
        self._library.soothsay_open(out.data_ptr(), gates.data_ptr(), half, out.shape[1], *out.shape)
        return out

    def delta_rule(
        self,
        qkvz: Tensor,
        gates: Tensor,
        weights: Recurrence,
        states: LayerStates | None,
        strands: Strands,
    ) -> Tensor:
        """See `Kernels`."""
        qkvz, gates = qkvz.contiguous(), gates.to(qkvz.dtype).contiguous()
        rows, width = qkvz.shape
        c, delta = weights.config, Delta.of(weights)
        out = torch.empty(rows, c.values) if width > c.channels else None
        self._library.soothsay_delta_rule(
            *(qkvz.data_ptr(), width, gates.data_ptr(), qkvz.dtype == torch.bfloat16, byref(delta)),
            None if states is None else byref(States.of(states)),
            *(strands.plan.buffer_info()[0], address(out)),
        )
        return torch.empty(0) if out is None else out

    def convolve(self, x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
        """See `Kernels`."""
        return convolve(x, taps, states, strands)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`."""
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        self._library.soothsay_gated(
            gate_up.data_ptr(),
            gate_up.dtype == torch.bfloat16,
            ACTIVATIONS[activation],
            *(rows, size),
            out.data_ptr(),
        )
        return out

    def route(
        self,
        scores: Tensor,
        experts: ExpertsConfig,
        correction: Tensor | None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        scores, routing = scores.contiguous(), Routing.of(experts, correction, scales)
        shape = len(scores), experts.chosen
        shares, chosen = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        self._library.soothsay_route(
            *(scores.data_ptr(), scores.dtype == torch.bfloat16, len(scores), byref(routing)),
            *(shares.data_ptr(), chosen.data_ptr()),
        )
        return shares, chosen

    def uniform(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """See `Kernels`."""
        keys, tokens = keys.contiguous(), tokens.contiguous()
        rows, width = len(keys), tokens.shape[1]
        out = torch.empty(rows, width)
        self._library.soothsay_hashed(
            keys.data_ptr(), tokens.data_ptr(), len(tokens) == 1, rows, width, out.data_ptr()
        )
        return out

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Kernels`. The first of equal ones; minus infinity is at place 0."""
        x = x.contiguous()
        rows, width = x.shape
        count = min(count, width)
        values, places = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        self._library.soothsay_largest(
            x.data_ptr(),
            address(factors),
            *(rows, width, count),
            values.data_ptr(),
            places.data_ptr(),
        )
        return values, places

    def argmax(self, x: Tensor) -> Tensor:
        """See `Kernels`."""
        return self.largest(x, 1)[1][:, 0]

    def race(self, x: Tensor, factors: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        x, keys = x.contiguous(), keys.contiguous()
        rows, width = x.shape
        count = min(count, width)
        values, places = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
        self._library.soothsay_race(
            *(x.data_ptr(), factors.data_ptr(), keys.data_ptr()),
            *(rows, width, count),
            *(values.data_ptr(), places.data_ptr()),
        )
        return values, places

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """See `Kernels`."""
        x, rows = x.contiguous(), [factors.contiguous(), tops.contiguous(), floors.contiguous()]
        places, out = places.contiguous(), torch.empty(len(x))
        self._library.soothsay_mass_before(
            x.data_ptr(), *(row.data_ptr() for row in rows), places.data_ptr(), *x.shape, out.data_ptr()
        )
        return out

    def automaton(self, counted: int, widest: int, least: float) -> NativeAutomaton:
        """See `Kernels`."""
        return NativeAutomaton(self._library, counted, widest, least)

    def grow_paths(
        self, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
    ) -> tuple[list[int], list[int], list[float]]:
        """See `Kernels`."""
        return grow(self._library, refinement, candidates, nodes, depth)

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """See `Kernels`."""
        if NativeLinear.fit(weight, bfloat16=self.multiplies_bfloat16):
            return NativeLinear(self, weight, bias, dtype)
        return stock_linear(weight, bias, dtype)

    def fuse(self, blocks: Sequence[nn.Module]) -> NativeBlocks | None:
        """See `Kernels`."""
        fitting = [block for block in blocks if isinstance(block, Block) and NativeBlocks.fit(block)]
        whole = len(fitting) == len(blocks)
        return NativeBlocks(self._run_blocks, fitting) if whole else None

    def fuse_experts(self, experts: nn.Module) -> NativeExperts | None:
        """See `Kernels`."""
        fits = isinstance(experts, Experts) and Mixture.fit(experts)
        return NativeExperts(self._run_experts, cast(Experts, experts)) if fits else None

    def lay_out(self, requests: Sequence[Rows], block_size: int) -> Layout:
        """See `Kernels`."""
        return native_layout(self._loaded.soothsay_lay_out, requests, block_size)  # in one thread

    def pack(self, integers: Tensor, bits: int, out: Tensor) -> None:
        """Pack `integers` `[rows, in]` uint8 into `out` `[panels, steps, PANEL, 4]`. See `PackedWeight`."""
        self._library.soothsay_pack(integers.data_ptr(), *integers.shape, bits, out.data_ptr())

    def read_rows(self, rows: Tensor, weights: int, out: Tensor) -> None:
        """Read `rows` `[n]` of the weights of a `NativeLinear`, at this address, into `out` `[n, in]`."""
        self._library.soothsay_rows(rows.data_ptr(), len(rows), weights, out.data_ptr())

    def _run_experts(self, *arguments: object) -> None:
        self._library.soothsay_mix(*arguments)

    def _run_blocks(self, *arguments: object) -> None:
        self._library.soothsay_blocks(*arguments)

    def multiply(self, x: Tensor, weights: int, out: Tensor) -> None:
        """`x` `[M, in]` times the weights of a `NativeLinear`, at this address, into `out` `[M, out]`."""
        bfloat16 = torch.bfloat16
        self._library.soothsay_linear(
            x.data_ptr(), x.dtype is bfloat16, x.shape[0], weights, out.data_ptr(), out.dtype is bfloat16
        )


def load_native(variants: Sequence[str] = VARIANTS) -> NativeKernels | None:
    """The kernels for the first instruction set of `variants` that runs here; None if none does."""
    for variant in variants:
        try:
            return NativeKernels(variant)
        except OSError:
            continue
    return None
