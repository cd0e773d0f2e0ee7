"""An n-gram model, learnt while the engine speaks: what came next after the last few tokens?

The oldest language model (Shannon 1948), as a drafter: ANPD (Ou et al. 2024, arXiv 2404.08698) keeps one for
each prompt and answer; this one is of everything that its engine reads or says, and backs off to shorter
contexts with absolute discounting (Ney, Essen and Kneser 1994).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from soothsay.drafters.backoff import WIDEST, Followers, Source, grow
from soothsay.drafters.base import Drafter, Target, check_at_least_one
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError

Tokens = tuple[int, ...]

DOUBT = 2.0
"""Context length at which half of a lone count is believed. From 0.5 to 4 sibyl gets the same tokens a step
to 3 %; with 2, guesses are right as often as they say."""


class Counts(Source[Tokens]):
    """How often each token came after each context of up to `order - 1` tokens.

    Args:
        order: tokens of an n-gram, n.
        memory: contexts that are kept, those met least recently forgotten first.
    """

    __slots__ = ("_followers", "_memory", "_order")

    def __init__(self, order: int, memory: int):
        self._order, self._memory = order, memory
        self._followers: OrderedDict[Tokens, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._followers)

    def read(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Count tokens of a text; `before` are at least `order - 1` tokens before them, or all there are."""
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

    def followers(self, context: Tokens) -> Followers:
        """What came behind a context. The longer it is, the less is doubted."""
        counts = self._followers.get(context)
        if counts is None:
            return Followers((), 0, 0, 1.0)
        doubt = DOUBT / (DOUBT + len(context))
        return Followers(islice(counts.items(), WIDEST), sum(counts.values()), len(counts), doubt)

    def shorter(self, context: Tokens) -> Tokens | None:
        """The context without its first token."""
        return context[1:] if len(context) > 1 else None

    def behind(self, context: Tokens, token: int) -> Tokens:
        """The context one token further."""
        return (*context, token)[-(self._order - 1) :]


class NGram(Drafter):
    """Proposes the likeliest continuations under an n-gram model of all that its requests have said so far.

    Prompts are learnt too, and requests learn from each other while they run. A token takes about 3
    microseconds to learn, and a context takes 450 bytes.

    Args:
        target: the model to draft for.
        order: n: the last n - 1 tokens are looked at.
        nodes: of a tree, the root included, at most.
        memory: contexts that are kept, those met least recently forgotten first.
    """

    def __init__(self, target: Target, order: int = 4, nodes: int = 32, memory: int = 200_000):
        check_at_least_one("ngram", nodes=nodes, memory=memory)
        if order < 2:
            raise DrafterError(f"ngram(order={order}): an n-gram needs at least 2 tokens, one to be guessed")
        self.target, self.max_nodes = target, nodes
        self.order, self.memory = order, memory
        self.reset()

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations of each request; the root alone where nothing is known."""
        for request in requests:
            self._learn(request)
        return [self._propose(request) for request in requests]

    def release(self, request: Request) -> None:
        """Learn what is left of a request that has ended. One that comes again goes on where it was."""
        if request.finish_reason is not None:
            self._learn(request)
            self._learnt.pop(request, None)

    def reset(self) -> None:
        """Forget all that was learnt."""
        self._learnt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # tokens, of each request
        self._counts = Counts(self.order, self.memory)

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(int(request.tokens[-1]))
        context = tuple(request.tokens[1 - self.order :].tolist())
        grow(tree, [(self._counts, context)], min(request.max_nodes, self.max_nodes), request.max_depth)
        return tree

    def _learn(self, request: Request) -> None:
        known, size = self._learnt.get(request, 0), len(request.tokens)
        if known < size:
            first = max(known - self.order + 1, 0)
            text = request.tokens[first:].tolist()
            self._counts.read(text[: known - first], text[known - first :])
            self._learnt[request] = size
