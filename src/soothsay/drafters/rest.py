"""REST: what followed these words in a store of texts? (He et al. 2023, arXiv 2311.08252.)

No model and no training: a store of what the target has said before, or of texts like those that it will
say. `soothsay datastore build` makes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

from soothsay.drafters.backoff import LEAST
from soothsay.drafters.base import Drafter, Target
from soothsay.drafters.datastore import SORTED_BY, Datastore, check_tokenizer
from soothsay.drafters.head import drafter_places
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError

WEIGHTS = tuple(2.0**length for length in range(9))
"""Of a place where so many tokens match, or more. With these, a guess's probability is about the share of
such guesses that are right, where the store holds what the target has said before."""

DOUBT = 16.0
"""The weight of all that is not in the store. A place that matches four tokens is right half the time."""


class Rest(Drafter):
    """Finds the last tokens in a store, where most of them match, and proposes what came after.

    Continuations merge into a trie, of which the likeliest nodes are proposed. REST takes the longest match
    alone; here shorter ones have a say too, each place weighed by how much of it matches.

    Args:
        target: the model to draft for.
        store: a file that `soothsay datastore build` has made for the target's tokenizer; empty:
            `drafters/rest.store` beside the target's weights or those of the model that it was grown from.
        max_ngram: the longest match that is looked for, in tokens, at most 16.
        min_ngram: nothing is proposed where the longest match is shorter.
        num_tokens: tokens proposed after a match.
        num_matches: places that are looked at, evenly chosen where there are more.
        nodes: guesses in a tree.
    """

    def __init__(
        self,
        target: Target,
        store: str | Path = "",
        max_ngram: int = SORTED_BY,
        min_ngram: int = 1,
        num_tokens: int = 10,
        num_matches: int = 16,
        nodes: int = 15,
    ):
        if not 1 <= min_ngram <= max_ngram <= SORTED_BY or min(num_tokens, num_matches, nodes) < 1:
            raise DrafterError(
                f"rest(max_ngram={max_ngram}, min_ngram={min_ngram}, num_tokens={num_tokens}, "
                f"num_matches={num_matches}, nodes={nodes}): needs 1 <= min_ngram <= max_ngram <= "
                f"{SORTED_BY}, and the others at least 1"
            )
        self.store = open_store(store, target)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.num_tokens, self.num_matches = num_tokens, num_matches
        self.max_nodes = 1 + nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations for each request; the root alone where nothing matches."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(int(request.tokens[-1]))
        depth, size = min(self.num_tokens, request.max_depth), min(self.max_nodes, request.max_nodes)
        if depth < 1 or size < 2:
            return tree
        matches = self.store.find(request.tokens, self.num_matches, self.max_ngram)
        if matches.lengths and matches.lengths[0] >= self.min_ngram:
            said = self.store.continuations(matches, depth)
            grow_likeliest(tree, said, matches.lengths, size)
        return tree


def grow_likeliest(tree: DraftTree, said: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> None:
    """Add the likeliest nodes of the trie of continuations to `tree`, until it has `size` nodes.

    A continuation behind n matching tokens weighs `WEIGHTS[n]`, and that none of them is right weighs
    `DOUBT`; below a node, only those that go through it count.
    """
    weights = [WEIGHTS[min(length, len(WEIGHTS) - 1)] for length in lengths]
    # minus the score, nodes there were, token, parent, log-probability below it, which go through it
    heap: list[tuple[float, int, int, int, float, list[int]]] = []

    def push(node: int, through: Sequence[int]) -> None:
        depth, total = tree.depths[node], DOUBT
        below: dict[int, list[int]] = {}
        for i in through:
            total += weights[i]
            if depth < len(said[i]):
                below.setdefault(said[i][depth], []).append(i)
        for token, own in below.items():
            log_prob = math.log(sum([weights[i] for i in own]) / total)
            score = tree.scores[node] + log_prob
            if score >= math.log(LEAST):
                heappush(heap, (-score, len(tree), token, node, log_prob, own))

    push(0, range(len(said)))
    while heap and len(tree) < size:
        _, _, token, parent, log_prob, own = heappop(heap)
        push(tree.add(parent, token, log_prob), own)


def open_store(store: str | Path, target: Target) -> Datastore:
    """The store that is named, or the one beside the target's weights or those of the model that it was grown
    from.

    Raises `DrafterError` if there is none, if it is damaged, or if it is another tokenizer's.
    """
    paths = [Path(store).expanduser()] if store else [p / "rest.store" for p in drafter_places(target)]
    if not paths:
        raise DrafterError(
            "no store is named for rest, and the target has no directory to look in: write rest(store=...); "
            "'soothsay datastore build MODEL FILES... --out FILE' makes one"
        )
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        model, looked = target.path or "MODEL", " or ".join(map(str, paths))
        raise DrafterError(
            f"there is no datastore at {looked}: build one with 'soothsay datastore build {model} FILES... "
            f"--out {paths[0]}', or name one, rest(store=...)"
        )
    opened = Datastore(path)
    check_tokenizer(opened, target.tokenizer, str(target.path or "the target"))
    if opened.largest >= target.model.config.vocab_size:
        raise DrafterError(
            f"{path} has token {opened.largest}, and the target only tokens below "
            f"{target.model.config.vocab_size}: build a datastore for it"
        )
    return opened
