"""Verifiers: from a draft tree and the target's logits to the accepted path and the emitted tokens.

`match` is the default. The target's draws are keyed by position, and a draft token is accepted if it equals
the draw, so the emitted tokens do not depend on the drafter. The other verifiers decide at random. Most of
them keep the target's distribution over sequences, whatever the drafter proposes.

p is the target's distribution at a node, and q the distribution that a child was drawn from. A draft token
without a q counts as a point mass. That keeps the distribution for any source of draft tokens, because it
holds for each fixed tree.

What the target says at a node costs time: noise, masks and sums over the whole vocabulary. So a verifier
asks for the nodes that it needs. Most verifiers need only the accepted path.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from soothsay.core.arrays import FloatArray
from soothsay.core.tree import DraftTree
from soothsay.errors import ModelError, VerifierError, type_of
from soothsay.own_files import named_in_file

if TYPE_CHECKING:
    from torch import Tensor

TYPICAL_FLOOR, TYPICAL_SHARE = 0.3, 0.09
"""Medusa's posterior threshold and alpha. A token is typical if its p is above
min(TYPICAL_FLOOR, TYPICAL_SHARE * exp(-entropy of p))."""

MOST_ROUNDS = 4
"""Rounds of a verifier for each node of a tree, at most. One that goes on for ever would stop the engine."""


class Verdict(NamedTuple):
    """The accepted path and its tokens.

    Example:
        >>> Verdict(path=[1], tokens=[7, 9])  # node 1 has the token 7, and the target adds 9
        Verdict(path=[1], tokens=[7, 9])
    """

    path: list[int]  # accepted nodes below the root, in order
    tokens: list[int]  # their tokens, then the bonus token, which the target adds after the last of them


class Chance(Protocol):
    """A source of random decisions."""

    def happens(self, probability: float) -> bool:
        """True with this probability; always at 1, never at 0."""

    def pick(self, weights: FloatArray) -> int:
        """An index with probability in proportion to its weight, `[V]`: none below 0, at least one above."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the target says at the nodes that a verifier asked for, in that order."""

    draws: Sequence[int]  # the token of each; for verifiers that share noise
    scores: Sequence[Tensor]  # `[V]` float32 of `perturb` each, on the host; for the other verifiers

    def p(self, index: int = 0) -> FloatArray:
        """`[V]`: the softmax of a node's scores, which is p if they are without noise.

        Raises `ModelError` if it is not a distribution.
        """
        p: FloatArray = self.scores[index].double().softmax(-1).numpy()
        if math.isnan(p[0]):  # then all of it is
            raise not_finite()
        return p


def not_finite() -> ModelError:
    """The error for logits that say nothing."""
    return ModelError("the model's logits are not finite numbers; its weights may be damaged")


Walk = Generator[Sequence[int], Evidence, Verdict]
"""A running verification: yields nodes, is sent their evidence, and returns the verdict."""


class Guessing(Enum):
    """How a drafter with a distribution q chooses the children of a node.

    Example:
        >>> Guessing.LIKELIEST.draws, Guessing.ONE_DRAW.draws
        (False, True)
    """

    SHARED_NOISE = auto()  # the best of log q plus the noise of the target's draw
    LIKELIEST = auto()  # the best of log q
    ONE_DRAW = auto()  # one draw from q
    WITH_REPLACEMENT = auto()  # several independent draws from q
    WITHOUT_REPLACEMENT = auto()  # several draws, each from q without the tokens before it

    @property
    def draws(self) -> bool:
        """Whether children are drawn from q, which the tree must then record."""
        return self not in (Guessing.SHARED_NOISE, Guessing.LIKELIEST)


class Promise(StrEnum):
    """What does not depend on the drafter at a temperature above 0.

    Example:
        >>> VERIFIERS["match"].promise
        <Promise.TOKENS: 'tokens'>
    """

    TOKENS = "tokens"  # the tokens
    LAW = "law"  # the distribution over sequences of tokens
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verification algorithm, the drafting that it needs, and its guarantee.

    An entry in `VERIFIERS` gives it a name. Nothing checks its promise: a test must enumerate its law.

    Args:
        verify: a generator function of a tree and a source of random decisions: see `Walk`.
        guessing: how drafters choose the children of a node.
        promise: what does not depend on the drafter.

    Raises:
        VerifierError: `verify` is no such function.

    Example:
        >>> def sampling(tree, chance):
        ...     path, node = [], 0
        ...     while node is not None:
        ...         evidence = yield [node]
        ...         token = chance.pick(evidence.p())
        ...         node = tree.children[node].get(token)
        ...         path += [] if node is None else [node]
        ...     return Verdict(path, [tree.tokens[n] for n in path] + [token])
        >>> own = Verifier(sampling, promise=Promise.LAW)  # VERIFIERS["sampling"] = own names it
        >>> own.promise
        <Promise.LAW: 'law'>
    """

    verify: Callable[[DraftTree, Chance], Walk]
    guessing: Guessing = Guessing.LIKELIEST
    promise: Promise = Promise.NOTHING

    def __post_init__(self) -> None:
        if not callable(self.verify):
            raise VerifierError(f"a verifier is a function of a tree and a chance, not {self.verify!r:.60}")
        if inspect.isfunction(self.verify) and not inspect.isgeneratorfunction(self.verify):
            raise self._wrong("is no generator: it must yield nodes, and return a Verdict")
        try:
            inspect.signature(self.verify).bind(None, None)
        except TypeError:
            takes = inspect.signature(self.verify)
            raise self._wrong(f"takes {takes}; it is called with a tree and a chance") from None

    def walk(self, tree: DraftTree, chance: Chance, vocab_size: int) -> Walk:
        """Run the algorithm. Raises `VerifierError` if it wants or gives what there cannot be."""
        steps = self.verify(tree, chance)
        if not isinstance(steps, Generator):
            raise self._wrong(f"gave {type_of(steps)}; it must yield nodes, and return a Verdict")
        wanted = next(steps, None)
        try:
            for _ in range(MOST_ROUNDS * len(tree)):
                if not isinstance(wanted, Sequence) or not wanted or {*wanted} - {*range(len(tree))}:
                    nodes = f"a list of nodes, 0 to {len(tree) - 1}"
                    raise self._wrong(f"yielded {wanted!r:.60}; it must yield {nodes}")
                wanted = steps.send((yield wanted))
        except StopIteration as ended:
            return self._checked(tree, ended.value, vocab_size)
        raise self._wrong(f"has no verdict after {MOST_ROUNDS * len(tree)} rounds; it must return a Verdict")

    def _checked(self, tree: DraftTree, verdict: object, vocab_size: int) -> Verdict:
        """The verdict, if it is a path of the tree with its tokens and one more."""
        if not isinstance(verdict, Verdict):
            raise self._wrong(f"returned {type_of(verdict)}; it must return a Verdict")
        path, tokens = verdict
        if {*path} - {*range(1, len(tree))} or [tree.parents[node] for node in path] != [0, *path][:-1]:
            raise self._wrong(f"returned the path {path!r:.60}; each node must be a child of the one before")
        if not tokens or [*tokens[:-1]] != [tree.tokens[node] for node in path]:
            raise self._wrong(f"returned the tokens {tokens!r:.60}; they are those of its path and one more")
        if not isinstance(tokens[-1], Integral) or not 0 <= tokens[-1] < vocab_size:
            has = f"this model has tokens 0 to {vocab_size - 1}"
            raise self._wrong(f"returned the token {tokens[-1]!r:.60}; {has}")
        return Verdict([*path], [*tokens[:-1], int(tokens[-1])])

    def _wrong(self, what: str) -> VerifierError:
        return VerifierError(f"verifier {getattr(self.verify, '__name__', self.verify)!r} {what}")

    @property
    def lossless(self) -> bool:
        """Whether tokens follow the target's distribution."""
        return self.promise is not Promise.NOTHING


def match(tree: DraftTree, chance: Chance) -> Walk:
    """Follow the target's draws from the root down while the tree has them. Nothing is random.

    A draw is the token that the target emits after a node, so the tokens are those of plain decoding. For a
    drafter without noise, the acceptance probability is that of recursive rejection sampling.
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
    """Recursive rejection sampling: try a node's children in turn, and continue at the first accepted one.

    A child with token x is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes
    max(p - q, 0), normalized, for the next child. After the last child, the bonus token is drawn from p.

    With one child a node this is speculative sampling (Leviathan et al. 2022, arXiv 2211.17192; Chen et al.
    2023, arXiv 2302.01318). With independent draws, or none, it is SpecInfer's multi-round form (Miao et al.
    2023, arXiv 2305.09781). Without replacement it is recursive speculative decoding's (Jeon et al. 2024,
    arXiv 2402.14160).
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
    """Traversal verification (Weng et al. 2025, arXiv 2505.12398); on a chain, block verification (Sun et al.
    2024, arXiv 2403.10444).

    A node is accepted together with its whole path, after everything below it was rejected. The weight of a
    node is the probability that it, or a node below it, is accepted. The root has weight 1, and a child with
    token x has min(1, weight * p(x) / q(x)). If the child is rejected with everything below it, weight * p
    becomes max(weight * p - q, 0). The sum S of that gives the new weight S / (S + 1 - weight).
    """
    seen = yield range(len(tree))  # most of them are needed
    levels = [_Level(tree, seen, 0, 1.0)]
    while True:
        level = levels[-1]
        guess = next(level.guesses, None)
        if guess is not None:
            level.current = guess
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
    """Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774).

    Accepts the deepest path whose tokens are all typical, and the likeliest of several. It does not keep the
    target's distribution.
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
    """A child, and the distribution that it was drawn from."""

    node: int
    token: int
    q: FloatArray | None  # [V], given the draws before it; None: a point mass

    def ratio(self, p: float) -> float:
        """min(1, p / q) for the token's `p`; 0 if both are 0."""
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
    """A node whose children are tried: its weight, and the rest of p."""

    def __init__(self, tree: DraftTree, seen: Evidence, node: int, weight: float):
        self.node, self.weight, self.p = node, weight, seen.p(node)
        self.guesses = _guesses(tree, node)
        self.current: _Guess | None = None

    def refuse(self) -> None:
        """Reject the open child with everything below it."""
        assert self.current is not None
        rest = self.current.rest(self.weight * self.p)
        left = float(rest.sum())
        self.p = _normalized(rest, self.p)
        self.weight = left / (left + 1 - self.weight) if self.weight < 1 else 1.0


def _guesses(tree: DraftTree, node: int) -> Iterator[_Guess]:
    """A node's children in the order in which they are tried: first the drawn ones, then the others."""
    children, drawn = tree.children[node], tree.draws.get(node)
    for token, q in drawn.rounds() if drawn else ():
        yield _Guess(children[token], token, q)
    for token, child in children.items():
        if drawn is None or token not in drawn.tokens:
            yield _Guess(child, token, None)


def _normalized(rest: FloatArray, before: FloatArray) -> FloatArray:
    """`rest` normalized; `before` if rounding left `rest` all 0."""
    total = float(rest.sum())
    return rest / total if total > 0 else before


def named_verifier(name: str) -> Verifier:
    """The verifier of this name. `FILE.py:NAME` becomes an entry of `VERIFIERS`, so that requests find it.

    What it names is a `Verifier`, or a function, which promises nothing. The file is run, so no request to a
    server may come here.

    Raises `VerifierError` if the name is unknown, or the file cannot be used.
    """
    if ":" in name and name not in VERIFIERS:
        module, found = named_in_file(name, "verifier", VerifierError)
        if not isinstance(found, Verifier) and not inspect.isfunction(found):
            file, _, wanted = name.rpartition(":")
            there = ", ".join(key for key, one in vars(module).items() if isinstance(one, Verifier))
            raise VerifierError(
                f"{file} has no function or Verifier {wanted!r}; its verifiers are: {there or 'none'}"
            )
        VERIFIERS[name] = found if isinstance(found, Verifier) else Verifier(found)
    if name not in VERIFIERS:
        raise VerifierError(
            f"verifier {name!r} is unknown; choose from {', '.join(VERIFIERS)}, or FILE.py:NAME"
        )
    return VERIFIERS[name]


VERIFIERS: dict[str, Verifier] = {
    "match": Verifier(match, Guessing.SHARED_NOISE, Promise.TOKENS),
    "rejection": Verifier(from_root, Guessing.ONE_DRAW, Promise.LAW),
    "specinfer": Verifier(from_root, Guessing.WITH_REPLACEMENT, Promise.LAW),
    "rsd": Verifier(from_root, Guessing.WITHOUT_REPLACEMENT, Promise.LAW),
    "block": Verifier(from_leaves, Guessing.ONE_DRAW, Promise.LAW),
    "traversal": Verifier(from_leaves, Guessing.WITHOUT_REPLACEMENT, Promise.LAW),
    "typical": Verifier(typical, Guessing.LIKELIEST, Promise.NOTHING),
}
"""Verifiers by the names that `SamplingParams.verifier` takes. Five of them share two algorithms, and differ
in how many children of a node are drawn, and how.

Example:
    >>> VERIFIERS["rejection"].promise
    <Promise.LAW: 'law'>
"""
