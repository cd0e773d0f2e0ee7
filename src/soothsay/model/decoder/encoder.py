"""The encoder of an encoder-decoder: layers in which each row sees all rows of its source."""

from typing import cast

import torch

from soothsay.core.cache import KVPool
from soothsay.core.sides import Sides
from soothsay.model.decoder.blocks import Blocks, build_layer
from soothsay.model.decoder.embedding import Embedding, Entry
from soothsay.model.decoder.norm import build_norm
from soothsay.model.decoder.rope import Rope
from soothsay.model.decoder.sequence_block import CrossAttention
from soothsay.model.ops.kernels import Kernels
from soothsay.model.specs.model_spec import ModelSpec


class Encoder(Entry):
    """Layers with random weights, and a norm after them."""

    def __init__(self, spec: ModelSpec, kernels: Kernels):
        super().__init__(spec, kernels)
        self.blocks = Blocks(build_layer(layer, spec.hidden_size, kernels, 0) for layer in spec.layers)
        self.norm = build_norm(spec.norm, spec.hidden_size)
        self.rope = Rope(spec.rotation)

    def read(self, sides: Sides, embedding: Embedding, decoder: Blocks, cache: KVPool) -> None:
        """Encode the sources of a pass, and write what layers of the decoder read of them to the pool."""
        if (batch := sides.source) is None:
            return
        rope, count = self.rope(batch.positions), len(self.blocks)
        x = self.placed(embedding(batch.tokens), batch.positions)
        x = self.blocks(x, [rope], batch, None, range(count))[count]
        encoded = self.kernels.norm(x, self.norm, torch.float32)
        for layer, block in enumerate(decoder):
            cross = cast(CrossAttention, block.cross)
            cross.read(self.kernels, encoded, cache.kv(layer), sides.slots)
