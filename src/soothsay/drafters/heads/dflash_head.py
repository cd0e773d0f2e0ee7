"""DFlash's module and its kin: decoder blocks that fill a block of masks in one pass.

DFlash (2026, arXiv 2602.06036), DFlash2, DSpark, xPress and JetSpec (2026, arXiv 2606.18394) share the
decoder blocks. They differ in their `PathHead`, in the convolution of DFlash2, and in which rows see which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.drafters.heads.draft_blocks import BlockPass, RowVisibility
from soothsay.drafters.heads.path_heads import PathHead
from soothsay.drafters.heads.trained_head import OnePassHead, TargetEnds, whole_logits
from soothsay.errors import DrafterError
from soothsay.model.decoder.feed_forward import FeedForward
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.ops.operands import HeadForm
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import finished_logits

MOST_ROWS = 1024
"""Limit of a block's rows. Published heads have up to 16."""


@dataclass(frozen=True)
class DFlashConfig:
    """Configuration of a head that fills masks. It shares the target's embedding."""

    block: ModelSpec
    """The decoder blocks'. `hidden_size` must be that of the features. `windows` are not used."""

    taps: tuple[int, ...]
    """Layers of the target. Their inputs, concatenated and projected, are the feature."""

    size: int
    """Rows of a block: the last token, and masks."""

    mask: int
    """The token of the masks."""

    sights: tuple[RowVisibility, ...]
    """For each decoder block, which rows see which."""

    begins_at_root: bool = False
    """Whether the first row of a block guesses too: a row guesses the token after its own. Otherwise a row
    guesses the token of its own position."""

    guessed: int = 0
    """Tokens that can be guessed, which have an output head in the checkpoint; 0: all, by the target's."""

    convolution: tuple[int, int] | None = None
    """DFlash2's: number of rows it sees, and channels of a group."""

    embedding_scale: float | None = None
    """Factor of the target's embedding as it is stored; None: the target's own."""

    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        c = self.block
        if self.num_guesses < 1 or self.size > MOST_ROWS or not 0 <= self.mask < c.vocab_size:
            raise DrafterError(
                f"dflash with block_size={self.size}, mask_token_id={self.mask} of {c.vocab_size} tokens: a "
                f"block needs a row that guesses, {MOST_ROWS:,} rows at most, and a mask of the vocabulary"
            )
        if self.convolution is not None:
            rows, channels = self.convolution
            if not 1 <= rows <= self.size or channels < 1 or c.hidden_size % channels:
                raise DrafterError(
                    f"dflash with conv_kernel_size={rows}, conv_group_size={channels}: the first must fit a "
                    f"block of {self.size} rows, the second divide {c.hidden_size} channels"
                )

    @property
    def num_guesses(self) -> int:
        """Tokens that one pass predicts."""
        return self.size if self.begins_at_root else self.size - 1


class ContextAttention(nn.Module):
    """Attention of a block's rows to their context and to each other.

    Keys and values of the context are made of the target's features. They have no queries.
    """

    def __init__(self, spec: AttentionSpec, hidden: int, sight: RowVisibility, kernels: Kernels):
        super().__init__()
        self.spec, self.sight, self.kernels, c = spec, sight, kernels, spec
        self.q: nn.Module = Dense.random(hidden, c.heads * c.size, bias=c.bias)
        self.kv: nn.Module = Dense.random(hidden, 2 * c.kv_heads * c.size, bias=c.bias)
        self.o: nn.Module = Dense.random(c.heads * c.size, hidden, bias=c.o_bias)
        self.q_norm = None if c.norms is None else RMSNorm(c.size, c.norms.eps)
        self.k_norm = None if c.norms is None else RMSNorm(c.size, c.norms.eps)

    def forward(
        self, context: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], place: BlockPass, kv: Tensor
    ) -> Tensor:
        """Write keys and values of all rows to `kv` `[2 * H_kv, S, d]`, and compute the blocks' rows.

        Args:
            context: `[C, H]` features.
            x: `[R * B, H]` of the blocks, in the dtype of `context`.
            rope: cosines and sines of all rows.
            place: where the rows stand.
            kv: the pool's layer.

        Returns:
            `[R * B, H]`.
        """
        c, count = self.spec, len(context)
        rows = cast(Tensor, self.kv(torch.cat([context, x]))).view(count + len(x), -1, c.size)
        self._store(rows[:count], tuple(part[:count] for part in rope), place.slots[:count], kv)
        if not len(x):
            return x
        heads = torch.cat([cast(Tensor, self.q(x)).view(len(x), -1, c.size), rows[count:]], dim=1)
        q = self._store(heads, tuple(part[count:] for part in rope), place.slots[count:], kv)
        return cast(Tensor, self.o(self.kernels.attend(q, kv, place.seen[self.sight])))

    def _store(self, heads: Tensor, rope: tuple[Tensor, ...], slots: Tensor, kv: Tensor) -> Tensor:
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        cos, sin = rope
        form = HeadForm(self.spec.scale, norms)
        return self.kernels.rotate_store(heads.contiguous(), (cos, sin), kv, slots, form)


class RowConvolution(nn.Module):
    """A convolution over the last rows of a block, whose weights depend on the row (DFlash2).

    One projection of a row makes the weights before a part of the decoder block and after it.
    """

    def __init__(self, size: int, rows: int, channels: int, hidden_size: int):
        super().__init__()
        self.size, self.rows, self.channels = size, rows, channels
        base = torch.zeros(2, rows, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)  # [before or after, row back, H]
        self.kernel_projection: nn.Module = Dense.random(hidden_size, 2 * rows * (hidden_size // channels))

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`part` of the convolved rows, convolved again: `[R * B, H]` in any dtype, and in that of `part`."""
        projected = cast(Tensor, self.kernel_projection(x)).float()
        kernels = projected.view(len(x), 2, self.rows, -1)  # [N, 2, k, groups]
        out = part(self._convolve(x, kernels[:, 0], self.base_kernel[0]))
        return self._convolve(out, kernels[:, 1], self.base_kernel[1])

    def _convolve(self, x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
        factors = base + kernels.repeat_interleave(self.channels, dim=-1)  # [N, k, H]
        factors = factors.view(-1, self.size, self.rows, x.shape[-1])
        blocks = x.float().view(-1, self.size, x.shape[-1])
        out = blocks * factors[:, :, 0]
        for back in range(1, self.rows):
            out[:, back:] += blocks[:, :-back] * factors[:, back:, back]
        return out.view(x.shape).to(x.dtype)


class DFlashBlock(nn.Module):
    """A decoder block over the rows of draft blocks."""

    def __init__(self, config: DFlashConfig, layer: int, kernels: Kernels):
        super().__init__()
        c = config.block
        self.kernels = kernels
        attention, mlp = c.parts(AttentionSpec)[layer], c.parts(DenseSpec)[layer]
        self.attention = ContextAttention(attention, c.hidden_size, config.sights[layer], kernels)
        self.mlp = FeedForward(mlp, c.hidden_size, kernels)
        self.attention_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.attention_conv: RowConvolution | None = None
        self.mlp_conv: RowConvolution | None = None
        if config.convolution is not None:
            self.attention_conv = RowConvolution(config.size, *config.convolution, c.hidden_size)
            self.mlp_conv = RowConvolution(config.size, *config.convolution, c.hidden_size)

    def forward(
        self, context: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], place: BlockPass, kv: Tensor
    ) -> Tensor:
        """`[R * B, H] -> [R * B, H]` float32. The other arguments are those of `ContextAttention.forward`."""

        def attend(rows: Tensor) -> Tensor:
            return self.attention(context, rows, rope, place, kv)  # type: ignore[no-any-return]

        if not len(x):
            attend(x.to(context.dtype))
            return x
        normed = self.kernels.norm(x, self.attention_norm, context.dtype)
        delta = attend(normed) if self.attention_conv is None else self.attention_conv.around(attend, normed)
        x, normed = self.kernels.add_norm(x, delta, None, self.mlp_norm, context.dtype)
        mlp = partial(self.mlp, self.kernels)
        delta = mlp(normed) if self.mlp_conv is None else self.mlp_conv.around(mlp, normed)
        return self.kernels.add(x, delta, None)


class DFlashHead(OnePassHead):
    """Decoder blocks over the target's features and a block of masks.

    `d2t` `[guessed]` int64: token i of those that can be guessed is token `i + d2t[i]` of the target's.
    """

    method = "dflash"
    d2t: Tensor | None

    def __init__(self, config: DFlashConfig, kernels: Kernels, path_head: PathHead | None = None):
        super().__init__()
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, config.taps
        self.fc: nn.Module = Dense.random(len(config.taps) * c.hidden_size, c.hidden_size)
        self.feature_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.blocks = nn.ModuleList(DFlashBlock(config, layer, kernels) for layer in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.rope = Rope(c.rotations[0])
        self.draft_vocabulary = config.guessed or None
        short = config.guessed
        self.head: nn.Module | None = Dense.random(c.hidden_size, short) if short else None
        self.register_buffer("d2t", torch.zeros(short, dtype=torch.int64) if short else None)
        self.path_head = path_head

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear layers' outputs, and of the KV."""
        return cast(torch.dtype, cast(DFlashBlock, self.blocks[0]).attention.o.dtype)

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """Concatenate the layers' inputs, project and norm them: `[N, H]` each -> `[N, H]` float32."""
        fused = cast(Tensor, self.fc(torch.cat(list(taps), dim=-1))).float()
        return self.kernels.norm(fused, self.feature_norm, torch.float32)

    def embed(self, tokens: Tensor, shared: TargetEnds) -> Tensor:
        """`[N] -> [N, H]` float32."""
        embedded, scale = shared.embed(tokens), self.config.embedding_scale
        return embedded if scale is None else embedded * (scale / shared.embedding.scale)

    def forward(self, features: Tensor, embedded: Tensor, place: BlockPass, kv: Sequence[Tensor]) -> Tensor:
        """Run one pass. Writes keys and values of all rows to `kv`.

        Args:
            features: `[C, H]` float32, those of the context's rows.
            embedded: `[R * B, H]` float32, embeddings of the blocks' tokens.
            place: where the rows stand.
            kv: keys and values of each decoder block, `[2 * H_kv, S, d]`.

        Returns:
            `[R, B, H]` normed, float32.
        """
        context, rope, x = features.to(self.dtype), self.rope(place.positions), embedded
        for block, own in zip(self.blocks, kv, strict=True):
            x = block(context, x, rope, place, own)
        out = self.kernels.norm(x, self.norm, torch.float32) if len(x) else x
        return out.view(place.num_blocks, self.config.size, embedded.shape[1])

    def logits(self, outputs: Tensor, shared: TargetEnds) -> Tensor:
        """Logits by the one pass alone: `[M, H] -> [M, V_short]` float32."""
        head = shared.head if self.head is None else self.head
        products = cast(Tensor, head(outputs))[:, : self.config.block.vocab_size]
        return finished_logits(products, self.config.logit_scale, self.config.logit_softcap)

    def whole(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits of the target's vocabulary: minus infinity for tokens that cannot be guessed; `[M, V]`."""
        if self.d2t is None and logits.shape[1] == vocab_size:
            return logits
        ids = torch.arange(logits.shape[1], device=logits.device)
        return whole_logits(logits, ids if self.d2t is None else ids + self.d2t, vocab_size)
