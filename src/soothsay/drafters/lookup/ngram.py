"""An n-gram model that learns from the engine's requests, as a drafter.

The n-gram model is the oldest language model (Shannon 1948). ANPD (Ou et al. 2024, arXiv 2404.08698) keeps
one for each request. This drafter has one for all requests of a tenant. It backs off to shorter contexts with
absolute discounting (Ney, Essen and Kneser 1994).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np

from soothsay.core.request import Request
from soothsay.core.tenant import PerTenant, State, check_kept, read_arrays
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import RememberingDrafter, Target, check_at_least_one
from soothsay.drafters.ops.continuations import WIDEST, Followers, Source, grow_continuations, known_noise
from soothsay.errors import DrafterError

Tokens = tuple[int, ...]

_ARRAYS = {"contexts": ("int32", 2), "sizes": ("int64", 1), "followers": ("int32", 1), "counts": ("int32", 1)}
"""Types and dimensions of the arrays of `Counts.state`."""

DOUBT = 2.0
"""Context length at which half of a lone count is believed. Between 0.5 and 4, sibyl's tokens a step differ
by at most 3 %; with 2, estimated and measured acceptance agree."""


class Counts(Source[Tokens]):
    """Counts of the tokens after each context of up to `order - 1` tokens.

    Args:
        order: n, the number of tokens of an n-gram.
        memory: number of contexts to keep; the least recently seen are dropped.
    """

    __slots__ = ("_followers", "_memory", "_order")

    def __init__(self, order: int, memory: int):
        self._order, self._memory = order, memory
        self._followers: OrderedDict[Tokens, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def read(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Count tokens of a text. `before` are the `order - 1` or more tokens before them, or all of them."""
        followers = self._followers
        text = (*before, *tokens)
        for at in range(len(before), len(text)):
            token = text[at]
            for length in range(1, min(self._order - 1, at) + 1):
                context = text[at - length : at]
                counts = followers.get(context)
                if counts is None:
                    followers[context] = {token: 1}
                else:
                    counts[token] = counts.get(token, 0) + 1
                    followers.move_to_end(context)
            while len(followers) > self._memory:
                followers.popitem(last=False)

    def state(self) -> State:
        """The counts as arrays. A context's first `WIDEST` followers are kept.

        Returns:
            `contexts` `[n, order - 1]` int32, the least recently seen first, filled up with -1; `sizes` `[n]`
            int64, their numbers of followers; `followers` and `counts` `[sum of sizes]` int32.
        """
        contexts = np.full((len(self._followers), self._order - 1), -1, dtype=np.int32)
        sizes, pairs = np.empty(len(contexts), dtype=np.int64), list[tuple[int, int]]()
        for row, (context, counts) in enumerate(self._followers.items()):
            contexts[row, : len(context)] = context
            kept = [*islice(counts.items(), WIDEST)]
            sizes[row] = len(kept)
            pairs += kept
        followers = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        return {"contexts": contexts, "sizes": sizes, "followers": followers[:, 0], "counts": followers[:, 1]}

    @classmethod
    def restored(cls, order: int, memory: int, state: State, vocab_size: int) -> Counts:
        """The inverse of `state`. Raises `DrafterError` if the arrays are impossible."""
        contexts, sizes, followers, counts = read_arrays("ngram", state, **_ARRAYS)
        bounded = not len(sizes) or 1 <= sizes.min() <= sizes.max() <= WIDEST
        whole = bounded and sizes.sum() == len(followers) == len(counts)
        check_kept("ngram", whole and contexts.shape == (len(sizes), order - 1))
        if len(sizes):
            tokens = np.concatenate([contexts[:, 0], followers])
            check_kept("ngram", tokens.min() >= 0 and max(tokens.max(), contexts.max()) < vocab_size)
            check_kept("ngram", contexts.min() >= -1 and counts.min() >= 1)
        made, ends = cls(order, memory), np.cumsum(sizes)
        for row in range(max(len(sizes) - memory, 0), len(sizes)):
            own = slice(int(ends[row] - sizes[row]), int(ends[row]))
            context = tuple(token for token in contexts[row].tolist() if token >= 0)
            made._followers[context] = dict(zip(followers[own].tolist(), counts[own].tolist(), strict=True))
        return made

    def merge(self, other: Counts) -> None:
        """Take over the counts of another model, whose contexts are seen last then.

        Where both have a count, the higher one stays: they may have read the same text.
        """
        for context, counts in other._followers.items():
            own = self._followers.pop(context, {})
            self._followers[context] = own | {t: max(n, own.get(t, 0)) for t, n in counts.items()}
        while len(self._followers) > self._memory:
            self._followers.popitem(last=False)

    def followers(self, context: Tokens) -> Followers:
        """The followers of a context. The doubt falls with its length."""
        counts = self._followers.get(context)
        if counts is None:
            return Followers((), 0, 0, 1.0)
        doubt = DOUBT / (DOUBT + len(context))
        return Followers(islice(counts.items(), WIDEST), sum(counts.values()), len(counts), doubt)

    def shorter(self, context: Tokens) -> Tokens | None:
        """The context without its first token."""
        return context[1:] if len(context) > 1 else None

    def after(self, context: Tokens, token: int) -> Tokens:
        """The context with `token` appended, cut to `order - 1` tokens."""
        return (*context, token)[-(self._order - 1) :]


class NGram(RememberingDrafter[Counts]):
    """Proposes the likeliest continuations under an n-gram model of all requests of a tenant.

    The model learns from prompts and answers while requests run. A token takes about 3 microseconds to learn,
    and a context takes 450 bytes.

    Args:
        target: the model to draft for.
        order: n; contexts have up to n - 1 tokens.
        nodes: maximum size of a tree, the root included.
        memory: number of contexts to keep for each tenant; the least recently seen are dropped.

    Attributes:
        memories: each tenant's n-gram model.
    """

    kind = "ngram"

    def __init__(self, target: Target, order: int = 4, nodes: int = 32, memory: int = 200_000):
        check_at_least_one("ngram", nodes=nodes, memory=memory)
        if order < 2:
            raise DrafterError(f"ngram(order={order}): an n-gram needs at least 2 tokens")
        self.target, self.max_nodes = target, nodes
        self.order, self.memory, self.form = order, memory, order
        self.reset()

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations of each request; only the root if its context is unknown."""
        for request in requests:
            self._learn(request)
        return [self._propose(request) for request in requests]

    def release(self, request: Request) -> None:
        """Learn the last tokens of an ended request. A preempted request continues where it was."""
        if request.finish_reason is not None:
            self._learn(request)
            self._learnt.pop(request, None)

    def reset(self) -> None:
        """Forget all counts."""
        self._learnt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # tokens learnt from each request
        self.memories = PerTenant(lambda: Counts(self.order, self.memory))

    def restored(self, state: State) -> Counts:
        """See `Counts.restored`."""
        return Counts.restored(self.order, self.memory, state, self.target.model.spec.vocab_size)

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(request.last_token)
        context = tuple(request.tokens[1 - self.order :].tolist())
        counts = self.memories[request.tenant]
        nodes = min(request.max_nodes, self.max_nodes)
        grow_continuations(tree, [(counts, context)], nodes, request.max_depth, known_noise(request))
        return tree

    def _learn(self, request: Request) -> None:
        known, size = self._learnt.get(request, 0), request.length
        if known < size:
            first = max(known - self.order + 1, 0)
            text = request.tokens[first:].tolist()
            self.memories[request.tenant].read(text[: known - first], text[known - first :])
            self._learnt[request] = size
