"""Which guesses hold: from a tree and what the target says at its nodes to the tokens that are emitted.

`match` is the default: the target's draws are keyed by position, a guess holds if it is what was drawn, and
tokens depend on nothing that a drafter does. The others decide by chance, and most of them keep the target's
law: whatever was drafted, tokens come as often as the target says. Here p is the target's distribution at a
node and q what a child of that node was drawn from. A guess without a q is a point mass, which is lawful
wherever the guess comes from, for the law holds for each tree that could have been.

What the target says at a node costs time: noise, masks and sums over the whole vocabulary. So a verifier is
shown only the nodes that it asks for, which for most of them are those of the path that they accept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Protocol

import numpy as np

from soothsay.engine.tree import DraftTree, FloatArray

if TYPE_CHECKING:
    from torch import Tensor

TYPICAL_FLOOR, TYPICAL_SHARE = 0.3, 0.09
"""Medusa's posterior threshold and alpha: a guess is typical if its p is above the smaller of the first, and
the second times exp(-entropy of p)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and what it says."""

    path: list[int]  # accepted nodes below the root, in order
    tokens: list[int]  # their tokens, and the bonus token: what the target says after the last of them


class Chance(Protocol):
    """Where decisions come from."""

    def happens(self, probability: float) -> bool:
        """True with this probability; always at 1, never at 0."""

    def pick(self, weights: FloatArray) -> int:
        """An index with probability in proportion to its weight, `[V]`, none below 0 and some above."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the target says at the nodes that were asked for, in that order."""

    draws: Sequence[int]  # [n] the best-scored token of each
    scores: Tensor  # [n, V] float32 of `perturb`

    def p(self, index: int = 0) -> FloatArray:
        """`[V]`: the softmax of a node's scores, which is the target's law where they have no noise."""
        return self.scores[index].double().softmax(-1).cpu().numpy()


Walk = Generator[Sequence[int], Evidence, Verdict]
"""A verification under way: yields the nodes it wants to know of, is sent the evidence, returns the verdict.
"""


class Guessing(Enum):
    """How a drafter with a distribution q of its own guesses what comes after a node."""

    SHARED_NOISE = auto()  # the best of log q plus the noise that the target will draw with
    LIKELIEST = auto()
    ONE_DRAW = auto()
    WITH_REPLACEMENT = auto()  # several draws, independent of each other
    WITHOUT_REPLACEMENT = auto()  # several draws, each from what the ones before it leave of q

    @property
    def draws(self) -> bool:
        """Whether guesses are drawn from q, so that the tree must say so."""
        return self not in (Guessing.SHARED_NOISE, Guessing.LIKELIEST)


class Promise(StrEnum):
    """What does not depend on the drafter, at a temperature above 0."""

    TOKENS = "tokens"  # each token
    LAW = "law"  # how often each sequence of tokens comes
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Verifier:
    """A way to verify, and what goes with it."""

    verify: Callable[[DraftTree, Chance], Walk]
    guessing: Guessing
    promise: Promise

    @property
    def lossless(self) -> bool:
        """Whether tokens follow the target's law."""
        return self.promise is not Promise.NOTHING


def match(tree: DraftTree, chance: Chance) -> Walk:
    """Follow the draws down from the root for as long as the tree has guessed them; chance decides nothing.

    A draw is what the target emits after a node. The result is what plain decoding would say, token by token;
    for a drafter without noise of its own this accepts with exactly the law of recursive rejection sampling.
    """
    path: list[int] = []
    node = 0
    while True:
        draw = (yield (node,)).draws[0]
        child = tree.children[node].get(draw)
        if child is None:
            return Verdict(path, [tree.tokens[n] for n in path] + [draw])
        path.append(child)
        node = child


def from_root(tree: DraftTree, chance: Chance) -> Walk:
    """Recursive rejection: a node's children are tried in turn, and one that is accepted is gone on from.

    A child with token x is accepted with probability min(1, p(x) / q(x)); if it is not, p becomes
    max(p - q, 0), made to sum to 1, for the next one, and in the end for the bonus token. With one child a
    node this is speculative sampling (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318); with independent draws, or none, SpecInfer's multi-round form (Miao et al. 2023, arXiv
    2305.09781); without replacement, recursive speculative decoding's (Jeon et al. 2024, arXiv 2402.14160).
    """
    path: list[int] = []
    p, tried = (yield (0,)).p(), _guesses(tree, 0)
    while (guess := next(tried, None)) is not None:
        if chance.happens(guess.ratio(p[guess.token])):
            path.append(guess.node)
            p, tried = (yield (guess.node,)).p(), _guesses(tree, guess.node)
        else:
            p = _normalized(guess.rest(p), p)
    return Verdict(path, [tree.tokens[n] for n in path] + [chance.pick(p)])


def from_leaves(tree: DraftTree, chance: Chance) -> Walk:
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398), on a chain block verification (Sun et al.
    2024, arXiv 2403.10444).

    A node is accepted with its whole path at once, and after all that is below it has been refused. The
    weight of a node is the probability with which it, or something below it, is to be accepted: 1 for the
    root, min(1, weight * p(x) / q(x)) for a child with token x. If nothing of that child is accepted,
    weight * p becomes max(weight * p - q, 0), whose sum S gives the weight S / (S + 1 - weight).
    """
    seen = yield range(len(tree))  # few of them will be left out
    levels = [_Level(tree, seen, 0, 1.0)]
    while True:
        level = levels[-1]
        guess = next(level.tried, None)
        if guess is not None:
            level.open = guess
            weight = guess.ratio(level.weight * level.p[guess.token])
            if weight > 0:
                levels.append(_Level(tree, seen, guess.node, weight))
            else:
                level.refuse()
        elif len(levels) == 1 or chance.happens(level.weight):
            path = [each.node for each in levels[1:]]
            return Verdict(path, [tree.tokens[n] for n in path] + [chance.pick(level.p)])
        else:
            levels.pop()
            levels[-1].refuse()


def typical(tree: DraftTree, chance: Chance) -> Walk:
    """Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774): the deepest path whose every token is
    likely enough where it stands, and of several the likeliest. Does not keep the target's law.
    """
    seen = yield range(len(tree))
    found = {0: (0, 0.0)}  # accepted nodes: their depth, log p of their path
    for node in range(len(tree)):
        if node not in found or not tree.children[node]:
            continue
        p, (depth, log_p) = seen.p(node), found[node]
        entropy = -float((p * np.log(np.maximum(p, 1e-300))).sum())
        floor = min(TYPICAL_FLOOR, TYPICAL_SHARE * math.exp(-entropy))
        for token, child in tree.children[node].items():
            if p[token] > floor:
                found[child] = (depth + 1, log_p + math.log(p[token]))
    last = max(found, key=lambda node: found[node])
    path = tree.path(last)[1:]
    return Verdict(path, [tree.tokens[n] for n in path] + [chance.pick(seen.p(last))])


@dataclass(frozen=True, slots=True)
class _Guess:
    """A child, and what it was drawn from."""

    node: int
    token: int
    q: FloatArray | None  # [V], given the guesses before it; None: a point mass

    def ratio(self, p: float) -> float:
        """min(1, p / q), with `p` that of the token; 0 where both are."""
        q = 1.0 if self.q is None else float(self.q[self.token])
        return float(p / q) if p < q else float(p > 0)

    def rest(self, p: FloatArray) -> FloatArray:
        """max(p - q, 0), `[V]`."""
        if self.q is not None:
            return np.maximum(p - self.q, 0.0)
        rest = p.copy()
        rest[self.token] = 0.0
        return rest


class _Level:
    """A node whose children are being tried: its weight, and what is left of p."""

    def __init__(self, tree: DraftTree, seen: Evidence, node: int, weight: float):
        self.node, self.weight, self.p = node, weight, seen.p(node)
        self.tried = _guesses(tree, node)
        self.open: _Guess | None = None

    def refuse(self) -> None:
        """Nothing of the child that is open was accepted."""
        assert self.open is not None
        rest = self.open.rest(self.weight * self.p)
        left = float(rest.sum())
        self.p = _normalized(rest, self.p)
        self.weight = left / (left + 1 - self.weight) if self.weight < 1 else 1.0


def _guesses(tree: DraftTree, node: int) -> Iterator[_Guess]:
    """A node's guesses in the order in which they are to be tried: those that were drawn, then the others."""
    children, drawn = tree.children[node], tree.draws.get(node)
    for token, q in drawn.rounds() if drawn else ():
        yield _Guess(children[token], token, q)
    for token, child in children.items():
        if drawn is None or token not in drawn.tokens:
            yield _Guess(child, token, None)


def _normalized(rest: FloatArray, before: FloatArray) -> FloatArray:
    """`rest` made to sum to 1; `before` if rounding has left nothing of it."""
    total = float(rest.sum())
    return rest / total if total > 0 else before


VERIFIERS: dict[str, Verifier] = {
    "match": Verifier(match, Guessing.SHARED_NOISE, Promise.TOKENS),
    "rejection": Verifier(from_root, Guessing.ONE_DRAW, Promise.LAW),
    "specinfer": Verifier(from_root, Guessing.WITH_REPLACEMENT, Promise.LAW),
    "rsd": Verifier(from_root, Guessing.WITHOUT_REPLACEMENT, Promise.LAW),
    "block": Verifier(from_leaves, Guessing.ONE_DRAW, Promise.LAW),
    "traversal": Verifier(from_leaves, Guessing.WITHOUT_REPLACEMENT, Promise.LAW),
    "typical": Verifier(typical, Guessing.LIKELIEST, Promise.NOTHING),
}
"""By the names that `SamplingParams.verifier` takes. Two algorithms make five of them: what sets the others
apart is how many children of a node are drawn, and how."""
