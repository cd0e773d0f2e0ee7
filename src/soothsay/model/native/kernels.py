"""`Kernels` in C: a library for each instruction set, called through ctypes."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import ExpertsConfig, ModelConfig
from soothsay.core.batch import Batch, Layout, Rows
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.machine import LargePages
from soothsay.model.blocks import Block
from soothsay.model.delta_rule import Recurrence
from soothsay.model.feed_forward import Experts
from soothsay.model.kernels import SQUARED_RELU, Kernels, Norm
from soothsay.model.linear import Parts
from soothsay.model.native.delta import Delta
from soothsay.model.native.experts import ACTIVATIONS, Mixture, NativeExperts, Routing
from soothsay.model.native.fused import NativeBlocks
from soothsay.model.native.kv_format import KV_FORMATS
from soothsay.model.native.layout import native_layout
from soothsay.model.native.library import VARIANTS
from soothsay.model.native.linear import NativeLinear, address
from soothsay.model.native.sampling import NativeSampling
from soothsay.model.native.state_space import StateSpaceWeights
from soothsay.model.native.states import Convolution, States
from soothsay.model.quantized import Integers, Mixed
from soothsay.model.state_space import StateSpace

LANES = 16
"""Sizes of rows must be multiples of this, and head dimensions multiples of twice this."""


class NativeKernels(NativeSampling, Kernels):
    """The kernels of one compiled library.

    A row's bits depend on the row alone, not on other rows or the number of threads. If the library
    multiplies bfloat16 and the KV pool has that type, queries and softmax weights are rounded to bfloat16
    before they are multiplied. With integer keys, queries are rounded to integers, and softmax weights as
    values are.

    Raises `OSError` if the library is missing or cannot run on this processor.
    """

    integer_keys = True

    def __init__(self, variant: str):
        super().__init__(variant)
        self.name, self.memory = f"native, {variant}", LargePages()

    @staticmethod
    def fit(config: ModelConfig) -> bool:
        """See `Kernels`."""
        e, inner = config.experts, config.layer_embedding_size or 0
        heads = config.head_dim, 0 if config.global_heads is None else config.global_heads.size
        experts = () if e is None else (e.size, e.shared_size, e.latent_size or 0)
        sizes = (
            config.hidden_size,
            config.intermediate_size,
            *experts,
            inner,
            *(size // 2 for size in heads),
        )
        if (space := config.state_space) is not None:
            sizes += (space.head_size, space.state_size)
        if config.alternating is not None:
            sizes += (config.alternating.laurel_rank,)
        fits = not any(size % LANES for size in sizes) and max(heads) <= 1024
        if (latent := config.latent) is not None:
            row = latent.rank + latent.rotated
            odd = row % (2 * LANES) or latent.rank % LANES or (latent.query_rank or 0) % LANES
            fits = fits and not odd and row <= 1024
        if (delta := config.delta) is not None:
            fits = fits and not (delta.key_size % LANES or delta.value_size % LANES)
        if (convolution := config.convolution) is not None:
            fits = fits and not convolution.channels % LANES
        return fits and config.activation in ACTIVATIONS

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """See `Kernels`."""
        if norm.centred:
            return super().norm(x, norm, dtype)
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

    def state_space(
        self, xbcz: Tensor, steps: Tensor, weights: StateSpace, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """See `Kernels`."""
        xbcz, steps = xbcz.contiguous(), steps.to(xbcz.dtype).contiguous()
        rows, width = xbcz.shape
        c, own = weights.config, StateSpaceWeights.of(weights)
        out = torch.empty(rows, c.size) if width > c.channels else None
        self._library.soothsay_run_state_space(
            *(xbcz.data_ptr(), rows, width, steps.data_ptr(), xbcz.dtype == torch.bfloat16, byref(own)),
            None if states is None else byref(States.of(states)),
            *(strands.plan.buffer_info()[0], address(out)),
        )
        return torch.empty(0) if out is None else out

    def convolve(self, x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
        """See `Kernels`."""
        x, out = x.contiguous(), torch.empty(x.shape)
        self._library.soothsay_convolve(
            *(x.data_ptr(), x.dtype == torch.bfloat16, len(x), False, byref(Convolution.of(taps))),
            None if states is None else byref(States.of(states)),
            *(strands.plan.buffer_info()[0], out.data_ptr()),
        )
        return out

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels`."""
        rows, size = len(gate_up), gate_up.shape[1] // (1 if activation == SQUARED_RELU else 2)
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

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """See `Kernels`."""
        if NativeLinear.fit(weight, bfloat16=self.multiplies_bfloat16):
            return NativeLinear(self, weight, bias, dtype)
        if isinstance(weight, Mixed):  # each part as fast as it can be
            return Parts([self.linear(part, own, dtype) for part, own in weight.with_biases(bias)], dtype)
        return super().linear(weight, bias, dtype)

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
