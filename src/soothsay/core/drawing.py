"""The token that is emitted at each node: the best of `perturb`, without the scores of all other tokens.

Scores of a whole vocabulary cost as much as a layer of a small model, and `perturb` needs all of them. A draw
needs few: those of the tokens that win a race of logits and noise (`SamplingKernels.race`), or, with a small
top-k, those of the likeliest tokens. What these cannot decide is left to `perturb`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from soothsay.core.noise import SamplingKernels, gumbel
from soothsay.core.params import MIN_TEMPERATURE, SamplingParams
from soothsay.core.sampling import NUCLEUS_WIDTH, Nodes, adjust, best_tokens, nucleus, perturb_rows

CONTENDERS = 16
"""Tokens of a race that are looked at. All of them are cut by top-p about once in 20**16 draws at 0.95."""

DOUBT = 1e-4
"""Share by which a value of `race` may be off. What it decides must be decided by more."""

Drawn = dict[int, tuple[int, float]]
"""The token of a row, and about its score."""


def draw(logits: Tensor, asked: Sequence[Nodes], kernels: SamplingKernels) -> tuple[list[int], list[float]]:
    """The best token of each row of `perturb`, and its score, which may be off by a share of `DOUBT`.

    Arguments are those of `perturb`. No request may have a verifier without shared noise.
    """
    adjusted, noisy, noiseless = adjust(logits, asked)
    assert not noiseless, "their verifiers need the scores of all tokens"
    drawn = Drawn()
    if len(noisy) < len(logits):
        values, tokens = kernels.largest(adjusted, 1)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        drawn = {row: (token, value) for row, ((token,), (value,)) in enumerate(pairs)}
    if noisy:
        rows = torch.tensor([row for row, *_ in noisy], device=logits.device)
        own = adjusted if len(noisy) == len(logits) else adjusted.index_select(0, rows)
        keys = torch.tensor([key for *_, key in noisy], device=logits.device)
        params = [params for _, params, _ in noisy]
        for place, pair in _Draws(own, params, keys, kernels).all().items():
            drawn[noisy[place][0]] = pair
    return [drawn[row][0] for row in range(len(logits))], [drawn[row][1] for row in range(len(logits))]


class _Draws:
    """Rows that are drawn from.

    Args:
        logits: `[R, V]` float32.
        params: of each row, with a temperature above 0.
        keys: `[R, 2]`, of their noise.
        kernels: of the device of `logits`.
    """

    def __init__(
        self, logits: Tensor, params: Sequence[SamplingParams], keys: Tensor, kernels: SamplingKernels
    ):
        self.logits, self.params, self.keys, self.kernels = logits, params, keys, kernels
        self.vocab = logits.shape[1]
        temperatures = [max(p.temperature, MIN_TEMPERATURE) for p in params]
        self.temperatures = torch.tensor(temperatures, device=logits.device)

    def all(self) -> Drawn:
        """The draws of all rows."""
        if not self.kernels.draws_by_race:
            return self._from_scores([*range(len(self.params))])
        few = [row for row, p in enumerate(self.params) if 0 < p.top_k <= min(NUCLEUS_WIDTH, self.vocab - 1)]
        many = [row for row, p in enumerate(self.params) if not 0 < p.top_k < self.vocab]
        drawn = self._from_likeliest(few) if few else Drawn()
        drawn |= self._from_race(many) if many else Drawn()
        return drawn | self._from_scores([row for row in range(len(self.params)) if row not in drawn])

    def _from_scores(self, rows: list[int]) -> Drawn:
        """Draws from the scores of all tokens."""
        if not rows:
            return {}
        logits, keys = self._of(self.logits, rows), self._of(self.keys, rows)
        scores = perturb_rows(logits, [self.params[row] for row in rows], keys, self.kernels)
        tokens = best_tokens(scores, self.kernels)
        best = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
        return dict(zip(rows, zip(tokens, best, strict=True), strict=True))

    def _from_likeliest(self, rows: list[int]) -> Drawn:
        """Draws with a small top-k, from the likeliest tokens."""
        params = [self.params[row] for row in rows]
        values, tokens = self.kernels.largest(self._of(self.logits, rows), max(p.top_k for p in params))
        values = values / self._of(self.temperatures, rows)[:, None]
        floors = torch.tensor([_log(p.min_p) for p in params], device=values.device)
        values = values.masked_fill(values < values[:, :1] + floors[:, None], -math.inf)
        kept, order, _ = nucleus(values, params, values.shape[1], self.kernels)
        tokens = tokens.gather(1, order)
        scores = kept + gumbel(self._of(self.keys, rows), tokens, self.kernels)
        return {
            row: _first_of_best(own, scored)
            for row, own, scored in zip(rows, tokens.tolist(), scores.tolist(), strict=True)
        }

    def _from_race(self, rows: list[int]) -> Drawn:
        """Draws without top-k: the first contender that top-p and min-p do not cut.

        In nearly all races the first is clear from the values of `race`. A close race is decided by exact
        scores.
        """
        logits, keys = self._of(self.logits, rows), self._of(self.keys, rows)
        temperatures = self._of(self.temperatures, rows)
        rough, tokens = self.kernels.race(logits, temperatures.reciprocal(), keys, CONTENDERS)
        drawn, close = Drawn(), list[int]()
        for place, race in enumerate(zip(rough.tolist(), tokens.tolist(), strict=True)):
            winner = self._clear_winner(rows[place], logits[place : place + 1], *race)
            if winner is None:
                close.append(place)
            else:
                drawn[rows[place]] = winner
        if close:
            own = torch.tensor(close, device=logits.device)
            exact = self._exactly([rows[place] for place in close], rough[own], tokens[own])
            return drawn | exact
        return drawn

    def _clear_winner(
        self, row: int, logits: Tensor, values: Sequence[float], tokens: Sequence[int]
    ) -> tuple[int, float] | None:
        """The first contender that is kept, and its value; None if one before it leads by too little."""
        for token, value, following in zip(tokens, values, values[1:], strict=False):
            if not value - following > 2 * DOUBT * max(1.0, abs(value), abs(following)):
                return None
            if self._keeps(row, logits, token):
                return token, value
        return None

    def _exactly(self, rows: list[int], rough: Tensor, tokens: Tensor) -> Drawn:
        """Draws by the exact scores of the contenders `[r, n]` that `race` found."""
        logits, keys = self._of(self.logits, rows), self._of(self.keys, rows)
        temperatures = self._of(self.temperatures, rows)
        scores = logits.gather(1, tokens) / temperatures[:, None] + gumbel(keys, tokens, self.kernels)
        scores.masked_fill_(rough == -math.inf, -math.inf)  # fewer tokens than were wanted
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        contenders = zip(best.tolist(), tokens.gather(1, order).tolist(), rough[:, -1].tolist(), strict=True)
        drawn = Drawn()
        for place, (row, (values, names, last)) in enumerate(zip(rows, contenders, strict=True)):
            others = last > -math.inf and rough.shape[1] < self.vocab
            safe = last + DOUBT * max(1.0, abs(last)) if others else -math.inf
            for token, score, following in zip(names, values, [*values[1:], -math.inf], strict=True):
                if not score > max(safe, following):  # not surely one of the best, or a tie
                    break
                if self._keeps(row, logits[place : place + 1], token):
                    drawn[row] = token, score
                    break
        return drawn

    def _keeps(self, row: int, logits: Tensor, token: int) -> bool:
        """Whether top-p and min-p keep a token of a row, `[1, V]`."""
        params = self.params[row]
        if params.top_p >= 1 and params.min_p <= 0:
            return True
        top = self.kernels.largest(logits, 1)[0][:, 0]
        temperature = self.temperatures[row : row + 1]
        floor = top + temperature * _log(params.min_p)
        if float(logits[0, token]) < float(floor):
            return False
        place = torch.tensor([token], device=logits.device)
        before = self.kernels.mass_before(logits, temperature.reciprocal(), top, floor, place)
        return float(before) < params.top_p

    def _of(self, tensor: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == len(self.params):
            return tensor
        return tensor.index_select(0, torch.tensor(rows, device=tensor.device))


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


def _first_of_best(tokens: Sequence[int], scores: Sequence[float]) -> tuple[int, float]:
    """The token with the best score, the smallest of equal ones, and the score."""
    best = max(scores)
    return min(token for token, score in zip(tokens, scores, strict=True) if score == best), best
