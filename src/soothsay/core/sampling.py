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
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import FloatArray, IntArray
from soothsay.core.bad_sequences import BadSequences
from soothsay.core.constraint import Constraint
from soothsay.core.functions import log_total
from soothsay.core.noise import SamplingKernels, gumbel, noise_key
from soothsay.core.params import MIN_TEMPERATURE, SamplingParams
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing

NUCLEUS_WIDTH = 256
"""Number of likeliest tokens among which top-p searches first. A row with a larger nucleus takes more."""

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


def perturb(
    logits: Tensor, asked: Sequence[Nodes], kernels: SamplingKernels, ids: Tensor | None = None
) -> Tensor:
    """Scores whose argmax is the token emitted at each node; log p for verifiers without shared noise.

    Args:
        logits: `[M, V]` float32, the rows of all of `asked` in order. Not changed.
        asked: the nodes of the rows.
        kernels: of the device of `logits`.
        ids: `[V]` int64, the tokens that the columns stand for; None: all tokens. Only for requests whose
            logits nothing changes before they are scaled.

    Returns:
        `[M, V]` float32: log p up to a constant, minus infinity where p is 0. At a temperature above 0, a
        verifier with shared noise adds the noise of the node's next position.
    """
    adjusted, noisy, noiseless = adjust(logits, asked)
    scores = adjusted
    if noisy:
        keys = torch.tensor([key for *_, key in noisy], device=logits.device)
        if len(noisy) == len(logits):
            return perturb_rows(adjusted, [params for _, params, _ in noisy], keys, kernels, ids)
        scores = _replace(scores, adjusted, [(row, params) for row, params, _ in noisy], keys, kernels, ids)
    return _replace(scores, adjusted, noiseless, None, kernels, ids) if noiseless else scores


Noisy = tuple[int, SamplingParams, tuple[int, int]]
"""A row that is drawn from: its number, its parameters, and the key of its noise."""


def adjust(
    logits: Tensor, asked: Sequence[Nodes]
) -> tuple[Tensor, list[Noisy], list[tuple[int, SamplingParams]]]:
    """Apply what changes the logits before temperature and truncation.

    Arguments are those of `perturb`.

    Returns:
        The logits, a copy if anything has changed; the rows that get noise; and the rows and parameters of
        verifiers without shared noise. All other rows are at temperature 0.
    """
    adjusted, begin = logits, 0
    noisy: list[Noisy] = []
    noiseless: list[tuple[int, SamplingParams]] = []
    for nodes in asked:
        request, params, end = nodes.request, nodes.request.params, begin + len(nodes.indices)
        if request.constraint is not None or params.changes_logits:
            adjusted = logits.clone() if adjusted is logits else adjusted
            _adjust(adjusted[begin:end], nodes)
        if params.temperature > 0 and params.rule.guessing is not Guessing.SHARED_NOISE:
            noiseless += [(row, params) for row in range(begin, end)]
        elif params.temperature > 0:
            position = len(request.tokens)  # of the token after the root
            for row, node in enumerate(nodes.indices, start=begin):
                noisy.append((row, params, noise_key(request.seed, position + nodes.tree.depths[node])))
        begin = end
    return adjusted, noisy, noiseless


def best_tokens(scores: Tensor, kernels: SamplingKernels) -> list[int]:
    """The token of each row's largest score, `[M, V]` float32; the first of equal ones."""
    tokens: list[int] = kernels.argmax(scores).tolist()
    return tokens


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


def _replace(
    scores: Tensor,
    logits: Tensor,
    sampled: Sequence[tuple[int, SamplingParams]],
    keys: Tensor | None,
    kernels: SamplingKernels,
    ids: Tensor | None,
) -> Tensor:
    """`scores` with some rows replaced by those of `perturb_rows`."""
    rows = torch.tensor([row for row, _ in sampled], device=logits.device)
    new = perturb_rows(logits.index_select(0, rows), [params for _, params in sampled], keys, kernels, ids)
    return scores.index_copy(0, rows, new)


def perturb_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    keys: Tensor | None,
    kernels: SamplingKernels,
    ids: Tensor | None = None,
) -> Tensor:
    """Rows `[R, V]` of temperature above 0, scaled and truncated, plus noise if there are keys.

    `ids` are those of `perturb`.
    """
    device, vocab = logits.device, logits.shape[1]
    temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
    logits = logits / torch.tensor(temperatures, device=device)[:, None]
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], device=device)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], -math.inf)
    cut = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab]
    if len(cut) < len(params):
        everything = torch.arange(vocab, device=device) if ids is None else ids
        full = logits if keys is None else logits + gumbel(keys, everything[None], kernels)
    else:
        full = torch.empty_like(logits)
    width = min(NUCLEUS_WIDTH, vocab)
    while cut:
        rows = torch.tensor(cut, device=device)
        own = [params[row] for row in cut]
        values, tokens, complete = nucleus(logits.index_select(0, rows), own, width, kernels)
        named = tokens if ids is None else ids[tokens]
        noise = 0.0 if keys is None else gumbel(keys.index_select(0, rows), named, kernels)
        kept = torch.full((len(cut), vocab), -math.inf, device=device)
        full.index_copy_(0, rows, kept.scatter_reduce_(1, tokens, values + noise, "amax"))
        cut = [row for row, done in zip(cut, complete.tolist(), strict=True) if not done]
        width = min(16 * width, vocab)
    return full


def nucleus(
    logits: Tensor, params: Sequence[SamplingParams], width: int, kernels: SamplingKernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k, then top-p among the rest, within the `width` likeliest tokens.

    Returns:
        `[R, width]` logits, minus infinity for tokens that are cut; `[R, width]` their tokens; and `[R]`
        whether `width` was enough.
    """
    device, vocab = logits.device, logits.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    few = width <= NUCLEUS_WIDTH  # `largest` is for few
    values, tokens = kernels.largest(logits, width) if few else logits.topk(width, dim=-1)  # [R, width]
    values = values.masked_fill(torch.arange(width, device=device) >= top_k, -math.inf)
    whole = torch.where(top_k <= width, log_total(values), log_total(logits))
    probs = (values - whole).exp()
    reached = probs.cumsum(-1)
    values = values.masked_fill(reached - probs >= top_p, -math.inf)
    in_sight = (top_k == vocab) & (reached[:, -1:] >= top_p)  # with a larger top_k, the total is unknown
    complete = (width == vocab) | (top_k <= width) | in_sight
    return values, tokens, complete[:, 0]


def _adjust(logits: Tensor, nodes: Nodes) -> None:
    """Apply bias, penalties, bans and grammar, in place, to the rows `[m, V]` of one request."""
    request, tree, params = nodes.request, nodes.tree, nodes.request.params
    output = request.tokens[request.num_prompt :]
    if params.logit_bias:
        ids = torch.tensor([int(token) for token in params.logit_bias], device=logits.device)
        logits[:, ids] += torch.tensor([float(b) for b in params.logit_bias.values()], device=logits.device)
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
        allowed = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
        allowed[: len(params.allowed_mask)] = torch.from_numpy(params.allowed_mask).to(logits.device)
        for row in logits:
            _ban(row, ~allowed)
    num_output = len(request.tokens) - request.num_prompt
    if request.bad_sequences:
        reach = min(request.bad_sequences.reach, num_output)
        output = request.tokens[len(request.tokens) - reach :].tolist()
        for row, node in zip(logits, nodes.indices, strict=True):
            said = output + [tree.tokens[ancestor] for ancestor in tree.path(node)[1:]]
            last = request.bad_sequences.after(said)
            _ban(row, torch.tensor(last, dtype=torch.int64, device=logits.device))
    if num_output < params.min_tokens:
        ends = torch.tensor(sorted(request.end_tokens), dtype=torch.int64, device=logits.device)
        for row, node in zip(logits, nodes.indices, strict=True):
            if num_output + tree.depths[node] < params.min_tokens:
                _ban(row, ends)


def _ban(row: Tensor, tokens: Tensor) -> None:
    """Set some of the logits `[V]` to minus infinity, in place, unless none would be left."""
    banned = row.index_put((tokens,), torch.tensor(-math.inf, device=row.device))
    if banned.max() > -math.inf:
        row.copy_(banned)
