"""A drafter that learns while it serves: it joins another one's drafts with what the target's answers taught.

A trained drafter is weak on topics that it has not seen. Counts of what the target says in answers adapt to
a topic within some tens of answers, as a cache does in language models (Kuhn and De Mori 1990). A table of
rates says how far to believe either source. It is learned from every verified token.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch

from soothsay.core.noise import noise_key
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import EVERYBODY, PerTenant, State, Tenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, LevelwiseDrafter, ReadingDrafter, RememberingDrafter, Target
from soothsay.drafters.learning.experience import (
    ORDER,
    SILENT,
    SILENT_ON_IT,
    Experience,
    Opinion,
    Trust,
    bin_of,
)
from soothsay.drafters.lookup.ngram import Tokens

CONTEXTS = 200_000
"""Contexts of n-grams that are kept for each tenant. One takes 450 bytes of memory and 40 in a file."""

WAITING = 256
"""Answers that wait to be read, at most. If there are more, the oldest are skipped."""

PIECE = 32
"""Tokens that are read before the clock is looked at. They take some 0.3 ms."""

LEAST_PATH = 0.004
"""Minimum probability of a path. A less likely one is right too seldom to pay for its row."""

SAVED_UP = 0.02
"""Seconds of learning that may be saved up. It bounds how long a step is delayed."""


class Allowance:
    """Time for learning: a share of all time that passes.

    Args:
        share: in 0 to 1.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, share: float, clock: Callable[[], float]):
        self.share, self._clock = share, clock
        self._left, self._at = 0.0, clock()

    @property
    def left(self) -> float:
        """Seconds that may be used now. Below 0: more was used than was allowed."""
        now = self._clock()
        self._left = min(self._left + self.share * (now - self._at), SAVED_UP)
        self._at = now
        return self._left

    def spend(self, work: Callable[[], bool]) -> bool:
        """Call `work` until it returns False, or no time is left. Returns whether there is more to do."""
        while self.left > 0:
            begin = self._clock()
            goes_on = work()
            self._left -= self._clock() - begin
            if not goes_on:
                return False
        return True


@dataclass(slots=True)
class JoinedDraft:
    """A draft whose step is not verified yet."""

    request: Request
    tree: DraftTree
    drafters: DraftTree
    """The inner drafter's own tree."""
    experience: Experience
    opinions: dict[int, dict[int, Opinion]] = field(default_factory=dict)
    """For each node that was expanded, what was said of its possible children, by token."""
    heap: list[tuple[float, int, int, int, int, Tokens]] = field(default_factory=list)
    """Nodes that may come next: minus the path's probability, a number that breaks ties, the parent, the
    token, its node in the inner drafter's tree or -1, and the context of the parent."""
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def trust(self) -> Trust:
        """The rates of requests of this kind."""
        return self.experience.trust[self.request.params.temperature > 0]


class Learning(LevelwiseDrafter, ReadingDrafter, RememberingDrafter[Experience]):
    """Joins the drafts of `inner` with n-grams of the target's answers.

    Both give probabilities of the tokens after a node. A table, learned from verified tokens, says how often
    tokens with such a pair of probabilities are right. The tree has the likeliest paths by these rates. It is
    never larger than the inner drafter's largest tree: who chose a small one finds rows dear.

    Learning takes some 10 microseconds a token. It is done between steps and in idle time, within a share of
    one core. Each tenant's answers teach its own drafts only.

    Args:
        target: the model to draft for. `EngineConfig.learn` is the share of time.
        inner: the drafter to improve.
        clock: returns seconds since an arbitrary moment.

    Attributes:
        memories: what each tenant's answers have taught.
    """

    trained, form = True, ORDER

    def __init__(self, target: Target, inner: Drafter, clock: Callable[[], float] = time.perf_counter):
        self.target, self.inner, self.taps = target, inner, inner.taps
        self.kind, self.likely_gain = f"learning-{inner.name}", inner.likely_gain
        self.max_nodes = inner.max_nodes if inner.max_nodes > 1 else target.config.max_tree
        self.allowance = Allowance(target.config.learn, clock)
        self._drafts: dict[Request, JoinedDraft] = {}
        self._waiting: deque[tuple[Tenant, list[int], list[int]]] = deque(maxlen=WAITING)
        self.memories = PerTenant(lambda: Experience(CONTEXTS))

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest paths of both sources for each request."""
        if isinstance(self.inner, LevelwiseDrafter):
            self.inner.min_level_gain = self.min_level_gain
        trees = self.inner.propose(requests)
        return [self._join(request, tree) for request, tree in zip(requests, trees, strict=True)]

    def finish_loading(self) -> None:
        """Wait for the inner drafter."""
        self.inner.finish_loading()

    def unread(self, request: Request) -> int:
        """See `ReadingDrafter`."""
        return self.inner.unread(request) if isinstance(self.inner, ReadingDrafter) else 0

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `ReadingDrafter`."""
        if isinstance(self.inner, ReadingDrafter):
            self.inner.catch_up(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Let the inner drafter learn, and count who was right."""
        self.inner.observe(observations)
        for seen in observations:
            draft = self._drafts.pop(seen.request, None)
            if draft is not None and seen.verdict is not None:
                self._judge(draft, seen.verdict.tokens)
        self.study()

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]:
        """The inner drafter's authors for the nodes that it proposed too, else "learned"."""
        draft = self._drafts.get(request)
        if draft is None:
            return self.inner.authors(request, tree, nodes)
        own = tree.places_in(draft.drafters, nodes)
        names = dict(zip(own, self.inner.authors(request, draft.drafters, [*own.values()]), strict=True))
        return [names.get(node, "learned") for node in nodes]

    def release(self, request: Request) -> None:
        """Forget a request. The answer of one that has ended waits to be read."""
        self.inner.release(request)
        self._drafts.pop(request, None)
        if request.finish_reason is not None and self._learns(request.tenant) and request.num_output:
            first = max(request.num_prompt - ORDER + 1, 0)
            text = request.tokens[first:].tolist()
            begin = request.num_prompt - first
            self._waiting.append((request.tenant, text[:begin], text[begin:]))

    def reset(self) -> None:
        """Forget what answers have taught."""
        self.inner.reset()
        self._drafts.clear()
        self._waiting.clear()
        self.memories = PerTenant(lambda: Experience(CONTEXTS))

    def study(self) -> bool:
        """Read answers that wait, within the share of time. Returns whether more wait."""
        return bool(self._waiting) and self.allowance.spend(self._read_piece)

    def learned(self) -> Sequence[RememberingDrafter[Any]]:
        """What the inner drafter has learned, and what answers have taught."""
        return [*self.inner.learned(), self]

    def restored(self, state: State) -> Experience:
        """See `Experience.restored`."""
        return Experience.restored(CONTEXTS, state, self.target.model.spec.vocab_size)

    def _learns(self, tenant: Tenant) -> bool:
        return tenant == EVERYBODY or self.target.config.learn_for_tenants

    def _read_piece(self) -> bool:
        """Read a piece of the oldest answer that waits. Returns whether more wait."""
        tenant, before, tokens = self._waiting.popleft()
        piece, rest = tokens[:PIECE], tokens[PIECE:]
        self.memories[tenant].counts.read(before, piece)
        if rest:
            self._waiting.appendleft((tenant, [*before, *piece][-(ORDER - 1) :], rest))
        return bool(self._waiting)

    def _join(self, request: Request, own: DraftTree) -> DraftTree:
        """The tree of the likeliest paths. A draft with drawn tokens stays as it is."""
        size = min(request.max_nodes, self.max_nodes)
        guessing = request.params.rule.guessing
        if size <= 1 or not self._learns(request.tenant) or own.draws or guessing.draws:
            return own
        draft = JoinedDraft(request, DraftTree(own.tokens[0]), own, self.memories[request.tenant])
        tree = draft.tree
        self._expand(draft, -1.0, 0, 0, tuple(request.tokens[1 - ORDER :].tolist()))
        while draft.heap and len(tree) < size:
            minus, _, parent, token, own_node, above = heappop(draft.heap)
            node = tree.add(parent, token, math.log(-minus) - tree.scores[parent])
            if tree.depths[node] < request.max_depth and token not in request.end_tokens:
                self._expand(draft, minus, node, own_node, (*above, token)[-(ORDER - 1) :])
        self._drafts[request] = draft
        return tree

    def _expand(self, draft: JoinedDraft, minus: float, node: int, own_node: int, context: Tokens) -> None:
        """Put the possible children of a node into the draft's heap, and what is said of them.

        Args:
            draft: is changed.
            minus: the node's probability, negated.
            node: of the draft's tree.
            own_node: the same in the inner drafter's tree, or -1.
            context: of the node.
        """
        own, rate = draft.drafters, draft.trust.rate
        children = own.children[own_node] if own_node >= 0 else {}
        known = draft.experience.continuations(context)
        if known and draft.request.params.temperature > 0:
            known = self._given_noise(known, draft.request, draft.tree.depths[node])
        silent_drafter = SILENT_ON_IT if children else SILENT
        silent_ngrams = SILENT_ON_IT if known else SILENT
        opinions: dict[int, Opinion] = {}
        for token in {**children, **known}:
            child = children.get(token, -1)
            by_drafter = silent_drafter
            if child >= 0:
                by_drafter = bin_of(math.exp(own.scores[child] - own.scores[own_node]))
            by_ngrams = bin_of(known[token]) if token in known else silent_ngrams
            opinion = opinions[token] = Opinion(by_drafter, by_ngrams)
            path = minus * rate(opinion)
            if path < -LEAST_PATH:
                heappush(draft.heap, (path, next(draft.numbers), node, token, child, context))
        draft.opinions[node] = opinions

    def _given_noise(self, known: dict[int, float], request: Request, depth: int) -> dict[int, float]:
        """Turn probabilities of tokens at a depth into those given the noise that the target will draw with.

        The tokens that are not known are taken as one.
        """
        key = torch.tensor([noise_key(request.seed, request.length + depth)])
        drawn = self.target.ops.sampling.gumbel(key, torch.tensor([[*known]]))[0].tolist()
        weights = {token: p * math.exp(g) for (token, p), g in zip(known.items(), drawn, strict=True)}
        total = sum(weights.values()) + max(1.0 - sum(known.values()), 0.0)
        return {token: weight / total for token, weight in weights.items()}

    def _judge(self, draft: JoinedDraft, tokens: Sequence[int]) -> None:
        """Count whose tokens were right along the path that the target went."""
        trust = draft.trust
        node: int | None = 0
        for token in tokens:
            if node is None or node not in draft.opinions:
                return
            for other, opinion in draft.opinions[node].items():
                trust.record(opinion, other == token)
            node = draft.tree.children[node].get(token)


def can_learn(drafter: Drafter) -> bool:
    """Whether a drafter, or a part of it, is a `Learning`."""
    return any(isinstance(learned, Learning) for learned in drafter.learned())
