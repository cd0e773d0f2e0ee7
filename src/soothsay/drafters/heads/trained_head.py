"""Base classes of trained heads: modules that read the target's features and share its ends.

One module is trained and served. During training its linear layers are `Dense`, in float32. `serve` converts
them to the kinds that the target's kernels are fast at.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.drafters.ops.draft_ops import DraftOps, RecurrentDrafts
from soothsay.model.decoder.decoder_block import DecoderBlock
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.decoder.norm import RMSNorm, UnitNorm
from soothsay.model.loaded_part import Table
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.model_spec import HeadSpec
from soothsay.model.transformer import Transformer, finished_logits

HEAD_ROWS = 64
"""Inputs of an output head whose weights are read at a time."""


class TargetEnds(nn.Module):
    """The parts of a target that heads share: its embedding, its last norm and its output head.

    They are held by reference and never trained. V is the size of the target's vocabulary, H the size of the
    hidden states that the ends work with.
    """

    def __init__(
        self,
        embedding: Embedding,
        norm: RMSNorm | UnitNorm,
        head: nn.Module,
        kernels: Kernels,
        output: HeadSpec,
    ):
        super().__init__()
        self.embedding, self.norm, self.head = embedding, norm, head
        self.kernels, self.output = kernels, output

    @classmethod
    def of(cls, model: Transformer) -> TargetEnds:
        """The ends of `model`."""
        return cls(model.embedding, model.norm, model.head, model.kernels, model.spec.head)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.norm.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.embedding.weight.shape[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, `[N] -> [N, H]` float32."""
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def normed(self, hidden: Tensor) -> Tensor:
        """Norm the last layer's output for the output head: `[N, H] -> [N, H]` float32."""
        return self.kernels.norm(hidden, self.norm, torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: normed hidden states `[M, H]` -> logits `[M, V]` float32."""
        return self.finished(self.head(hidden))

    def finished(self, products: Tensor) -> Tensor:
        """An output head's products as logits: scaled, and bounded."""
        return finished_logits(products, self.output.scale, self.output.softcap)

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Some rows of the output head, whatever kind of layer it is: `[n]` int64 -> `[n, H]` float32.

        Rows of integers that no kernel packs are multiplied by activations of 8 bits, so they are off by
        that rounding.
        """
        if isinstance(self.head, Dense):
            return self.head.weight.detach()[tokens].float()
        table: Table | None = getattr(self.head, "table", None)
        if table is not None:
            return table.floats(tokens)
        parts, units = [], torch.eye(self.hidden_size, device=self.norm.weight.device)
        for begin in range(0, len(units), HEAD_ROWS):
            parts.append(cast(Tensor, self.head(units[begin : begin + HEAD_ROWS]))[:, tokens].float())
        rows = torch.cat(parts)
        if self.output.biased:  # which each product has
            rows = rows - cast(Tensor, self.head(torch.zeros_like(units[:1])))[:, tokens].float()
        return rows.t().contiguous()


class Head(nn.Module):
    """A trained drafter's weights and their computation. Drafters serve it, `soothsay.train` trains it."""

    method: ClassVar[str]
    """The method's name in the registry and in checkpoints."""

    taps: tuple[int, ...]
    """Layers of the target whose input the head reads. The number of layers means the last output."""

    config: Any
    """The method's own dataclass."""

    draft_vocabulary: int | None = None
    """Number of tokens that the head can draft, if it has a list of them; None: all."""

    bits: int | None = None
    """Bits of the integers that the head is stored in; None: it is stored in plain numbers."""

    @property
    def listed(self) -> Tensor | None:
        """`[draft_vocabulary]` int64, the tokens that the head can draft, in the order of its outputs."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the linear layers' outputs, and of the KV. Heads without decoder blocks need none."""
        blocks = (module.dtype for module in self.modules() if isinstance(module, DecoderBlock))
        return next(blocks, torch.float32)

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """Compute the feature to keep from the target's features: `[N, H]` for each tap -> `[N, H]` float32.

        Here it is the normed output of the last layer, which is the input of the target's output head.
        """
        return shared.normed(taps[0])

    def embed(self, tokens: Tensor, shared: TargetEnds) -> Tensor:
        """Embed tokens, `[N] -> [N, H]` float32."""
        return shared.embed(tokens)

    def borrow(self, shared: TargetEnds) -> None:
        """Take from the target what the head needs and its checkpoint does not have. Here it is nothing."""


class RecurrentHead(Head):
    """A head that continues from its own output, token by token: EAGLE's, EAGLE-3's and MTP's modules.

    Row t reads token t and the feature of token t - 1, stands at position t, and guesses token t + 1. The row
    of a draft token reads the output of its parent's row in place of a feature. There is no row 0.

    `config.block` describes the decoder block. Its `num_layers` is the number of modules, and each has its
    own KV.
    """

    @abstractmethod
    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """Run one pass.

        Args:
            embedded: `[N, H]` float32, the embedding of each row's token.
            features: `[N, H]` float32, the fused feature of the token before, or the parent row's output.
            batch: the rows' places.
            kv: keys and values of the module, `[2 * H_kv, S, d]`; None: they exist during the pass only.
            step: the module's number, for heads with several modules.

        Returns:
            `[N, H]` float32.
        """

    def logits(self, out: Tensor, shared: TargetEnds) -> Tensor:
        """Outputs -> logits of the next tokens: `[M, H] -> [M, V]` float32."""
        return shared.logits(out)

    def drafts_at_once(self, shared: TargetEnds, ops: DraftOps) -> RecurrentDrafts | None:
        """One call for whole drafts, of a head that is ready to draft; None: there is none for it."""
        return None


class OnePassHead(Head):
    """A head that predicts all depths in one pass. V_short is the number of tokens that it can guess."""

    @abstractmethod
    def logits(self, hidden: Tensor, shared: TargetEnds) -> Tensor:
        """Logits of the tokens that can be guessed: outputs `[M, H]` -> `[M, V_short]` float32."""

    def whole(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits of the target's vocabulary: minus infinity for tokens that cannot be guessed, `[M, V]`."""
        return logits


class ShortlistHead(OnePassHead):
    """A head with a list of the tokens that it can guess.

    `shortlist` `[V_short]` int64 are these tokens, in order, or None: all. For a shortlist, `borrow` gives
    the rows of the target's output head that it needs, so that the rest is not read.
    """

    shortlist: Tensor | None
    embedding_norm: RMSNorm

    def __init__(self, shortlist_size: int):
        super().__init__()
        self.draft_vocabulary = shortlist_size or None
        # zeros: on the meta device, torch imports its compiler to count
        known = torch.zeros(shortlist_size, dtype=torch.int64) if shortlist_size else None
        self.register_buffer("shortlist", known)
        self.head: nn.Module | None = None

    @property
    def listed(self) -> Tensor | None:
        """See `Head`."""
        return self.shortlist

    def borrow(self, shared: TargetEnds) -> None:
        """Take the rows of the target's output head that belong to the shortlist. They are not trained."""
        if self.shortlist is not None:
            self.head = Dense(shared.head_rows(self.shortlist)).requires_grad_(False)

    def embedded(self, tokens: Tensor, shared: TargetEnds) -> Tensor:
        """Normed embeddings of tokens, as this head's layers read them: `[N] -> [N, H]` float32."""
        return shared.kernels.norm(shared.embed(tokens), self.embedding_norm, torch.float32)

    def logits(self, hidden: Tensor, shared: TargetEnds) -> Tensor:
        """Logits of the tokens that can be guessed: normed outputs `[M, H]` -> `[M, V_short]` float32."""
        return shared.logits(hidden) if self.head is None else shared.finished(self.head(hidden))

    def whole(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits of all tokens: minus infinity for those that cannot be guessed. `[M, V]` float32."""
        return logits if self.shortlist is None else whole_logits(logits, self.shortlist, vocab_size)


def whole_logits(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Logits `[M, V_short]` of the tokens `ids` -> `[M, V]`, minus infinity for all others."""
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, ids, logits)
