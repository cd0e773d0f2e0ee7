"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): draft from the target's own earlier logits.

A matrix has the likeliest successors of every token. It is filled from all logits of verification, of
accepted and rejected nodes. Drafting walks it from the last token on, without a model, training or search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.noise import noise_key
from soothsay.core.params import MIN_TEMPERATURE
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import PerTenant, State, Tenant, check_kept, read_arrays
from soothsay.core.transfer import download
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing
from soothsay.drafters.base import RememberingDrafter, Target, check_at_least_one
from soothsay.drafters.trees.templates import TREE_KINDS, RankAcceptance
from soothsay.errors import DrafterError

FloatArray = npt.NDArray[np.float32]

READ = math.log(0.3)
"""Log-probability of a successor that was read in a text, while the target's logits are unknown."""

LEAST = -1e30
"""A number below all log-probabilities except minus infinity."""


class Successors:
    """The likeliest successors of every token.

    Args:
        vocab_size: V.
        branch: number of successors of each token.
        depth: number of levels whose acceptance is counted.
    """

    __slots__ = ("acceptance", "log_probs", "tokens")

    def __init__(self, vocab_size: int, branch: int, depth: int):
        shape = vocab_size, branch
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.log_probs = np.full(shape, -np.inf, dtype=np.float16)  # minus infinity: no successor
        self.acceptance = RankAcceptance([[0.4 / (rank + 1) ** 1.5 for rank in range(branch)]] * depth)

    def read(self, text: IntArray) -> None:
        """Store the successors of a text's tokens whose rows are empty."""
        before, after = text[:-1], text[1:]
        unknown = self.log_probs[before, 0] == -np.inf
        self.tokens[before[unknown], 0] = after[unknown]
        self.log_probs[before[unknown], 0] = READ

    def state(self) -> State:
        """`tokens` int32 and `log_probs` float16, `[V, branch]` each. Measured acceptance is not kept."""
        return {"tokens": self.tokens, "log_probs": self.log_probs}

    def merge(self, other: Successors) -> None:
        """Take over the rows that another matrix has."""
        known = other.log_probs[:, 0] > -np.inf
        self.tokens[known], self.log_probs[known] = other.tokens[known], other.log_probs[known]


class Recycling(RememberingDrafter[Successors]):
    """Walks a matrix `[V, branch]` of each token's successors by the target's last logits after that token.

    Above temperature 0, the noise of the position is added to log-probabilities, as in the target's draw.
    Before a token was in a tree, its row has the token that followed it in a text. The requests of a tenant
    share a matrix.

    Args:
        target: the model to draft for.
        branch: number of successors of each token; the paper has 8.
        depth: maximum depth of a tree.
        nodes: maximum size of a tree without the root; `EngineConfig.max_tree` may allow fewer. The paper's
            tree has 80, in 6 levels.
        tree: "best-first" chooses nodes by the log-probabilities in the matrix. "static" chooses them by
            typical acceptance rates of ranks, as the paper does. "measured" uses measured rates.

    Attributes:
        memories: each tenant's matrix.

    Raises `DrafterError` for numbers below 1 and for an unknown kind of tree.
    """

    kind = "recycling"

    def __init__(
        self, target: Target, branch: int = 16, depth: int = 6, nodes: int = 80, tree: str = "best-first"
    ):
        check_at_least_one("recycling", branch=branch, depth=depth, nodes=nodes)
        if tree not in TREE_KINDS:
            raise DrafterError(f"recycling(tree={tree!r}) is not known; choose {', '.join(TREE_KINDS)}")
        self.target, self.ops = target, target.model.kernels.sampling
        self.vocab_size = target.model.spec.vocab_size
        self.branch, self.depth, self.nodes, self.tree = min(branch, self.vocab_size), depth, nodes, tree
        self.max_nodes, self.form = 1 + nodes, self.branch
        self.reset()

    def reset(self) -> None:
        """Forget all successors."""
        self.memories = PerTenant(lambda: Successors(self.vocab_size, self.branch, self.depth))
        self._read: dict[Request, int] = {}  # number of tokens read from each request

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The best nodes below each request's last token."""
        rates: dict[Tenant, FloatArray] = {}
        if self.tree != "best-first":
            for tenant in {request.tenant for request in requests}:
                measured = np.maximum(self.memories[tenant].acceptance.rates, 1e-6)
                rates[tenant] = np.log(measured).astype(np.float32)
        trees = []
        for request in requests:
            self._read_new(request)
            trees.append(self._grow(request, rates.get(request.tenant)))
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Store the largest logits of every node in the matrix."""
        for seen in observations:
            if self.tree == "measured" and seen.tree is not None and seen.verdict is not None:
                self._measure(seen)
        found = list[Tensor]()
        for seen in observations:
            if seen.logits is not None:
                values, successors = self.ops.largest(seen.logits, self.branch)
                found += (values.log_softmax(-1), successors)
        there = iter(download(*found))
        for seen in observations:
            if seen.logits is None:
                continue
            log_probs, tokens = next(there), next(there)
            if seen.tree is not None and seen.verdict is not None:
                right = [0, *seen.verdict.path]
                # the last of equal tokens is kept: an accepted one
                order = [*({*range(len(seen.tree))} - {*right}), *right]
                rows = [seen.tree.tokens[node] for node in order]
                known = self.memories[seen.request.tenant]
                known.tokens[rows], known.log_probs[rows] = tokens[order], log_probs[order]

    def release(self, request: Request) -> None:
        """Forget a request, and keep what was learnt from it."""
        self._read.pop(request, None)

    def restored(self, state: State) -> Successors:
        """The inverse of `Successors.state`."""
        fresh = Successors(self.vocab_size, self.branch, self.depth)
        tokens, log_probs = read_arrays("recycling", state, tokens=("int32", 2), log_probs=("float16", 2))
        check_kept("recycling", tokens.shape == log_probs.shape == fresh.tokens.shape)
        check_kept("recycling", 0 <= tokens.min() <= tokens.max() < self.vocab_size)
        check_kept("recycling", bool((log_probs <= 0).all()))  # false for NaN too
        fresh.tokens, fresh.log_probs = tokens, log_probs
        return fresh

    def _read_new(self, request: Request) -> None:
        """Store successors of new tokens whose rows are empty."""
        tokens = request.tokens[max(self._read.get(request, 0) - 1, 0) :]
        self._read[request] = request.length
        self.memories[request.tenant].read(tokens)

    def _grow(self, request: Request, rates: FloatArray | None) -> DraftTree:
        """The tree of the `nodes` best nodes by score, level by level; more if scores are equal.

        A node never scores above its parent. So a node outside the best so far, and everything below it, will
        never be among the best.
        """
        tree = DraftTree(request.last_token)
        size = min(self.nodes, request.max_nodes - 1)
        # of the nodes of each level: parent, token, score
        levels: list[tuple[IntArray, IntArray, FloatArray]] = []
        tokens, above = request.tokens[-1:], np.zeros(1, dtype=np.float32)
        best, least = np.empty(0, dtype=np.float32), -math.inf
        for level in range(min(self.depth, request.max_depth) if size > 0 else 0):
            successors, log_probs = self._ranks(request, tokens, level)
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
                    nodes.append(-1)  # deeper nodes are better; nothing below it was kept
                else:
                    place = nodes_above[parent]
                    nodes.append(tree.add(place, token, score - tree.scores[place]))
        return tree

    def _ranks(self, request: Request, tokens: IntArray, level: int) -> tuple[IntArray, FloatArray]:
        """Successors of `tokens` `[m]`, which are all `level` below the root.

        Returns `[m, branch]` tokens and log-probabilities, minus infinity without a successor.
        """
        own = self.memories[request.tenant]
        successors = own.tokens[tokens].astype(np.int64)
        log_probs = known = own.log_probs[tokens].astype(np.float32)
        params = request.params
        if params.temperature == 0:
            return successors, log_probs
        log_probs = known / max(params.temperature, MIN_TEMPERATURE)
        if params.rule.guessing is Guessing.SHARED_NOISE:
            key = torch.tensor([noise_key(request.seed, request.length + level)])
            noise = self.target.ops.sampling.gumbel(key, torch.from_numpy(successors).view(1, -1))
            log_probs += noise.view(successors.shape).numpy()
        log_probs -= np.maximum(log_probs.max(1, keepdims=True), LEAST)
        # 1 if there are no successors
        log_probs -= np.log(np.maximum(np.exp(log_probs).sum(1, keepdims=True), 1))
        # a successor from a text keeps its log-probability, though it is alone
        alone = known[:, -1] == -np.inf
        log_probs[alone] = known[alone]
        return successors, log_probs

    def _measure(self, seen: Observation) -> None:
        """Count which ranks were accepted, along the accepted path."""
        assert seen.verdict is not None
        emitted = [int(seen.request.tokens[-1]), *seen.verdict.tokens]
        guesses = []
        for level, token in enumerate(emitted[: min(self.depth, len(emitted) - 1)]):
            successors, log_probs = ranked(*self._ranks(seen.request, np.array([token]), level))
            pairs = zip(successors[0].tolist(), log_probs[0].tolist(), strict=True)
            guesses.append([pair for pair in pairs if pair[1] > -math.inf])
        self.memories[seen.request.tenant].acceptance.record(guesses, emitted[1:])


def ranked(tokens: IntArray, log_probs: FloatArray) -> tuple[IntArray, FloatArray]:
    """Sort tokens and log-probabilities `[m, k]`, the likeliest first."""
    order = np.argsort(-log_probs, axis=1)
    return np.take_along_axis(tokens, order, 1), np.take_along_axis(log_probs, order, 1)
