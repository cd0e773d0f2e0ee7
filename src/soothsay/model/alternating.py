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

from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.model.feed_forward import moments
from soothsay.model.kernels import Kernels
from soothsay.model.layer_embeddings import LayerInput
from soothsay.model.linear import Dense
from soothsay.model.norm import RMSNorm, Vector
from soothsay.model.parts import build_mixer, build_mlp
from soothsay.model.specs.model_spec import AlternatingSpec, LayerSpec, NormSpec


class Alternation(nn.Module):
    """The ends of the stream of all parts. Parts have the size that the first one has."""

    def __init__(self, parts: int, hidden: int):
        super().__init__()
        self.hidden, rest = hidden, range(parts - 1)
        self.spreading = nn.ModuleList(Dense.random(hidden, hidden) for _ in rest)
        self.merging = nn.ModuleList(Dense.random(hidden, hidden) for _ in rest)

    def spread(self, x: Tensor) -> Tensor:
        """Embeddings to streams: `[N, hidden] -> [N, parts * hidden]` float32."""
        size = _magnitude(x)
        return torch.cat([x, *(_sized(cast(Tensor, layer(x)), size) for layer in self.spreading)], 1)

    def merge(self, stream: Tensor) -> Tensor:
        """Streams to final states: `[N, parts * hidden] -> [N, hidden]` float32."""
        first, *rest = torch.split(stream, self.hidden, dim=1)
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

    def predict(self, parts: Tensor) -> Tensor:
        """`[N, parts, hidden] -> [N, parts, hidden]`."""
        coefficients = self._routed(parts[:, 0], self.predictions).view(-1, self.parts, self.parts)
        predicted = coefficients[:, :, :1] * parts[:, :1]
        for source in range(1, self.parts):
            predicted = predicted + coefficients[:, :, source, None] * parts[:, None, source]
        return predicted + parts

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Correct `[N, parts, hidden]` by the first part `[N, hidden]` as it was computed."""
        coefficients = self._routed(computed, self.corrections) + 1
        return coefficients[:, :, None] * (computed - predicted[:, 0])[:, None] + predicted

    def _routed(self, x: Tensor, matrix: Vector) -> Tensor:
        """A matrix `[out, parts]` times what the router makes of `x`, `[N, out]`, summed in order."""
        normed = self.kernels.norm(x.contiguous(), self.router_norm, cast(torch.dtype, self.router.dtype))
        scores = torch.tanh(cast(Tensor, self.router(normed)).float())
        total = scores[:, :1] * matrix.value[:, 0]
        for part in range(1, self.parts):
            total = total + scores[:, part, None] * matrix.value[:, part]
        return total


class AlternatingBlock(nn.Module):
    """A layer of Gemma 3n. It has the interface of `Block`."""

    def __init__(self, spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        assert spec.alternating is not None
        assert spec.input is not None
        assert spec.mixer is not None
        assert spec.mlp is not None

        def norm() -> RMSNorm:
            return RMSNorm(hidden, spec.norm.eps)

        self.rope_number, self.kernels, self.hidden = rope_number, kernels, hidden
        self.alternate = Alternate(spec.alternating, hidden, spec.norm, kernels)
        self.attention = build_mixer(spec.mixer, hidden, kernels)
        self.laurel_in: nn.Module = Dense.random(hidden, spec.alternating.laurel_rank)
        self.laurel_out: nn.Module = Dense.random(spec.alternating.laurel_rank, hidden)
        self.mlp = build_mlp(spec.mlp, hidden, spec.norm, kernels)
        self.attention_norm, self.attention_post_norm, self.laurel_norm = norm(), norm(), norm()
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        self.layer_input = LayerInput(spec.input, hidden, spec.norm, kernels)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of its linear layers' outputs."""
        return cast(torch.dtype, self.attention.o.dtype)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        kv: LayerMemory | None,
        inputs: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> Tensor:
        """`[N, parts * hidden] -> [N, parts * hidden]`, float32. For the arguments see `Block`."""
        kernels = self.kernels
        predicted = self.alternate.predict(x.view(len(x), -1, self.hidden))
        first = predicted[:, 0].contiguous()
        normed = kernels.norm(first, self.attention_norm, self.dtype)
        attended = kernels.add(first, self.attention(normed, rope, batch, kv), self.attention_post_norm)
        learned = kernels.add(normed.float(), self.laurel_out(self.laurel_in(normed)), self.laurel_norm)
        first = (attended + learned) * 0.5**0.5
        delta = self.mlp(kernels.norm(first, self.mlp_norm, self.dtype))
        parts = self.alternate.correct(predicted, kernels.add(first, delta, self.mlp_post_norm))
        active = parts[:, 0].contiguous()
        scale = self.alternate.scale
        delta = self.layer_input.delta(active if scale is None else active * scale.value, embedding)
        return torch.cat([active[:, None], parts[:, 1:] + delta[:, None]], 1).flatten(1)


def _magnitude(x: Tensor) -> Tensor:
    """The root mean square of each row: `[N, 1]` float32."""
    mean, deviation = moments(x)
    return (mean * mean + deviation * deviation).sqrt()


def _sized(x: Tensor, size: Tensor) -> Tensor:
    """Rows with the magnitudes `size` `[N, 1]`, float32."""
    x = x.float()
    return x * size / _magnitude(x).clamp(min=1e-5**0.5)
