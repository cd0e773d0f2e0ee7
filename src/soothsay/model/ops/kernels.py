"""Kernels: the operations that depend on a device or an instruction set.

A model holds one set of kernels and passes it on. `StockKernels` uses stock operations, and
`soothsay.model.native` is a twin in C. With both, a row's bits do not depend on other rows.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.batch import Batch, LayoutOps
from soothsay.core.cache import KVPool, LayerMemory, written
from soothsay.core.functions import ACTIVATIONS, UNGATED, clipped_swiglu, rms_norm, rotate, sigmoid
from soothsay.core.sampling_ops import SamplingOps
from soothsay.model.loaded_part import Table
from soothsay.model.ops.attention import AttentionOps
from soothsay.model.ops.linear import stock_linear
from soothsay.model.ops.operands import HeadForm, Mixture, Norm, Ropes, Rotation
from soothsay.model.ops.routing import RoutingOps
from soothsay.model.ops.state_ops import StateOps
from soothsay.model.specs.feed_forward_spec import CLIPPED
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.quantized import Integers, QuantizedTable

Outputs = tuple[Tensor, tuple[Tensor, ...], Tensor]
"""What a pass gives: final states `[N, hidden]`, the taps, and logits `[M, V]`, all float32."""


class PassModel(Protocol):
    """A model whose passes kernels run: `soothsay.model.transformer.Transformer`, or a head's module."""

    def compute(
        self, batch: Batch, cache: KVPool | None, layers: Sequence[int] | None, taps: Sequence[int]
    ) -> Outputs:
        """One pass, operation by operation; see `Transformer.run`."""


class BlocksPass(NamedTuple):
    """One pass through decoder blocks. The fields are arguments of `Blocks.forward`, but for two."""

    x: Tensor
    ropes: Ropes
    batch: Batch
    kv: Sequence[LayerMemory] | None
    layers: Sequence[int]
    taps: Collection[int] = ()
    embeddings: Tensor | None = None
    inputs: Tensor | None = None  # see `LayerPass`
    adapters: Tensor | None = None  # numbers of rows' adapters, as in `Kernels.adapt`, if operations adapt


RecordedBlocks = Callable[[BlocksPass], dict[int, Tensor]]
"""Decoder blocks as kernels run them: as few calls as there can be, with the bits of `Block.compute`.

Returns what `Blocks.forward` returns."""


class Kernels(LayoutOps, AttentionOps, StateOps, RoutingOps):
    """Linear layers, and the operations between them.

    Each method here is the stock operation. A subclass computes some of them in another way. N is the number
    of rows. Tensors are contiguous, and residuals are float32.
    """

    name: str
    variant: str = ""
    """Instruction set of the compiled library that these kernels call; empty: they call none."""
    sampling = SamplingOps()
    dtype_of_keys: torch.dtype | None = None
    """Element type of the KV pool of a model with weights in integers; int16: see
    `soothsay.core.cache`; None: that of linear layers' outputs."""
    quantizes_kv = True
    """Whether they keep keys and values in int8 if a user wants that."""
    integers_on: tuple[str, ...] = ("cpu",)
    """Types of devices where these kernels multiply weights in integers."""

    @staticmethod
    def fit(spec: ModelSpec) -> bool:
        """Whether these kernels can compute a model of these sizes."""
        return True

    def norm(self, x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
        """The norm of `x`, `[N, size]` float32, in `dtype`."""
        if norm.centred:
            return F.layer_norm(x.contiguous(), norm.weight.shape, norm.weight, norm.bias, norm.eps).to(dtype)
        return rms_norm(x.contiguous(), norm.weight, norm.eps).to(dtype)

    def add(self, x: Tensor, delta: Tensor, post: Norm | None) -> Tensor:
        """`x + delta`, or `x + norm(delta)`: `[N, size]` float32."""
        return x + (delta if post is None else self.norm(delta.float(), post, x.dtype))

    def add_norm(
        self, x: Tensor, delta: Tensor, post: Norm | None, norm: Norm, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The result of `add`, and its `norm` in `dtype`."""
        x = self.add(x, delta, post)
        return x, self.norm(x, norm, dtype)

    def rotate_store(self, qkv: Tensor, rope: Rotation, kv: Tensor, slots: Tensor, form: HeadForm) -> Tensor:
        """Rotate queries and keys, and write keys and values to the pool.

        Args:
            qkv: `[N, H_q + gates + 2 * keys, d]`.
            rope: cosines and sines, `[N, 1, d]` float32, as `Rope` returns them.
            kv: `[2 * H_kv, S, row]` of a KV pool; written at `slots`.
            slots: `[N]` int64.
            form: what else happens to the heads.

        Returns:
            `[N, H_q, d]` float32 queries.
        """
        scale, norms, value_norm, gates, _, centre = form
        queries, keys = form.counts(qkv.shape[1], kv)
        heads = qkv.float()
        heads = torch.cat([heads[:, :queries], heads[:, queries + gates :]], dim=1) if gates else heads
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
        if not keys:
            return qk * scale
        k = qk[:, queries:] if centre is None else qk[:, queries:] - centre
        self.write(k.transpose(0, 1), v.transpose(0, 1), kv, slots)
        return qk[:, :queries] * scale

    def write(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write keys and values `[H_kv, N, d]` float32 to the pool, for the stock `rotate_store`."""
        kv.index_copy_(1, slots, written(k, v, kv.dtype))

    def sigmoid_gate(self, x: Tensor, gates: Tensor) -> Tensor:
        """`x` times the sigmoid of `gates`: `[N, size]` float32."""
        return x * sigmoid(gates.float())

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Activation of the first half times the second half: `[N, 2 * size]` -> `[N, size]`, same dtype.

        "clipped_swiglu" is not a product of these two; see `clipped_swiglu`. Those of `UNGATED` have no gate:
        they take `[N, size]`.
        """
        if activation in UNGATED:
            return UNGATED[activation](gate_up.float()).to(gate_up.dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        out = clipped_swiglu(gate, up) if activation == CLIPPED else ACTIVATIONS[activation](gate) * up
        return out.to(gate_up.dtype)

    def linear(self, weight: Tensor | Integers, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        """The fastest layer for a constant weight `[out, in]`; see `soothsay.model.ops.linear`.

        `dtype` is that of the output, if the layer can choose. Some layers output the weight's dtype.
        """
        return stock_linear(weight, bias, dtype)

    def table(self, table: QuantizedTable, head: nn.Module | None) -> Table:
        """A table of embeddings as these kernels read it. `head`: the output head, if it has its rows."""
        return table

    def run_pass(
        self,
        model: PassModel,
        batch: Batch,
        cache: KVPool | None,
        layers: Sequence[int] | None,
        taps: Sequence[int],
    ) -> Outputs:
        """One pass of a model; see `Transformer.run`. A set of kernels may repeat a recorded one."""
        return model.compute(batch, cache, layers, taps)

    def record(
        self, blocks: Sequence[Any], adapt: Callable[[Any], Any] = lambda ops: ops
    ) -> RecordedBlocks | None:
        """Few calls that run `blocks`; None if these kernels have none. Weights must keep their addresses.

        `blocks` are of `soothsay.model.decoder.blocks.DecoderBlock`. `adapt` makes the operations that they
        call of those that are recorded.
        """
        return None

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The outputs of a linear layer: `[N, in] -> [N, out]`."""
        return cast(Tensor, layer(x))

    def low_rank(self, down: Tensor, up: Tensor) -> nn.Module:
        """A layer of two thin weights, `[rank, in]` and `[out, rank]`. `rank` is a multiple of 16."""
        return nn.Sequential(*(self.linear(weight, None, torch.float32) for weight in (down, up)))

    def adapt(
        self, out: Tensor, x: Tensor, adapters: Sequence[nn.Module | None], numbers: Tensor | None
    ) -> Tensor:
        """Add to the outputs of a linear layer what adapters add, in float32, rounded to the outputs' type.

        Args:
            out: `[N, out]`, which may be written to.
            x: `[N, in]`, the layer's inputs.
            adapters: layers as `low_rank` makes them, by number; None: one adds nothing here.
            numbers: `[N]` int64, that of each row's adapter; -1: it has none. None: it is recorded.
        """
        assert numbers is not None
        for number, layer in enumerate(adapters):
            rows = (numbers == number).nonzero()[:, 0]
            if layer is not None and len(rows):
                out[rows] = (out[rows].float() + layer(x[rows]).float()).to(out.dtype)
        return out

    def apply_heads(self, layers: nn.ModuleList, x: Tensor) -> Tensor:
        """The outputs of a linear layer for each head: `[N, H, in] -> [N, H, out]`."""
        heads = x.transpose(0, 1).contiguous()
        return torch.stack([layer(head) for layer, head in zip(layers, heads, strict=True)], dim=1)

    def mix(self, experts: Mixture, x: Tensor, scores: Tensor | None) -> Tensor:
        """A mixture of experts; see `soothsay.model.decoder.feed_forward.Experts.mixed`."""
        return experts.mixed(x, scores)

    def compute(self, function: Callable[..., Tensor], size: int, *inputs: Tensor) -> Tensor:
        """`function` of some rows: `[N, size]` float32. No set of kernels has a form of its own for it."""
        return function(*inputs)

    def split(self, x: Tensor, sizes: Sequence[int], dim: int = 1) -> Sequence[Tensor]:
        """Parts of each row: of the numbers `[N, size]`, or of the heads `[N, H, d]`. Dim 2: of each head."""
        return torch.split(x, list(sizes), dim)

    def cat(self, parts: Sequence[Tensor], dtype: torch.dtype, dim: int = 1) -> Tensor:
        """Join parts, as `split` makes them, in one element type."""
        return torch.cat([part.to(dtype) for part in parts], dim)

    def heads(self, x: Tensor, size: int) -> Tensor:
        """Rows as heads: `[N, H * size] -> [N, H, size]`."""
        return x.view(len(x), -1, size)

    def flat(self, x: Tensor) -> Tensor:
        """Heads as rows: `[N, H, size] -> [N, H * size]`."""
        return x.flatten(1)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in another element type."""
        return x.to(dtype)

    def scale(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """`x` `[N, size]` times a number, or times a float32 tensor `[size]` or `[1]`; same dtype."""
        return (x * factor).to(x.dtype)

    def blend(self, x: Tensor, a: float, y: Tensor, b: float) -> Tensor:
        """`a * x + b * y`: `[N, size]` float32."""
        return x.float() * a + y.float() * b

    def add_gated(self, x: Tensor, gates: Tensor, y: Tensor) -> Tensor:
        """`x + sigmoid(gates) * y`: `[N, size]` float32, of gates `[N, 1]`."""
        return x + sigmoid(gates.float()) * y

    def grow(self, q: Tensor, factors: Tensor, span: int, shift: int, positions: Tensor) -> Tensor:
        """Queries `[N, H, d]` float32 times factor `(position + shift) // span`, at most the last."""
        spans = ((positions + shift) // span).clamp(max=len(factors) - 1)
        return q * factors[spans][:, None, None]

    def rotate(self, x: Tensor, rope: Rotation) -> Tensor:
        """Rotate heads `[N, H, d]` float32."""
        return rotate(x, *rope)

    def store(self, rows: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write `rows` `[N, row]` to a KV pool of one head, `[1, S, row]`, at `slots` `[N]` int64."""
        kv.index_copy_(1, slots, rows[None].to(kv.dtype))


class StockKernels(Kernels):
    """The stock operations alone: on any device, differentiable, the reference for other kernels."""

    name = "stock PyTorch operations"
