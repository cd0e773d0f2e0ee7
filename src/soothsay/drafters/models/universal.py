"""A draft model whose tokenizer is not the target's (Timor et al. 2025, arXiv 2502.05202).

The draft model reads the target's text in its own tokens. Its draft is written in the target's tokens. Each
draft model's token stands for the target's token that its text begins with. So the draft model's distribution
becomes one over the target's tokens, and the drafter can use the target's own noise, as any draft model does.
Nothing is lost if both tokenizers have the same tokens under other numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.cache import BlockAllocator
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes
from soothsay.core.transfer import download
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import ReadingDrafter, Target, check_at_least_one
from soothsay.drafters.models.translation import Translation, continues_character
from soothsay.drafters.trees.guesses import likeliest
from soothsay.drafters.trees.own_kv import pack
from soothsay.model.transformer import Transformer

REREAD = 8
"""Number of the last tokens that are tokenized again with what the target has added. How a word is cut
depends on all of it, and a word is seldom longer than this."""


@dataclass(slots=True)
class DraftView:
    """A request in the draft model's tokens."""

    tokens: list[int]  # first those of the committed text, then the last drafted ones
    committed: int  # number of tokens of the committed text
    cached: int = 0  # number of these tokens that have their KV
    read: int = 0  # number of the request's own tokens that were translated
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chain:
    """A chain while it is drafted."""

    request: Request
    view: DraftView
    tree: DraftTree  # the chain so far, in the target's tokens
    log_probs: list[float] = field(default_factory=list)  # of each drafted token


class UniversalDraftModel(ReadingDrafter):
    """Proposes chains with a model that has another vocabulary.

    Its KV has blocks of its own, as many as the target's, because a text has another length in its tokens.
    It proposes nothing while no blocks are left, and for texts that are longer than its context.

    Args:
        target: the model to draft for; it must have a tokenizer.
        model: the draft model.
        translation: between the tokens of both.
        depth: number of the draft model's tokens that are drafted in a row.

    Raises:
        DrafterError: the depth is below 1.
    """

    trained = True

    def __init__(self, target: Target, model: Transformer, translation: Translation, depth: int = 4):
        check_at_least_one("draft-model", depth=depth)
        self.target, self.model, self.translation, self.depth = target, model, translation, depth
        self.max_nodes = 1 + 2 * depth  # one draft token is hardly ever more than two of the target's
        size = target.num_blocks, target.config.block_size
        self.pool, self.allocator = model.new_cache(*size), BlockAllocator(*size, share=False)
        self.views: dict[Request, DraftView] = {}
        vocab_size = target.model.spec.vocab_size
        stands_for = torch.full((model.spec.vocab_size,), vocab_size)  # this number means: for no token
        known = torch.tensor(translation.stands_for[: model.spec.vocab_size])
        stands_for[: len(known)] = torch.where((known < 0) | (known >= vocab_size), vocab_size, known)
        self._stands_for = stands_for.to(model.device)  # [D] int64, for each of the draft model's tokens

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a chain for each request. All chains grow together, token by token."""
        trees = {request: DraftTree(request.last_token) for request in requests}
        useful = [request for request in requests if self._useful(request) > 0]
        chains = [_Chain(request, self.view_of(request), trees[request]) for request in useful]
        growing = [chain for chain in chains if self._has_room(chain.view)]
        for _ in range(self.depth):
            if not growing:
                break
            growing = self._extend(growing, self.run([chain.view for chain in growing]))
        return [*(trees | {chain.request: chain.tree for chain in chains}).values()]

    def unread(self, request: Request) -> int:
        """See `ReadingDrafter`."""
        view = self.views.get(request)
        return request.length - 1 - (0 if view is None else view.read)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `ReadingDrafter`."""
        views = [self.view_of(request) for request in requests]
        if readable := [view for view in views if self._has_room(view)]:
            self.run(readable)

    def release(self, request: Request) -> None:
        """Forget a request, and free its blocks."""
        view = self.views.pop(request, None)
        if view is not None:
            self.allocator.release(view.blocks)

    def project(self, logits: Tensor) -> Tensor:
        """Return log-probabilities of the target's tokens, `[R, V]` float32, from draft logits `[R, D]`."""
        vocab_size = self.target.model.spec.vocab_size
        probs = logits.new_zeros(len(logits), vocab_size + 1)
        probs.index_add_(1, self._stands_for, logits.softmax(-1))
        return probs[:, :vocab_size].log()

    def run(self, views: Sequence[DraftView]) -> Tensor:
        """Compute all tokens without KV. Return `[R, D]` logits after the last token of each view."""
        c, hidden = self.model.spec, dict[int, Tensor]()
        waiting = dict(enumerate(views))
        while waiting:
            rows, ends, room = list[Rows](), list[int](), self.target.config.max_rows
            for i, view in list(waiting.items()):
                pending = view.tokens[view.cached : view.cached + room]
                at_end = view.cached + len(pending) == len(view.tokens)
                if pending:
                    tokens = np.array(pending, dtype=np.int64).clip(max=c.vocab_size - 1)
                    tree = DraftTree(int(tokens[-1])) if at_end else None
                    rows.append(Rows(tokens, view.cached, np.array(view.blocks, dtype=np.int64), tree))
                    view.cached += len(pending)
                    room -= len(pending)
                    if at_end:
                        ends.append(i)
                        del waiting[i]
            batch = pack(rows, self.target, c)
            states = batch.select_logit_rows(self.model(batch, self.pool)[0])
            hidden.update(zip(ends, states, strict=True))
        return self.model.logits(torch.stack([hidden[i] for i in range(len(views))]))

    def view_of(self, request: Request) -> DraftView:
        """Return the request in the draft model's tokens; the end of the text before is tokenized again."""
        draft, tokens = self.translation.draft, request.tokens
        view = self.views.get(request)
        if view is None:
            view = self.views[request] = DraftView([*draft.first], len(draft.first))
        keep = max(view.committed - REREAD, len(draft.first))
        while keep > len(draft.first) and continues_character(draft.bytes[view.tokens[keep]]):
            keep -= 1
        before, new = tokens[max(view.read - REREAD, 0) : view.read].tolist(), tokens[view.read :].tolist()
        ids = self.translation.read(view.tokens[keep : view.committed], before, new)
        if view.read == 0 and ids[: len(draft.first)] == draft.first:  # the target's prompt has them too
            del ids[: len(draft.first)]
        pairs = zip(view.tokens[keep:], ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        view.tokens[keep:] = ids
        view.read, view.committed = len(tokens), len(view.tokens)
        # the last token is computed again, since its logits are needed
        view.cached = min(view.cached, keep + same, max(view.committed - 1, 0))
        return view

    def _useful(self, request: Request) -> int:
        """Return the length that a chain can have at most."""
        return min(self.max_nodes - 1, request.max_nodes - 1, request.max_depth)

    def _has_room(self, view: DraftView) -> bool:
        """Allocate blocks for the committed text and a draft. Return whether there are enough."""
        size = view.committed + self.depth
        missing = -(-size // self.allocator.block_size) - len(view.blocks)
        fits = 0 < view.committed <= size <= self.model.spec.max_positions
        if not fits or missing > self.allocator.num_free:
            return False
        view.blocks += self.allocator.allocate(max(missing, 0))
        return True

    def _extend(self, growing: Sequence[_Chain], logits: Tensor) -> list[_Chain]:
        """Add one of the draft model's tokens to every chain. Return the chains that go on."""
        asked = [Nodes(chain.request, chain.tree, [len(chain.tree) - 1]) for chain in growing]
        values, tokens, _ = likeliest(self.project(logits), asked, 1, self.target.model.kernels.sampling)
        # of all draft model tokens that stand for the chosen one, take the likeliest
        own = logits.masked_fill(self._stands_for != tokens, -math.inf).argmax(-1)
        going = []
        found = (each.tolist() for each in download(values[:, 0], tokens[:, 0], own))
        guesses = zip(growing, *found, strict=True)
        for chain, log_prob, token, number in guesses:
            if log_prob == -math.inf:
                continue
            view, root = chain.view, chain.tree.tokens[0]
            view.tokens.append(number)
            chain.log_probs.append(log_prob)
            drafted = view.tokens[view.committed :]
            chain.tree = written_chain(self.translation, root, drafted, chain.log_probs, self.max_nodes)
            goes_on = len(chain.tree) <= self._useful(chain.request)
            if goes_on and token not in chain.request.end_tokens:
                going.append(chain)
        return going


def written_chain(
    translation: Translation, root: int, drafted: Sequence[int], log_probs: Sequence[float], max_nodes: int
) -> DraftTree:
    """Write drafted tokens in the target's tokens.

    The log-probability of a target token is the sum over the draft tokens that spell it.

    Example:
        The draft is "un", "believ", "able" with log-probabilities -1, -2 and -3. The target writes it as
        "unb", "elievable". "unb" has -1 - 2, and "elievable" has -3: "believ" is counted once.

    Args:
        translation: between the tokens of both models.
        root: the target's token that the chain hangs from.
        drafted: the draft model's tokens.
        log_probs: one for each of them.
        max_nodes: the largest chain, the root included.
    """
    draft, target, tree, node = translation.draft, translation.target, DraftTree(root), 0
    steps = zip((len(draft.bytes[number]) for number in drafted), log_probs, strict=True)
    end = reached = 0  # bytes up to the end of the target's token, and of the draft tokens counted so far
    for token in translation.write(drafted)[: max_nodes - 1]:
        log_prob, end = 0.0, end + len(target.bytes[token])
        while reached < end:
            size, step = next(steps)
            reached, log_prob = reached + size, log_prob + step
        node = tree.add(node, token, log_prob)
    return tree
