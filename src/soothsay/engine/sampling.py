"""From logits to the token that is emitted: the distribution p, and noise keyed by position.

The token at a position is `argmax(log p + gumbel(seed, position))`, or `argmax(log p)` at temperature 0. This
is exact sampling from p (the Gumbel-max trick), and a pure function of p, seed and position: whoever knows
the seed knows the noise of every future position, which is how a drafter guesses what the target *will* draw
(Daliri et al. 2024, arXiv 2408.07978).

Verifiers other than `match` take log p without noise, and decide by chances that are keyed by seed and
position too, but have nothing in common with that noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.engine.grammar import Constraint
from soothsay.engine.params import SamplingParams
from soothsay.engine.tree import DraftTree, FloatArray
from soothsay.engine.verify import Guessing
from soothsay.native import native_kernels

IntArray = npt.NDArray[np.int64]

NUCLEUS_WIDTH = 256
"""Likeliest tokens among which top-p is looked for first; a row with a larger nucleus sorts them all."""

PICK_BLOCK = 128
"""Weights that are summed before one of them is picked."""

DRAFTING, VERIFYING = 1, 2
"""What chances are for: they are keyed by the seed, one of these, and the number of committed tokens, which
rises with every step; what is drafted is keyed by the node too."""


class Sampled(Protocol):
    """What sampling needs to know of a request."""

    params: SamplingParams
    seed: int
    num_prompt: int
    end_tokens: frozenset[int]
    constraint: Constraint | None

    @property
    def tokens(self) -> IntArray:
        """Committed tokens, the prompt's first."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a request's tree, one for each row of logits; the root is its last committed token."""

    request: Sampled
    tree: DraftTree
    indices: Sequence[int]


def perturb(logits: Tensor, asked: Sequence[Nodes]) -> Tensor:
    """Scores whose argmax is the token emitted at each node, or log p where the verifier wants that.

    Args:
        logits: `[M, V]` float32, the rows of all of `asked` in order. Not changed.
        asked: which nodes the rows belong to.

    Returns:
        `[M, V]` float32: log p up to a constant, minus infinity where p is 0, plus the noise of the node's
        next position if its request's temperature is above 0 and its verifier shares that noise.
    """
    adjusted, begin = logits, 0
    noisy: list[tuple[int, SamplingParams, tuple[int, int]]] = []  # row, parameters, key of the noise
    noiseless: list[tuple[int, SamplingParams]] = []
    for nodes in asked:
        request, params, end = nodes.request, nodes.request.params, begin + len(nodes.indices)
        constrained = request.constraint is not None
        if constrained or params.logit_bias or params.has_penalties or params.min_tokens:
            adjusted = logits.clone() if adjusted is logits else adjusted
            _adjust(adjusted[begin:end], nodes)
        if params.temperature > 0 and params.rule.guessing is not Guessing.SHARED_NOISE:
            noiseless += [(row, params) for row in range(begin, end)]
        elif params.temperature > 0:
            position = len(request.tokens)  # of the token that follows the root
            for row, node in enumerate(nodes.indices, start=begin):
                noisy.append((row, params, _key(request.seed, position + nodes.tree.depths[node])))
        begin = end
    scores = adjusted
    if noisy:
        keys = torch.tensor([key for *_, key in noisy], device=logits.device)
        if len(noisy) == len(logits):
            return _sampled(adjusted, [params for _, params, _ in noisy], keys)
        scores = _replace(scores, adjusted, [(row, params) for row, params, _ in noisy], keys)
    return _replace(scores, adjusted, noiseless, None) if noiseless else scores


def best_tokens(scores: Tensor) -> list[int]:
    """The token of each row's largest score, `[M, V]` float32; natively, of equal ones the first."""
    native = native_kernels() if scores.device.type == "cpu" else None
    tokens: list[int] = (scores.argmax(-1) if native is None else native.largest(scores, 1)[1][:, 0]).tolist()
    return tokens


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of each token under each key.

    Args:
        keys: `[M, 2]` int64, 32 bits each.
        tokens: `[M, W]` or `[1, W]` int64 token ids.

    Returns:
        `[M, W]` float32. A counter-based generator, so the noise of one token can be had without that of the
        others, in any batch and on any device.
    """
    native = native_kernels() if tokens.device.type == "cpu" else None
    uniform = hashed(keys, tokens) if native is None else native.hashed(keys, tokens)
    # the exponential near 0 decides, so its precision is kept there
    return uniform.neg_().log1p_().neg_().log_().neg_()


def hashed(keys: Tensor, tokens: Tensor) -> Tensor:
    """Numbers in (0, 1), `[M, W]` float32, by 32-bit hashing (the "lowbias32" mixer); see `gumbel`."""
    x = _mix(tokens * 0x9E3779B1 + keys[:, :1])
    x = _mix(x.add_(keys[:, 1:]))
    return x.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """In place: what is allocated anew each time costs more than the arithmetic."""
    mask = 0xFFFFFFFF
    x &= mask
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> shift
        x *= factor
        x &= mask
    x ^= x >> 16
    return x


class Keyed:
    """Chances that are a function of their key: the seed, and what else tells them apart from others.

    Args:
        key: whole numbers.
    """

    def __init__(self, *key: int):
        self._key, self._count = key, 0

    def happens(self, probability: float) -> bool:
        """True with this probability; always at 1, never at 0."""
        return self._uniform() < probability

    def pick(self, weights: FloatArray) -> int:
        """An index with probability in proportion to its weight, `[V]`, none below 0 and some above."""
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
        low, high = _key(*self._key, self._count)
        return float(((high << 32 | low) >> 12) * 2.0**-52)


def _key(*words: int) -> tuple[int, int]:
    """Two 32-bit words from a seed and a position, or more of that kind (the splitmix64 finalizer)."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = 0
    for word in words:
        z = (z + word + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def derive_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request with `n` of them; the first keeps the request's own."""
    low, high = _key(seed, index)
    return seed if index == 0 else (high << 31) ^ low


def _replace(
    scores: Tensor, logits: Tensor, sampled: Sequence[tuple[int, SamplingParams]], keys: Tensor | None
) -> Tensor:
    """`scores` with some of its rows those of `_sampled`."""
    rows = torch.tensor([row for row, _ in sampled], device=logits.device)
    new = _sampled(logits.index_select(0, rows), [params for _, params in sampled], keys)
    return scores.index_copy(0, rows, new)


def _sampled(logits: Tensor, params: Sequence[SamplingParams], keys: Tensor | None) -> Tensor:
    """Temperature, truncation and, with keys, noise for rows `[R, V]` of temperature above 0."""
    device, vocab = logits.device, logits.shape[1]
    temperatures = [max(p.temperature, 1e-30) for p in params]  # below, logits would overflow
    logits = logits / torch.tensor(temperatures, device=device)[:, None]
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], device=device)
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], -math.inf)
    cut = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab]
    if len(cut) < len(params):
        full = logits if keys is None else logits + gumbel(keys, torch.arange(vocab, device=device)[None])
    else:
        full = torch.empty_like(logits)
    width = min(NUCLEUS_WIDTH, vocab)
    while cut:
        rows = torch.tensor(cut, device=device)
        values, tokens, complete = _nucleus(logits.index_select(0, rows), [params[row] for row in cut], width)
        noise = 0.0 if keys is None else gumbel(keys.index_select(0, rows), tokens)
        kept = torch.full((len(cut), vocab), -math.inf, device=device)
        full.index_copy_(0, rows, kept.scatter_(1, tokens, values + noise))
        cut = [row for row, done in zip(cut, complete.tolist(), strict=True) if not done]
        width = min(16 * width, vocab)
    return full


def _nucleus(logits: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k, then top-p among what it keeps, looking at the `width` likeliest tokens only.

    Returns:
        `[R, width]` logits with those cut off at minus infinity, `[R, width]` their tokens, and `[R]` whether
        `width` was enough.
    """
    device, vocab = logits.device, logits.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    values, tokens = logits.topk(width, dim=-1)  # [R, width], likeliest first
    values = values.masked_fill(torch.arange(width, device=device) >= top_k, -math.inf)
    total = torch.where(
        top_k <= width, values.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True)
    )
    probs = (values - total).exp()
    reached = probs.cumsum(-1)
    values = values.masked_fill(reached - probs >= top_p, -math.inf)
    in_sight = (top_k == vocab) & (reached[:, -1:] >= top_p)  # with a top_k beyond, the total is not known
    complete = (width == vocab) | (top_k <= width) | in_sight
    return values, tokens, complete[:, 0]


def _adjust(logits: Tensor, nodes: Nodes) -> None:
    """Bias, minimum length, penalties and grammar, in place on the rows `[m, V]` of one request's nodes."""
    request, tree, params = nodes.request, nodes.tree, nodes.request.params
    output = request.tokens[request.num_prompt :]
    if params.min_tokens:
        ends = torch.tensor(sorted(request.end_tokens), dtype=torch.int64, device=logits.device)
        for row, node in enumerate(nodes.indices):
            if len(output) + tree.depths[node] < params.min_tokens:
                logits[row, ends] = -math.inf
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
    if request.constraint is not None:
        known = request.constraint.allowed(output, tree, nodes.indices, request.end_tokens)
        allowed = torch.from_numpy(known).to(logits.device)
        logits.masked_fill_(~allowed, -math.inf)
        nothing = logits.amax(-1, keepdim=True) == -math.inf
        logits.masked_fill_(allowed & nothing, 0.0)  # where the rest leaves nothing of it, the grammar stands
