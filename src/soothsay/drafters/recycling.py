"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): what the target has thought likely behind each token,
in guesses that were right or wrong, it will think likely again.

No model, no training, and no search: a matrix with the likeliest successors of every token, filled from all
logits that verification gives anyway, and walked from the last token on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from soothsay.drafters.base import Drafter, Observation, Target, check_at_least_one
from soothsay.drafters.guesses import largest
from soothsay.drafters.template import KINDS, Acceptance
from soothsay.engine.request import Request
from soothsay.engine.sampling import _key
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Guessing
from soothsay.errors import DrafterError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

READ = math.log(0.3)
"""The log-probability of a token that followed in the text, where the target's own logits are not known."""

LEAST = -1e30
"""Below all log-probabilities but minus infinity."""


class Recycling(Drafter):
    """Walks a matrix of successors, `[V, branch]`, that holds what the target's logits last were behind each
    token.

    Successors are ranked as the target will draw them: above temperature 0 the noise of their position is
    added to their log-probabilities. Until a token has been seen in a tree, the matrix has what followed it
    in the texts that were read. All requests share it.

    Args:
        target: the model to draft for.
        branch: successors that are kept of each token; the paper has 8.
        depth: tokens that are guessed in a row, at most.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer. The paper's
            tree has 80, in 6 levels.
        tree: "best-first" takes the likeliest nodes by the log-probabilities in the matrix; "static" those
            that are best where each rank is right as often as is typical, as the paper does; "measured" the
            same with the rates that were seen.

    Raises `DrafterError` for numbers below 1 and for another kind of tree.
    """

    def __init__(
        self, target: Target, branch: int = 16, depth: int = 6, nodes: int = 80, tree: str = "best-first"
    ):
        check_at_least_one("recycling", branch=branch, depth=depth, nodes=nodes)
        if tree not in KINDS:
            raise DrafterError(f"recycling(tree={tree!r}) is not known; choose {', '.join(KINDS)}")
        self.vocab_size = target.model.config.vocab_size
        self.branch, self.depth, self.nodes, self.tree = min(branch, self.vocab_size), depth, nodes, tree
        self.max_nodes = 1 + nodes
        self.reset()

    def reset(self) -> None:
        """Forget all successors."""
        shape = self.vocab_size, self.branch
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._log_probs = np.full(shape, -np.inf, dtype=np.float16)  # minus infinity: there is no such one
        self._acceptance = Acceptance(typical_rates(self.depth, self.branch))
        self._read: dict[Request, int] = {}  # tokens of each request that were read

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The best nodes that can be reached from each request's last token."""
        rates = None
        if self.tree != "best-first":
            rates = np.log(np.maximum(self._acceptance.rates, 1e-6)).astype(np.float32)
        trees = []
        for request in requests:
            self._read_new(request)
            trees.append(self._grow(request, rates))
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Put the largest logits of every node into the matrix."""
        for seen in observations:
            if self.tree == "measured" and seen.tree is not None and seen.verdict is not None:
                self._measure(seen)
        for seen in observations:
            if seen.tree is not None and seen.logits is not None and seen.verdict is not None:
                right = [0, *seen.verdict.path]
                order = [*({*range(len(seen.tree))} - {*right}), *right]  # of equal tokens the last one stays
                tokens = [seen.tree.tokens[node] for node in order]
                values, successors = largest(seen.logits, self.branch)
                self._tokens[tokens] = successors.numpy(force=True)[order]
                self._log_probs[tokens] = values.log_softmax(-1).numpy(force=True)[order]

    def release(self, request: Request) -> None:
        """Forget a request; what was learnt stays."""
        self._read.pop(request, None)

    def _read_new(self, request: Request) -> None:
        """Note what follows what in the tokens that are new, where nothing better is known."""
        tokens = request.tokens[max(self._read.get(request, 0) - 1, 0) :]
        self._read[request] = len(request.tokens)
        before, behind = tokens[:-1], tokens[1:]
        unknown = self._log_probs[before, 0] == -np.inf
        self._tokens[before[unknown], 0] = behind[unknown]
        self._log_probs[before[unknown], 0] = READ

    def _grow(self, request: Request, rates: FloatArray | None) -> DraftTree:
        """The `nodes` best-scored nodes, level by level; those of equal scores may be more.

        No node scores above its parent, so that what is not among the best so far never will be, nor what is
        below it.
        """
        tree = DraftTree(int(request.tokens[-1]))
        size = min(self.nodes, request.max_nodes - 1)
        levels: list[tuple[IntArray, IntArray, FloatArray]] = []  # of each node: parent, token, score
        tokens, above = request.tokens[-1:], np.zeros(1, dtype=np.float32)
        best, least = np.empty(0, dtype=np.float32), -math.inf
        for level in range(min(self.depth, request.max_depth) if size > 0 else 0):
            successors, log_probs = self._successors(request, tokens, level)
            if rates is not None:
                successors, log_probs = ranked(successors, log_probs)
                log_probs = np.where(log_probs > -np.inf, rates[level], log_probs)
            scores = (log_probs + above[:, None]).ravel()
            best = np.sort(np.concatenate([best, scores]))[-size:]
            least = best[0] if len(best) == size else -math.inf
            kept = np.flatnonzero((scores >= least) & (scores > -np.inf))
            if len(kept) == 0:
                break
            tokens, above = successors.ravel()[kept], scores[kept]
            levels.append((kept // self.branch, tokens, above))
        nodes = [0]
        for parents, tokens, scores in levels:
            nodes_above, nodes = nodes, []
            for parent, token, score in zip(parents.tolist(), tokens.tolist(), scores.tolist(), strict=True):
                if score < least:
                    nodes.append(-1)  # better ones were found below; nothing below it has stayed
                else:
                    place = nodes_above[parent]
                    nodes.append(tree.add(place, token, score - tree.scores[place]))
        return tree

    def _successors(self, request: Request, tokens: IntArray, level: int) -> tuple[IntArray, FloatArray]:
        """What comes behind `tokens` `[m]`, all of them `level` below the root.

        `[m, branch]` tokens and log-probabilities, minus infinity for those that are not there.
        """
        successors = self._tokens[tokens].astype(np.int64)
        log_probs = known = self._log_probs[tokens].astype(np.float32)
        params = request.params
        if params.temperature == 0:
            return successors, log_probs
        log_probs = known / max(params.temperature, 1e-30)
        if params.rule.guessing is Guessing.SHARED_NOISE:
            log_probs += gumbel(_key(request.seed, len(request.tokens) + level), successors)
        log_probs -= np.maximum(log_probs.max(1, keepdims=True), LEAST)
        log_probs -= np.log(np.maximum(np.exp(log_probs).sum(1, keepdims=True), 1))  # 1: none is there
        alone = known[:, -1] == -np.inf  # what was read is no surer for being all that is known
        log_probs[alone] = known[alone]
        return successors, log_probs

    def _measure(self, seen: Observation) -> None:
        """Count which ranks were right, along the accepted path."""
        assert seen.verdict is not None
        said = [int(seen.request.tokens[-1]), *seen.verdict.tokens]
        guesses = []
        for level, token in enumerate(said[: min(self.depth, len(said) - 1)]):
            successors, log_probs = ranked(*self._successors(seen.request, np.array([token]), level))
            pairs = zip(successors[0].tolist(), log_probs[0].tolist(), strict=True)
            guesses.append([pair for pair in pairs if pair[1] > -math.inf])
        self._acceptance.record(guesses, said[1:])


def typical_rates(depth: int, branch: int) -> list[list[float]]:
    """How often successors are right before anything is measured, `[depth][rank]`."""
    return [[0.4 / (rank + 1) ** 1.5 for rank in range(branch)]] * depth


def ranked(tokens: IntArray, log_probs: FloatArray) -> tuple[IntArray, FloatArray]:
    """Both `[m, k]`, the likeliest first."""
    order = np.argsort(-log_probs, axis=1)
    return np.take_along_axis(tokens, order, 1), np.take_along_axis(log_probs, order, 1)


def gumbel(key: tuple[int, int], tokens: npt.NDArray[np.integer]) -> FloatArray:
    """`sampling.gumbel` of a few tokens under one key, without torch's calls, which take longer than the work
    (15 us against 44).
    """
    x = _mix(_mix(tokens.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key[0])) + np.uint32(key[1]))
    noise: FloatArray = -np.log(-np.log1p((x + 0.5) * -(2.0**-32)))
    return noise


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
