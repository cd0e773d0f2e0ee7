"""Draws without the scores of all tokens.

Scores of a whole vocabulary cost as much as a layer of a small model. A draw needs few: those of the tokens
that win a race of logits and noise (`SamplingOps.race`), or, with a small top-k, those of the likeliest
tokens. What these cannot decide is left to the scores of all tokens.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soothsay.core.sampling_ops import NUCLEUS_WIDTH, Draws, SampledRows, SamplingOps

CONTENDERS = 16
"""Tokens of a race that are looked at. All of them are cut by top-p about once in 20**16 draws at 0.95."""

Decided = dict[int, tuple[int, float]]
"""The token of each row that is decided, and its score."""


class RacingOps(SamplingOps):
    """Operations on a CPU that draw by races.

    In a subclass, `largest`, `race` and `mass_before` are faster than the scores of all tokens, and the first
    of equal numbers comes first in all three.
    """

    def draw(self, logits: Tensor, rows: SampledRows) -> Draws:
        """See `SamplingOps`."""
        vocab, params = logits.shape[1], rows.params
        few = [row for row, p in enumerate(params) if 0 < p.top_k <= min(NUCLEUS_WIDTH, vocab - 1)]
        many = [row for row, p in enumerate(params) if not 0 < p.top_k < vocab]
        decided = Decided()
        for places, find in ((few, self._from_likeliest), (many, self._from_race)):
            if places:
                found = find(*rows.select(places, logits))
                decided |= {places[place]: one for place, one in found.items()}
        if rest := [row for row in range(len(params)) if row not in decided]:
            own, some = rows.select(rest, logits)
            decided.update(zip(rest, zip(*super().draw(some, own).wait(), strict=True), strict=True))
        tokens, scores = zip(*(decided[row] for row in range(len(params))), strict=True)
        numbers = np.array(scores, dtype=np.float32)
        return Draws(torch.from_numpy(np.array(tokens)), torch.from_numpy(numbers))

    def _from_likeliest(self, rows: SampledRows, logits: Tensor) -> Decided:
        """Draws with a small top-k, from the likeliest tokens."""
        values, tokens = self.largest(logits, max(p.top_k for p in rows.params))
        values = values / rows.temperatures[:, None]
        values = values.masked_fill(values < values[:, :1] + rows.floors[:, None], -math.inf)
        kept, order, _ = self.nucleus(values, rows, values.shape[1])
        tokens = tokens.gather(1, order)
        scores = kept + self.gumbel(rows.keys, tokens)
        pairs = zip(tokens.tolist(), scores.tolist(), strict=True)
        return dict(enumerate(_first_of_best(*pair) for pair in pairs))

    def _from_race(self, rows: SampledRows, logits: Tensor) -> Decided:
        """Draws without top-k: the first contender that top-p and min-p do not cut."""
        cut = [p.top_p < 1 or p.min_p > 0 for p in rows.params]
        values, tokens = self.race(logits, rows.temperatures, rows.keys, CONTENDERS if any(cut) else 1)
        contenders = list[list[tuple[int, float]]]()
        for own, names in zip(values.tolist(), tokens.tolist(), strict=True):
            contenders.append([*zip(names, own, strict=True)])
        decided, racing = Decided(), [*range(len(contenders))]
        for place in range(values.shape[1]):
            racing = [row for row in racing if contenders[row][place][1] > -math.inf]
            unsure = [row for row in racing if cut[row]]
            lost = set[int]()
            if unsure:
                keeps = self._keeps(
                    *rows.select(unsure, logits), [contenders[row][place][0] for row in unsure]
                )
                lost = {row for row, keep in zip(unsure, keeps, strict=True) if not keep}
            decided |= {row: contenders[row][place] for row in racing if row not in lost}
            racing = [*lost]
            if not racing:
                break
        return decided

    def _keeps(self, rows: SampledRows, logits: Tensor, tokens: Sequence[int]) -> list[bool]:
        """Whether top-p and min-p keep a token of each row."""
        top, places, temperatures = self.largest(logits, 1)[0][:, 0], torch.tensor(tokens), rows.temperatures
        floors, likely = torch.full_like(top, -math.inf), [True] * len(tokens)
        if any(p.min_p > 0 for p in rows.params):
            numbers = logits.gather(1, places[:, None])[:, 0]
            floors = top + temperatures * rows.floors
            likely, floors = (numbers >= floors).tolist(), floors.minimum(numbers)
        before = self.mass_before(logits, temperatures.reciprocal(), top, floors, places).tolist()
        return [fits and mass < p.top_p for fits, mass, p in zip(likely, before, rows.params, strict=True)]


def _first_of_best(tokens: Sequence[int], scores: Sequence[float]) -> tuple[int, float]:
    """The token with the best score, the smallest of equal ones, and the score."""
    best = max(scores)
    return min(token for token, score in zip(tokens, scores, strict=True) if score == best), best
