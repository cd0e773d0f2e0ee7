"""A head that guesses tokens of a list: it reads these rows of the target's output head, and no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.model.linear import Dense
from soothsay.model.norm import RMSNorm


class ShortlistHead(Head):
    """A head with a list of the tokens that it can guess.

    `shortlist` `[V_short]` int64 are these tokens, in order, or None: all. For a shortlist, `borrow` gives
    the rows of the target's output head that it needs, so that the rest is not read.
    """

    shortlist: Tensor | None
    embedding_norm: RMSNorm

    def __init__(self, shortlist_size: int):
        super().__init__()
        # zeros: on the meta device, torch imports its compiler to count
        known = torch.zeros(shortlist_size, dtype=torch.int64) if shortlist_size else None
        self.register_buffer("shortlist", known)
        self.head: nn.Module | None = None

    @property
    def draft_vocabulary(self) -> int | None:
        """See `Head`."""
        return None if self.shortlist is None else len(self.shortlist)

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
        if self.shortlist is None:
            return logits
        out = logits.new_full((len(logits), vocab_size), -torch.inf)
        return out.index_copy_(1, self.shortlist, logits)
