"""Layers of encoder-decoders (Vaswani et al. 2017, arXiv 1706.03762), and the encoder."""

import torch
from torch import Tensor, nn

from soothsay.model.decoder.decoder_block import DecoderBlock, LayerPass
from soothsay.model.decoder.norm import build_norm
from soothsay.model.decoder.parts import build_mixer, build_mlp
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import SequenceLayerSpec


class CrossAttention(nn.Module):
    """Attention to the keys and values that a layer has made of a source."""

    def __init__(self, spec: AttentionSpec, hidden: int):
        super().__init__()
        self.spec, size = spec, spec.size
        self.q: nn.Module = Dense.random(hidden, spec.heads * size, bias=spec.bias)
        self.kv: nn.Module = Dense.random(hidden, 2 * spec.kv_heads * size, bias=spec.bias)
        self.o: nn.Module = Dense.random(spec.heads * size, hidden, bias=spec.o_bias)

    def forward(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """`[N, hidden] -> [N, hidden]`."""
        c, kv, across = self.spec, at.kv, at.batch.across
        assert kv is not None
        assert across is not None
        q = ops.heads(ops.scale(ops.cast(ops.apply(self.q, x), torch.float32), c.scale), c.size)
        return ops.apply(self.o, ops.attend(q, kv, across))

    def read(self, ops: Kernels, encoded: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Write keys and values of a source's final states `[n, hidden]` to the pool, at `slots` `[n]`."""
        heads = ops.heads(ops.apply(self.kv, encoded), self.spec.size).float()
        k, v = ops.split(heads, [self.spec.kv_heads, self.spec.kv_heads])
        ops.write(k.transpose(0, 1), v.transpose(0, 1), kv, slots)


class SequenceBlock(DecoderBlock):
    """A layer of an encoder or a decoder: parts in a row, each of which reads the stream and adds to it.

    Norms stand before the parts (T5), or after the sums (BART).
    """

    def __init__(self, spec: SequenceLayerSpec, hidden: int, kernels: Kernels, rope_number: int):
        super().__init__()
        assert spec.mixer is not None
        assert spec.mlp is not None
        self.rope_number, self.kernels, self.width = rope_number, kernels, hidden
        self.attention = build_mixer(spec.mixer, hidden, kernels)
        self.attention_norm = build_norm(spec.norm, hidden)
        self.cross = None if spec.cross is None else CrossAttention(spec.cross, hidden)
        self.cross_norm = None if spec.cross is None else build_norm(spec.norm, hidden)
        self.mlp = build_mlp(spec.mlp, hidden, spec.norm, kernels)
        self.mlp_norm = None if spec.norms == "between" else build_norm(spec.norm, hidden)
        self.norms_first = spec.norms == "before"

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        """See `DecoderBlock`."""
        for part, norm in (
            (self.attention, self.attention_norm),
            (self.cross, self.cross_norm),
            (self.mlp, self.mlp_norm),
        ):
            if part is None:
                continue
            inputs = ops.norm(x, norm, self.dtype) if norm is not None and self.norms_first else x
            delta = part(ops, inputs) if part is self.mlp else part(ops, inputs, at)
            x = ops.add(x, delta, None)
            x = x if norm is None or self.norms_first else ops.norm(x, norm, torch.float32)
        return x
