"""From logits to the emitted token: the distribution p, and noise keyed by position.

The token at a position is `argmax(log p + gumbel(seed, position))`, or `argmax(log p)` at temperature 0. This
is exact sampling from p (the Gumbel-max trick), and a pure function of p, seed and position. A drafter with
the seed knows the noise of every future position, so it can guess what the target *will* draw (Daliri et al.
2024, arXiv 2408.07978).

Verifiers other than `match` read log p without noise. Their random decisions are keyed by seed and position
too, and independent of that noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import FloatArray, IntArray
from soothsay.core.bad_sequences import BadSequences
from soothsay.core.constraint import Constraint
from soothsay.core.noise import noise_key
from soothsay.core.params import SamplingParams
from soothsay.core.sampling_ops import Draws, SampledRows, SamplingOps
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing

PICK_BLOCK = 128
"""Block of weights whose sum is looked up before one of them is picked."""

DRAFTING, VERIFYING = 1, 2
"""Purposes of random decisions. Keys are the seed, a purpose and the number of committed tokens, which rises
with every step; decisions of drafting are keyed by the node too."""


class Sampled(Protocol):
    """What sampling needs from a request."""

    params: SamplingParams
    seed: int
    num_prompt: int
    end_tokens: frozenset[int]
    constraint: Constraint | None
    bad_sequences: BadSequences | None

    @property
    def tokens(self) -> IntArray:
        """Committed tokens, the prompt's first."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a request's tree, one for each row of logits. The root is its last committed token."""

    request: Sampled
    tree: DraftTree
    indices: Sequence[int]


def draw(logits: Tensor, asked: Sequence[Nodes], ops: SamplingOps) -> Draws:
    """The token that the target emits at each node: the best of `perturb`. See `SamplingOps.draw`.

    Arguments are those of `perturb`. No request may have a verifier without shared noise.
    """
    adjusted, sampled = _adjusted(logits, asked)
    assert False not in sampled, "their verifiers need the scores of all tokens"
    noisy = sampled.get(True)
    if noisy is not None and len(noisy.rows) == len(logits):
        return ops.draw(adjusted, noisy.table(logits.device))
    values, tokens = ops.largest(adjusted, 1)
    likeliest = Draws(tokens[:, 0], values[:, 0])
    if noisy is None:
        return likeliest
    rows = torch.tensor(noisy.rows, device=logits.device)
    drawn = ops.draw(adjusted.index_select(0, rows), noisy.table(logits.device))
    return Draws(*(all_.index_copy(0, rows, own) for all_, own in zip(likeliest, drawn, strict=True)))


def perturb(logits: Tensor, asked: Sequence[Nodes], ops: SamplingOps, ids: Tensor | None = None) -> Tensor:
    """Scores whose argmax is the token emitted at each node; log p for verifiers without shared noise.

    Args:
        logits: `[M, V]` float32, the rows of all of `asked` in order. Not changed.
        asked: the nodes of the rows.
        ops: of the device of `logits`.
        ids: `[V]` int64, the tokens that the columns stand for; None: all tokens. Only for requests whose
            logits nothing changes before they are scaled.

    Returns:
        `[M, V]` float32: log p up to a constant, minus infinity where p is 0. At a temperature above 0, a
        verifier with shared noise adds the noise of the node's next position.
    """
    adjusted, sampled = _adjusted(logits, asked)
    scores = adjusted
    for some in sampled.values():
        if len(some.rows) == len(logits):
            return ops.scores(adjusted, some.table(logits.device), ids)
        rows = torch.tensor(some.rows, device=logits.device)
        own = ops.scores(adjusted.index_select(0, rows), some.table(logits.device), ids)
        scores = scores.index_copy(0, rows, own)
    return scores


@dataclass(slots=True)
class _Sampled:
    """Rows of a temperature above 0, their parameters, and the keys of their noise."""

    has_noise: bool
    rows: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)

    def table(self, device: torch.device) -> SampledRows:
        return SampledRows.of(self.params, self.keys if self.has_noise else None, device)


def _adjusted(logits: Tensor, asked: Sequence[Nodes]) -> tuple[Tensor, dict[bool, _Sampled]]:
    """Apply what changes the logits before temperature and truncation.

    Arguments are those of `perturb`.

    Returns:
        The logits, a copy if anything has changed; and the rows of temperature above 0, by whether they get
        noise, as verifiers that share noise want it.
    """
    adjusted, begin = logits, 0
    sampled: dict[bool, _Sampled] = {}
    for nodes in asked:
        request, params, end = nodes.request, nodes.request.params, begin + len(nodes.indices)
        if request.constraint is not None or params.changes_logits:
            adjusted = logits.clone() if adjusted is logits else adjusted
            _adjust(adjusted[begin:end], nodes)
        if params.temperature > 0:
            shares_noise = params.rule.guessing is Guessing.SHARED_NOISE
            if (own := sampled.get(shares_noise)) is None:
                own = sampled[shares_noise] = _Sampled(shares_noise)
            own.rows += range(begin, end)
            own.params += [params] * len(nodes.indices)
            if shares_noise:
                position = len(request.tokens)  # of the token after the root
                own.keys += [noise_key(request.seed, position + nodes.tree.depths[i]) for i in nodes.indices]
        begin = end
    return adjusted, sampled


class Keyed:
    """Random decisions as a function of a key.

    Args:
        key: integers, the seed and whatever tells these decisions from others.
    """

    def __init__(self, *key: int):
        self._key, self._count = key, 0

    def happens(self, probability: float) -> bool:
        """True with this probability; always at 1, never at 0."""
        return self._uniform() < probability

    def pick(self, weights: FloatArray) -> int:
        """An index with probability in proportion to its weight, `[V]`: none below 0, at least one above."""
        sums = np.add.reduceat(weights, np.arange(0, len(weights), PICK_BLOCK))  # a tenth of the work
        ends = sums.cumsum()
        mass = self._uniform() * float(ends[-1])
        block = int(ends.searchsorted(mass, side="right"))
        inside = weights[block * PICK_BLOCK : (block + 1) * PICK_BLOCK].cumsum()
        left = max(mass - float(ends[block] - sums[block]), 0.0)  # rounding must not pick a weight of 0
        left = min(left, float(np.nextafter(inside[-1], 0.0)))
        return block * PICK_BLOCK + int(inside.searchsorted(left, side="right"))

    def _uniform(self) -> float:
        """In [0, 1), a multiple of 2 ** -52."""
        self._count += 1
        low, high = noise_key(*self._key, self._count)
        return float(((high << 32 | low) >> 12) * 2.0**-52)


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with `n` of them; the first keeps the request's own."""
    low, high = noise_key(seed, index)
    return seed if index == 0 else (high << 31) ^ low


def _adjust(logits: Tensor, nodes: Nodes) -> None:
    """Apply bias, penalties, bans and grammar, in place, to the rows `[m, V]` of one request."""
    request, tree, params = nodes.request, nodes.tree, nodes.request.params
    output = request.tokens[request.num_prompt :]
    if params.logit_bias:
        pairs = [(float(token), float(bias)) for token, bias in params.logit_bias.items()]
        ids, biases = torch.tensor(pairs, dtype=torch.float64, device=logits.device).t()
        logits[:, ids.long()] += biases.float()
    if params.has_penalties:
        vocab = logits.shape[1]
        counts = np.repeat(np.bincount(output, minlength=vocab)[None], len(nodes.indices), axis=0)  # [m, V]
        for row, node in enumerate(nodes.indices):
            for ancestor in tree.path(node)[1:]:
                counts[row, tree.tokens[ancestor]] += 1
        in_prompt = np.bincount(request.tokens[: request.num_prompt], minlength=vocab) > 0
        seen = torch.from_numpy(in_prompt | (counts > 0)).to(logits.device)
        said = torch.from_numpy(counts.astype(np.float32)).to(logits.device)
        penalty = params.repetition_penalty
        logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
        logits -= params.frequency_penalty * said + params.presence_penalty * (said > 0)
    _forbid(logits, nodes)
    if request.constraint is not None:
        known = request.constraint.allowed(output, tree, nodes.indices, request.end_tokens)
        allowed = torch.from_numpy(known).to(logits.device)
        logits.masked_fill_(~allowed, -math.inf)
        nothing = logits.amax(-1, keepdim=True) == -math.inf
        # the grammar overrides parameters that forbid all that it allows
        logits.masked_fill_(allowed & nothing, 0.0)


def _forbid(logits: Tensor, nodes: Nodes) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place, in the rows `[m, V]` of one request.

    `allowed_token_ids` goes first, then `bad_words`, then `min_tokens`. A ban that would leave a row without
    any token has no effect there.
    """
    request, tree, params = nodes.request, nodes.tree, nodes.request.params
    if params.allowed_mask is not None:
        allowed = np.zeros(logits.shape[1], dtype=np.bool_)
        allowed[: len(params.allowed_mask)] = params.allowed_mask
        _ban(logits, logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), -math.inf))
    num_output = len(request.tokens) - request.num_prompt
    if request.bad_sequences:
        reach = min(request.bad_sequences.reach, num_output)
        output = request.tokens[len(request.tokens) - reach :].tolist()
        paths = ([tree.tokens[ancestor] for ancestor in tree.path(node)[1:]] for node in nodes.indices)
        last = [request.bad_sequences.after(output + path) for path in paths]
        _ban_tokens(logits, [(row, token) for row, own in enumerate(last) for token in own])
    if num_output < params.min_tokens:
        early = [num_output + tree.depths[node] < params.min_tokens for node in nodes.indices]
        ends = request.end_tokens
        _ban_tokens(logits, [(row, token) for row, own in enumerate(early) if own for token in ends])


def _ban_tokens(logits: Tensor, places: Sequence[tuple[int, int]]) -> None:
    """Set the logits of tokens, each in a row of its own, to minus infinity; see `_ban`."""
    if places:
        rows, tokens = torch.tensor(places, device=logits.device).t()
        _ban(logits, logits.index_put((rows, tokens), logits.new_tensor(-math.inf)))


def _ban(logits: Tensor, banned: Tensor) -> None:
    """Replace the rows of `logits`, in place, by those of `banned` where these have tokens left."""
    logits.copy_(torch.where(banned.amax(-1, keepdim=True) > -math.inf, banned, logits))
