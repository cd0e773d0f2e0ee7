"""From logits to the emitted token: the distribution p, and noise keyed by position.

The token at a position is `argmax(log p + gumbel(seed, position))`, or `argmax(log p)` at temperature 0. This
is exact sampling from p (the Gumbel-max trick), and a pure function of p, seed and position. A drafter with
the seed knows the noise of every future position, so it can guess what the target *will* draw (Daliri et al.
2024, arXiv 2408.07978).

Verifiers other than `match` read log p without noise. Their random decisions are keyed by seed and position
too, and independent of that noise.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import FloatArray
from soothsay.core.noise import noise_key
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling_ops import Draws, SampledRows, SamplingOps
from soothsay.core.transfer import upload
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Guessing

PICK_BLOCK = 128
"""Block of weights whose sum is looked up before one of them is picked."""

DRAFTING, VERIFYING = 1, 2
"""Purposes of random decisions. Keys are the seed, a purpose and the number of committed tokens, which rises
with every step; decisions of drafting are keyed by the node too."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of a request's tree, one for each row of logits. The root is its last committed token."""

    request: Request
    tree: DraftTree
    indices: Sequence[int]


def draw(logits: Tensor, asked: Sequence[Nodes], ops: SamplingOps) -> Draws:
    """The token that the target emits at each node: the best of `perturb`. See `SamplingOps.draw`.

    Arguments are those of `perturb`. No request may have a verifier without shared noise.
    """
    adjusted, sampled = _adjusted(logits, asked)
    assert False not in sampled, "their verifiers need the scores of all tokens"
    if noisy := sampled.get(True):
        if noisy.places is None:
            return ops.draw(adjusted, noisy.rows)
        drawn = ops.draw(adjusted.index_select(0, noisy.places), noisy.rows)
    values, tokens = ops.largest(adjusted, 1)
    if noisy and noisy.places is not None:
        return drawn.among(noisy.places, tokens[:, 0], values[:, 0])
    return Draws(tokens[:, 0], values[:, 0])


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
        if some.places is None:
            return ops.scores(adjusted, some.rows, ids)
        own = ops.scores(adjusted.index_select(0, some.places), some.rows, ids)
        scores = scores.index_copy(0, some.places, own)
    return scores


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Rows of a temperature above 0."""

    places: Tensor | None  # `[R]` int64, in the logits, on their device; None: they are all rows
    rows: SampledRows


def _adjusted(logits: Tensor, asked: Sequence[Nodes]) -> tuple[Tensor, dict[bool, _Sampled]]:
    """Apply what changes the logits before temperature and truncation.

    What the device needs for that goes there in one copy. Arguments are those of `perturb`.

    Returns:
        The logits, a copy if anything has changed; and the rows of temperature above 0, by whether they get
        noise, as verifiers that share noise want it.
    """
    changes, begin = list[tuple[slice, _Change]](), 0
    places: dict[bool, list[int]] = {}
    params: dict[bool, list[SamplingParams]] = {}
    keys = list[tuple[int, int]]()
    for nodes in asked:
        request, end = nodes.request, begin + len(nodes.indices)
        if request.constraint is not None or request.params.changes_logits:
            changes += [(slice(begin, end), change) for change in _changes(nodes, logits.shape[1])]
        if request.params.temperature > 0:
            shares_noise = request.params.rule.guessing is Guessing.SHARED_NOISE
            places.setdefault(shares_noise, []).extend(range(begin, end))
            params.setdefault(shares_noise, []).extend([request.params] * len(nodes.indices))
            if shares_noise:
                position = len(request.tokens)  # of the token after the root
                keys += [noise_key(request.seed, position + nodes.tree.depths[i]) for i in nodes.indices]
        begin = end
    if not (changes or places):
        return logits, {}
    tables = [array for _, change in changes for array in change.arrays]
    for is_noisy, own in places.items():
        tables += [torch.tensor(own), *SampledRows.tables(params[is_noisy], keys if is_noisy else None)]
    there = iter(upload(tables, logits.device))
    adjusted = logits.clone() if changes else logits
    for rows, change in changes:
        change.apply(adjusted[rows], *(next(there) for _ in change.arrays))
    sampled = dict[bool, _Sampled]()
    for is_noisy, own in places.items():
        where, numbers, words = next(there), next(there), next(there)
        table = SampledRows(params[is_noisy], numbers, words, is_noisy)
        sampled[is_noisy] = _Sampled(None if len(own) == len(logits) else where, table)
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


@dataclass(frozen=True, slots=True)
class _Change:
    """Something that changes the logits of a request."""

    apply: Callable[..., None]  # to rows `[m, V]`, in place, with the arrays
    arrays: tuple[Tensor, ...] = ()  # on the host; `apply` gets them where the logits are


def _changes(nodes: Nodes, vocab: int) -> Iterator[_Change]:
    """Bias, penalties, bans and grammar of one request, in the order in which they apply.

    Of bans, `allowed_token_ids` goes first, then `bad_words`, then `min_tokens`. A ban that would leave a row
    without any token has no effect there.
    """
    request, tree, params = nodes.request, nodes.tree, nodes.request.params
    output = request.tokens[request.num_prompt :]
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias.items(), strict=True)
        yield _Change(_add_bias, (torch.tensor(ids), torch.tensor(biases, dtype=torch.float32)))
    if params.has_penalties:
        yield _Change(partial(_penalize, params), _counts(nodes))
    if params.allowed_mask is not None:
        banned = np.ones(vocab, dtype=np.bool_)
        banned[: len(params.allowed_mask)] = ~params.allowed_mask[:vocab]
        yield _Change(_ban, (torch.from_numpy(banned),))
    if request.bad_sequences:
        reach = min(request.bad_sequences.reach, len(output))
        last = request.tokens[len(request.tokens) - reach :].tolist()
        paths = ([tree.tokens[ancestor] for ancestor in tree.path(node)[1:]] for node in nodes.indices)
        bad = [request.bad_sequences.after(last + path) for path in paths]
        yield from _bans([(row, token) for row, own in enumerate(bad) for token in own])
    if len(output) < params.min_tokens:
        depths = [tree.depths[node] for node in nodes.indices]
        early = [row for row, depth in enumerate(depths) if len(output) + depth < params.min_tokens]
        yield from _bans([(row, token) for row in early for token in request.end_tokens])
    if request.constraint is not None:
        allowed = request.constraint.allowed(output, tree, nodes.indices, request.end_tokens)
        yield _Change(_constrain, (torch.from_numpy(allowed),))


def _counts(nodes: Nodes) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `[n]` int64; and `[m, n]`: whether each was seen before a node, and how often in the answer."""
    request, tree = nodes.request, nodes.tree
    paths = [[tree.tokens[ancestor] for ancestor in tree.path(node)[1:]] for node in nodes.indices]
    drafted = np.fromiter({token for path in paths for token in path}, dtype=np.int64)
    tokens, places = np.unique(np.concatenate([request.tokens, drafted]), return_inverse=True)
    prompt, output, _ = np.split(places, [request.num_prompt, len(request.tokens)])
    counts = np.repeat(np.bincount(output, minlength=len(tokens))[None], len(paths), axis=0)
    for row, path in enumerate(paths):
        np.add.at(counts[row], np.searchsorted(tokens, np.array(path, dtype=np.int64)), 1)
    seen = counts > 0
    seen[:, prompt] = True
    return torch.from_numpy(tokens), torch.from_numpy(seen), torch.from_numpy(counts.astype(np.float32))


def _bans(places: Sequence[tuple[int, int]]) -> Iterator[_Change]:
    """Ban tokens, each in a row of its own."""
    if places:
        yield _Change(_ban_tokens, (torch.tensor(places),))


def _add_bias(logits: Tensor, ids: Tensor, biases: Tensor) -> None:
    logits[:, ids] += biases


def _penalize(params: SamplingParams, logits: Tensor, tokens: Tensor, seen: Tensor, said: Tensor) -> None:
    penalty, own = params.repetition_penalty, logits.index_select(1, tokens)
    own = torch.where(seen, torch.where(own > 0, own / penalty, own * penalty), own)
    own -= params.frequency_penalty * said + params.presence_penalty * (said > 0)
    logits.index_copy_(1, tokens, own)


def _constrain(logits: Tensor, allowed: Tensor) -> None:
    logits.masked_fill_(~allowed, -math.inf)
    nothing = logits.amax(-1, keepdim=True) == -math.inf
    # the grammar overrides parameters that forbid all that it allows
    logits.masked_fill_(allowed & nothing, 0.0)


def _ban_tokens(logits: Tensor, places: Tensor) -> None:
    rows, tokens = places.t()
    _keep_some(logits, logits.index_put((rows, tokens), logits.new_full((), -math.inf)))


def _ban(logits: Tensor, banned: Tensor) -> None:
    _keep_some(logits, logits.masked_fill(banned, -math.inf))


def _keep_some(logits: Tensor, fewer: Tensor) -> None:
    """Replace the rows of `logits`, in place, by those of `fewer` where these have tokens left."""
    logits.copy_(torch.where(fewer.amax(-1, keepdim=True) > -math.inf, fewer, logits))
