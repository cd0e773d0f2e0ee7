"""Gemma 3n's layers: alternating updates and a learned residual.

AltUp is Baykal et al. 2023, arXiv 2301.13310. LAuReL is Menghani et al. 2024, arXiv 2411.07501.

The residual stream has several parts of the hidden size, side by side. A layer predicts all of them, computes
the first one, and corrects all by what it computed. Before the first layer one embedding is spread over them,
and after the last one they are merged.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from soothsay.model.decoder.decoder_block import DecoderBlock, LayerPass, Stream
from soothsay.model.decoder.embedding import LayerInput
from soothsay.model.decoder.feed_forward import moments
from soothsay.model.decoder.norm import RMSNorm, Vector
from soothsay.model.decoder.parts import build_mixer, build_mlp
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.model_spec import AlternatingSpec, LayerSpec, NormSpec


class Alternation(Stream):
    """A stream of several parts. The embedding is the first one, which gives its size to the others."""

    def __init__(self, parts: int, hidden: int):
        super().__init__()
        self.hidden, rest = hidden, range(parts - 1)
        self.spreading = nn.ModuleList(Dense.random(hidden, hidden) for _ in rest)
        self.merging = nn.ModuleList(Dense.random(hidden, hidden) for _ in rest)

    def enter(self, x: Tensor) -> Tensor:
        """See `Stream`."""
        size = _magnitude(x)
        return torch.cat([x, *(_sized(cast(Tensor, layer(x)), size) for layer in self.spreading)], 1)

    def tap(self, x: Tensor) -> Tensor:
        """The first part."""
        return x[:, : self.hidden].contiguous()

    def leave(self, x: Tensor) -> Tensor:
        """All parts merged."""
        first, *rest = torch.split(x, self.hidden, dim=1)
        total, size = first, _magnitude(first)
        for layer, part in zip(self.merging, rest, strict=True):
            total = total + _sized(layer(part), size)
        return total / (len(rest) + 1)


class Alternate(nn.Module):
    """Predicts and corrects the parts of the stream in one layer."""

    def __init__(self, spec: AlternatingSpec, hidden: int, norm: NormSpec, kernels: Kernels):
        super().__init__()
        self.kernels, self.parts = kernels, spec.parts
        # published models multiply the router's inputs by 1 / hidden
        self.router_norm = RMSNorm(hidden, norm.eps, factor=1 / hidden)
        self.router: nn.Module = Dense.random(hidden, self.parts)
        self.predictions = Vector("weight", self.parts**2, self.parts)
        self.corrections = Vector("weight", self.parts, self.parts)
        self.scale = Vector("correct_output_scale", hidden) if spec.scaled else None

    def predict(self, stream: Tensor) -> Tensor:
        """`[N, parts * hidden] -> [N, parts * hidden]` float32."""
        parts = stream.view(len(stream), self.parts, -1)
        coefficients = self._routed(parts[:, 0], self.predictions).view(-1, self.parts, self.parts)
        predicted = coefficients[:, :, :1] * parts[:, :1]
        for source in range(1, self.parts):
            predicted = predicted + coefficients[:, :, source, None] * parts[:, None, source]
        return (predicted + parts).flatten(1)

    def correct(self, stream: Tensor, computed: Tensor) -> Tensor:
        """Correct `[N, parts * hidden]` by the first part `[N, hidden]` as it was computed."""
        predicted = stream.view(len(stream), self.parts, -1)
        coefficients = self._routed(computed, self.corrections) + 1
        corrected = coefficients[:, :, None] * (computed - predicted[:, 0])[:, None] + predicted
        return corrected.flatten(1)

    def _routed(self, x: Tensor, matrix: Vector) -> Tensor:
        """A matrix `[out, parts]` times what the router makes of `x`, `[N, out]`, summed in order."""
        normed = self.kernels.norm(x.contiguous(), self.router_norm, cast(torch.dtype, self.router.dtype))
        scores = torch.tanh(cast(Tensor, self.router(normed)).float())
        total = scores[:, :1] * matrix.value[:, 0]
        for part in range(1, self.parts):
            total = total + scores[:, part, None] * matrix.value[:, part]
        return total


class AlternatingBlock(DecoderBlock):
    """A layer of Gemma 3n."""

    def __init__(self, spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        assert spec.alternating is not None
        assert spec.input is not None
        assert spec.mixer is not None
        assert spec.mlp is not None

        def norm() -> RMSNorm:
            return RMSNorm(hidden, spec.norm.eps)

        self.rope_number, self.kernels, self.hidden = rope_number, kernels, hidden
        self.width, self.embedding_size = spec.alternating.parts * hidden, spec.input.size
        self.alternate = Alternate(spec.alternating, hidden, spec.norm, kernels)
        self.attention = build_mixer(spec.mixer, hidden, kernels)
        self.laurel_in: nn.Module = Dense.random(hidden, spec.alternating.laurel_rank)
        self.laurel_out: nn.Module = Dense.random(spec.alternating.laurel_rank, hidden)
        self.mlp = build_mlp(spec.mlp, hidden, spec.norm, kernels)
        self.attention_norm, self.attention_post_norm, self.laurel_norm = norm(), norm(), norm()
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.layer_input = LayerInput(spec.input, hidden, spec.norm, kernels)

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """See `DecoderBlock`."""
        sizes = [self.hidden, self.width - self.hidden]
        predicted = ops.compute(self.alternate.predict, self.width, x)
        first = ops.split(predicted, sizes)[0]
        normed = ops.norm(first, self.attention_norm, self.dtype)
        attended = ops.add(first, self.attention(ops, normed, at), self.attention_post_norm)
        laurel = ops.apply(self.laurel_out, ops.apply(self.laurel_in, normed))
        learned = ops.add(ops.cast(normed, torch.float32), laurel, self.laurel_norm)
        first = ops.scale(ops.blend(attended, 1.0, learned, 1.0), 0.5**0.5)
        delta = self.mlp(ops, ops.norm(first, self.mlp_norm, self.dtype))
        computed = ops.add(first, delta, self.mlp_post_norm)
        parts = ops.compute(self.alternate.correct, self.width, predicted, computed)
        active, scale = ops.split(parts, sizes)[0], self.alternate.scale
        active = active if scale is None else ops.scale(active, scale.value)
        delta = self.layer_input.delta(ops, active, at.embedding)
        return ops.compute(_add_to_rest, self.width, parts, delta)


def _add_to_rest(parts: Tensor, delta: Tensor) -> Tensor:
    """Add `[N, hidden]` to all parts of the stream `[N, parts * hidden]` but the first one."""
    first, rest = parts[:, : delta.shape[1]], parts[:, delta.shape[1] :]
    return torch.cat([first, (rest.reshape(len(delta), -1, delta.shape[1]) + delta[:, None]).flatten(1)], 1)


def _magnitude(x: Tensor) -> Tensor:
    """The root mean square of each row: `[N, 1]` float32."""
    mean, deviation = moments(x)
    return (mean * mean + deviation * deviation).sqrt()


def _sized(x: Tensor, size: Tensor) -> Tensor:
    """Rows with the magnitudes `size` `[N, 1]`, float32."""
    x = x.float()
    return x * size / _magnitude(x).clamp(min=1e-5**0.5)
