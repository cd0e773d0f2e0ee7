"""The blocks of a decoder, one after the other or in few calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.cache import LayerMemory
from soothsay.model.decoder.alternating import AlternatingBlock, Alternation
from soothsay.model.decoder.decoder_block import DecoderBlock, LayerPass, Stream, parts_of
from soothsay.model.decoder.embedding import LayerInput
from soothsay.model.decoder.feed_forward import DenseAndExperts, part_dtype
from soothsay.model.decoder.norm import RMSNorm, UnitNorm, Vector, build_norm
from soothsay.model.decoder.parts import build_mixer, build_mlp
from soothsay.model.decoder.sequence_block import SequenceBlock
from soothsay.model.ops.kernels import BlocksPass, Kernels, RecordedBlocks
from soothsay.model.ops.lora import AdaptedRows
from soothsay.model.ops.operands import Ropes
from soothsay.model.specs.model_spec import LayerSpec, ModelSpec, SequenceLayerSpec


class Block(DecoderBlock):
    """A decoder block: attention and feed-forward layer, added to the residual stream.

    A norm stands before each (Llama), after each (OLMo 2), or both (Gemma). Or both read the same normed
    stream (Cohere). With `in_features`, attention reads rows of that size that come with each pass, in place
    of the normed stream.
    """

    def __init__(
        self,
        spec: LayerSpec,
        hidden: int,
        kernels: Kernels,
        rope_number: int = 0,
        in_features: int | None = None,
    ):
        super().__init__()
        assert spec.mixer is not None
        assert spec.mlp is not None

        def norm() -> RMSNorm | UnitNorm:
            return build_norm(spec.norm, hidden)

        self.rope_number, self.kernels = rope_number, kernels
        self.width, self.in_features = hidden, in_features
        self.attention = build_mixer(spec.mixer, hidden, kernels, in_features)
        self.mlp = build_mlp(spec.mlp, hidden, spec.norm, kernels)
        self.attention_norm = norm() if spec.pre_norms and in_features is None else None
        self.parallel = spec.parallel
        shares_norm = spec.parallel and not spec.parallel_norms
        normed_inside = shares_norm or isinstance(self.mlp, DenseAndExperts)
        self.mlp_norm = norm() if spec.pre_norms and not normed_inside else None
        self.attention_post_norm = norm() if spec.post_norms else None
        self.mlp_post_norm = norm() if spec.post_norms else None
        self.embedding_size = None if spec.input is None else spec.input.size
        self.layer_input = None if spec.input is None else LayerInput(spec.input, hidden, spec.norm, kernels)
        self.scalar = Vector("layer_scalar", 1) if spec.scalar else None

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """See `DecoderBlock`."""
        dtype, inputs = self.dtype, at.inputs
        if self.attention_norm is not None:
            inputs = ops.norm(x, self.attention_norm, dtype)
        inputs = x if inputs is None else inputs
        delta = self.attention(ops, inputs, at)
        if self.parallel:
            normed = inputs if self.mlp_norm is None else ops.norm(x, self.mlp_norm, dtype)
            x = ops.add(x, delta, self.attention_post_norm)
        elif self.mlp_norm is None:
            normed = x = ops.add(x, delta, self.attention_post_norm)
        else:
            x, normed = ops.add_norm(x, delta, self.attention_post_norm, self.mlp_norm, dtype)
        x = ops.add(x, self.mlp(ops, normed), self.mlp_post_norm)
        if self.layer_input is not None:
            x = self.layer_input(ops, x, at.embedding)
        return x if self.scalar is None else ops.scale(x, self.scalar.value)


class SinglePart(DecoderBlock):
    """Attention, what takes its place, or a feed-forward part. It reads the normed stream, and adds to it."""

    def __init__(self, spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        self.rope_number, self.kernels, self.width = rope_number, kernels, hidden
        self.part_norm = build_norm(spec.norm, hidden)
        self.attention = None if spec.mixer is None else build_mixer(spec.mixer, hidden, kernels)
        self.mlp = None if spec.mlp is None else build_mlp(spec.mlp, hidden, spec.norm, kernels)

    @property
    def dtype(self) -> torch.dtype:
        """See `DecoderBlock`."""
        return part_dtype(cast(nn.Module, self.mlp)) if self.attention is None else super().dtype

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """See `DecoderBlock`."""
        normed = ops.norm(x, self.part_norm, self.dtype)
        if self.attention is not None:
            return ops.add(x, self.attention(ops, normed, at), None)
        return ops.add(x, cast(nn.Module, self.mlp)(ops, normed), None)


def build_stream(spec: ModelSpec) -> Stream:
    """The residual stream of a decoder."""
    alternating = spec.layers[0].alternating
    if alternating is not None:
        return Alternation(alternating.parts, spec.hidden_size)
    return Stream(spec.residual_multiplier)


def build_layer(spec: LayerSpec, hidden: int, kernels: Kernels, rope_number: int) -> DecoderBlock:
    """A layer of a decoder, or of an encoder."""
    if isinstance(spec, SequenceLayerSpec):
        return SequenceBlock(spec, hidden, kernels, rope_number)
    if spec.alternating is not None:
        return AlternatingBlock(spec, hidden, kernels, rope_number)
    kind = Block if spec.mixer is not None and spec.mlp is not None else SinglePart
    return kind(spec, hidden, kernels, rope_number)


class Blocks(nn.ModuleList):
    """The blocks of a decoder."""

    recorded: RecordedBlocks | None = None
    """Runs all blocks in few calls; see `record`."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of their linear layers' outputs."""
        return cast(DecoderBlock, self[0]).dtype

    def forward(
        self,
        x: Tensor,
        ropes: Ropes,
        batch: Batch,
        kv: Sequence[LayerMemory] | None,
        layers: Sequence[int],
        taps: Collection[int] = (),
        embeddings: Tensor | None = None,
        adapted: AdaptedRows | None = None,
    ) -> dict[int, Tensor]:
        """One pass through some blocks.

        Args:
            x: `[N, width]` float32, the first block's input.
            ropes: cosines and sines of the rows.
            batch: N rows.
            kv: `[2 * H_kv, S, d]`, or states, for each block of the decoder; None: they live within the pass.
            layers: the blocks to run, in order.
            taps: those of `layers` whose input is returned.
            embeddings: `[layers, N, size]` float32 of all layers, if they read embeddings of their own.
            adapted: the adapters of rows; None: no row has one.

        Returns:
            `[N, width]` float32 inputs by tap, and the last output by the number of blocks.
        """
        recorded, numbers = self.recorded, None
        if adapted is not None:
            recorded, numbers = adapted.adapters.recorded, adapted.numbers
        if recorded is not None:
            return recorded(BlocksPass(x, ropes, batch, kv, layers, taps, embeddings, adapters=numbers))
        streams = {}
        for layer in layers:
            if layer in taps:
                streams[layer] = x
            block = cast(DecoderBlock, self[layer])
            own = None if kv is None else kv[layer]
            embedding = None if embeddings is None else embeddings[layer]
            rope = ropes[block.rope_number]
            if adapted is None:
                x = block(x, rope, batch, own, None, embedding)
            else:
                ops = adapted.adapters.over(block.kernels, numbers)
                x = block.compute(ops, x, LayerPass(batch, rope, *parts_of(own), None, embedding))
        return {**streams, len(self): x}


def record(module: nn.Module) -> None:
    """Make the blocks in `module` run in few calls, together or each by itself, if their kernels can.

    From then on, weights must keep their addresses, and hooks inside a block are not called. `unrecord`
    undoes it.
    """
    for part in module.modules():
        if isinstance(part, Blocks):
            blocks = cast(Sequence[DecoderBlock], part)
            part.recorded = blocks[0].kernels.record(blocks)
        elif isinstance(part, DecoderBlock):
            part.recorded = part.kernels.record([part])


def unrecord(module: nn.Module) -> None:
    """Make the blocks in `module` run layer by layer, so that layers can be hooked and replaced."""
    for part in module.modules():
        if isinstance(part, Blocks | DecoderBlock):
            part.recorded = None
