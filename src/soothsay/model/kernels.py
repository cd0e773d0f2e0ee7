"""Kernels: the operations that depend on a device or an instruction set.

A model holds one set of kernels and passes it on. `StockKernels` uses stock operations, and
`soothsay.model.native` is a twin in C. With both, a row's bits do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.config import ExpertsConfig, ModelConfig
from soothsay.core import noise
from soothsay.core.batch import Batch, Layout, Rows, stock_layout
from soothsay.core.cache import LayerMemory
from soothsay.core.functions import gelu, gelu_tanh, rms_norm, sigmoid, silu, total
from soothsay.core.integer_keys import written
from soothsay.core.states import LayerStates
from soothsay.core.strands import Strands
from soothsay.model.attention import attend
from soothsay.model.convolution import convolve
from soothsay.model.delta_rule import Recurrence, delta_rule
from soothsay.model.linear import stock_linear
from soothsay.model.quantized import Integers
from soothsay.model.rope import rotate
from soothsay.model.routing import route
from soothsay.model.state_space import StateSpace, state_space

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
"""Those of gated feed-forward layers, of float32."""


CLIPPED = "clipped_swiglu"
"""The activation of `clipped_swiglu`."""

SQUARED_RELU = "relu2"
"""A squared ReLU, without a gate."""


def clipped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of gpt-oss: both parts are bounded, and up is one more."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (up + 1)


class Norm(Protocol):
    """A root mean square norm: `x / rms(x) * weight` in float32. Centred, it norms `x - mean(x)`."""

    @property
    def weight(self) -> Tensor:
        """`[size]` float32."""

    @property
    def eps(self) -> float:
        """The number that is added to the mean square."""

    @property
    def centred(self) -> bool:
        """Whether the mean is subtracted first. Only `Kernels.norm` takes such a norm."""


Ropes = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Cosines and sines of most layers, then of `second_rope_layers`, as `Rope` returns them."""


FusedBlocks = Callable[
    [Tensor, Ropes, Batch, Sequence[LayerMemory] | None, Sequence[int], Collection[int], Tensor | None],
    dict[int, Tensor],
]
"""Runs decoder blocks in one call, with the same bits. Its arguments are those of
`Blocks.forward`, then `inputs` of `Block.forward`."""


FusedExperts = Callable[[Tensor, Tensor | None], Tensor]
"""A mixture of experts in one call, with the same bits: `[N, hidden]` to `[N, hidden]` float32.

The second argument are the router's scores `[N, experts]`; None: it computes them."""


class Kernels(noise.SamplingKernels):
    """Linear layers, the operations between them, and those of sampling.

    Each method here is the stock operation. A subclass computes some of them in another way. N is the number
    of rows. Tensors are contiguous, and residuals are float32.
    """

    name: str
    variant: str = ""
    """Instruction set of the compiled library that these kernels call; empty: they call none."""
    draws_by_race = False
    integer_keys = False
    """Whether models with weights in integers keep integer keys; see `soothsay.core.integer_keys`."""

    @staticmethod
    def fit(config: ModelConfig) -> bool:
        """Whether these kernels can compute a model of these sizes."""
        return True

    def lay_out(self, requests: Sequence[Rows], block_size: int) -> Layout:
        """Lay out the rows of requests one after the other, for KV blocks of this size."""
        return stock_layout(requests, block_size)

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """The norm of `x`, `[N, size]` float32, in `dtype`."""
        if norm.centred:
            return F.layer_norm(x, norm.weight.shape, norm.weight, None, norm.eps).to(dtype)
        return rms_norm(x, norm.weight, norm.eps).to(dtype)

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """`x + delta`, or `x + norm(delta)`: `[N, size]` float32."""
        return x + (delta if post is None else self.norm(delta.float(), post, x.dtype))

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The result of `add`, and its `norm` in `dtype`."""
        x = self.add(x, delta, post)
        return x, self.norm(x, norm, dtype)

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
        """Rotate queries and keys, and write keys and values to the pool.

        Args:
            qkv: `[N, H_q + 2 * H_kv, d]`.
            norms: of queries and keys, applied to each head before rotation.
            rope: cosines and sines, `[N, 1, d]` float32, as `Rope` returns them.
            scale: factor of the queries.
            kv: `[2 * H_kv, S, row]` of a KV pool; written at `slots`. It may have no heads.
            slots: `[N]` int64.
            value_norm: of values, applied to each head.

        Returns:
            `[N, H_q, d]` float32 queries.
        """
        keys = kv.shape[0] // 2
        queries = qkv.shape[1] - 2 * keys
        heads = qkv.float()
        qk, v = heads[:, : queries + keys], heads[:, queries + keys :]
        if norms is not None:
            q_norm, k_norm = norms
            normed = (
                self.norm(qk[:, :queries], q_norm, qk.dtype),
                self.norm(qk[:, queries:], k_norm, qk.dtype),
            )
            qk = torch.cat(normed, dim=1)
        if value_norm is not None:
            v = self.norm(v, value_norm, v.dtype)
        qk = rotate(qk, *rope)
        k, v = qk[:, queries:].transpose(0, 1), v.transpose(0, 1)  # [H_kv, N, d]
        new = written(k, v) if kv.dtype == torch.int16 else torch.cat([k, v]).to(kv.dtype)
        kv.index_copy_(1, slots, new)
        return qk[:, :queries] * scale

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
        """Attention of each row to its own path; see `soothsay.model.attention.attend`."""
        return attend(q, kv, batch, softcap=softcap, window=window, sinks=sinks)

    def open(self, x: Tensor, gates: Tensor) -> Tensor:
        """`x` times the sigmoid of `gates`: `[N, size]` float32."""
        return x * sigmoid(gates.float())

    def delta_rule(
        self,
        qkvz: Tensor,
        gates: Tensor,
        weights: Recurrence,
        states: LayerStates | None,
        strands: Strands,
    ) -> Tensor:
        """The gated delta rule; see `soothsay.model.delta_rule`.

        Rows that advance a state are taken into `states`. Nodes of a tree go to the journal there.

        Args:
            qkvz: `[N, channels + H_v * d_v]`: queries, keys and values, then the gates of outputs, which may
                be left out where outputs are not used.
            gates: `[N, 2 * H_v]`, how much heads change, then how much they keep.
            weights: the layer's.
            states: the layer's; None: states live within the pass.
            strands: the rows of each request.

        Returns:
            `[N, H_v * d_v]` float32; of no use without gates of outputs.
        """
        return delta_rule(qkvz, gates, weights, states, strands)

    def state_space(
        self, xbcz: Tensor, steps: Tensor, weights: StateSpace, states: LayerStates | None, strands: Strands
    ) -> Tensor:
        """Mamba-2; see `soothsay.model.state_space`. States and the journal change as in `delta_rule`.

        Args:
            xbcz: `[N, channels + H * d_x]`: x, B and C, then the gates of outputs, which may be left out
                where outputs are not used.
            steps: `[N, H]`.
            weights: the layer's.
            states: the layer's; None: states live within the pass.
            strands: the rows of each request.

        Returns:
            `[N, H * d_x]` float32; of no use without gates of outputs.
        """
        return state_space(xbcz, steps, weights, states, strands)

    def convolve(self, x: Tensor, taps: Tensor, states: LayerStates | None, strands: Strands) -> Tensor:
        """A causal convolution, channel by channel; see `soothsay.model.convolution`.

        States and the journal change as in `delta_rule`.

        Args:
            x: `[N, channels]`, its inputs.
            taps: `[taps, channels]` float32, the token's own last.
            states: the layer's; None: states live within the pass.
            strands: the rows of each request.

        Returns:
            `[N, channels]` float32.
        """
        return convolve(x, taps, states, strands)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Activation of the first half times the second half: `[N, 2 * size]` -> `[N, size]`, same dtype.

        "clipped_swiglu" is not a product of these two; see `clipped_swiglu`. "relu2" has no gate: it takes
        `[N, size]`.
        """
        if activation == SQUARED_RELU:
            return F.relu(gate_up).square()
        gate, up = gate_up.float().chunk(2, dim=-1)
        out = clipped_swiglu(gate, up) if activation == CLIPPED else ACTIVATIONS[activation](gate) * up
        return out.to(gate_up.dtype)

    def route(
        self,
        scores: Tensor,
        experts: ExpertsConfig,
        correction: Tensor | None,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row; see `soothsay.model.routing.route`."""
        return route(scores, experts, correction, scales)

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The fastest layer for a constant weight `[out, in]`; see `soothsay.model.linear`.

        `dtype` is that of the output, if the layer can choose. Some layers output the weight's dtype.
        """
        return stock_linear(weight, bias, dtype)

    def fuse(self, blocks: Sequence[nn.Module]) -> FusedBlocks | None:
        """One call that runs all of `blocks`; None if these kernels have none for them.

        `blocks` are of `soothsay.model.blocks.Block`. Their weights must keep their addresses.
        """
        return None

    def fuse_experts(self, experts: nn.Module) -> FusedExperts | None:
        """One call for a mixture of experts; None if these kernels have none for it.

        It is a `soothsay.model.feed_forward.Experts`. Its weights must keep their addresses.
        """
        return None

    def uniform(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """See `SamplingKernels`."""
        return noise.uniform(keys, tokens)

    def argmax(self, x: Tensor) -> Tensor:
        """See `SamplingKernels`."""
        return x.argmax(-1)

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `SamplingKernels`."""
        values, places = x.topk(min(count, x.shape[1]), dim=-1)
        if factors is not None:
            values = (x * factors[:, None]).log_softmax(-1).gather(1, places)
        return values, places

    def race(self, x: Tensor, factors: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `SamplingKernels`."""
        noisy = x * factors[:, None] + noise.gumbel(
            keys, torch.arange(x.shape[1], device=x.device)[None], self
        )
        return self.largest(noisy, count)

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """See `SamplingKernels`."""
        own = x.gather(1, places[:, None])
        first = torch.arange(x.shape[1], device=x.device) < places[:, None]
        p = (x.masked_fill(x < floors[:, None], -torch.inf) * factors[:, None]).softmax(-1)
        return total(p * ((x > own) | (x == own) & first))[:, 0]


class StockKernels(Kernels):
    """The stock operations alone: on any device, differentiable, the reference for other kernels."""

    name = "stock PyTorch operations"
