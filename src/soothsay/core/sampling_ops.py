"""The operations of sampling that depend on the device: noise, the largest numbers, draws, log-probabilities.

The sum of a row may be split by the number of rows on a device, and a row's bits must not depend on other
rows. So everything that reduces over a row stands here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.core import noise
from soothsay.core.functions import log_total, total
from soothsay.core.params import MIN_TEMPERATURE, SamplingParams
from soothsay.core.transfer import download, send, upload
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict

NUCLEUS_WIDTH = 256
"""Number of likeliest tokens among which top-p searches first. A row with a larger nucleus takes more."""

Asked = TypeVar("Asked")


class Draws(NamedTuple):
    """The tokens of M rows, on their device, where they may still be computed."""

    tokens: Tensor  # [M] int64; below 0 where a draw is open
    scores: Tensor  # [M] float32, of these tokens
    again: Callable[[Sequence[int]], Draws] | None = None  # draws rows that are open

    def wait(self) -> tuple[list[int], list[float]]:
        """Tokens and scores, when they are there."""
        if self.again is None and self.tokens.device.type == "cpu":
            return self.tokens.tolist(), self.scores.tolist()
        return self.wait_with()[0]

    def wait_with(self, *others: Tensor) -> tuple[tuple[list[int], list[float]], list[npt.NDArray[Any]]]:
        """`wait`, and other tensors behind the same wait."""
        first, best, *beside = download(self.tokens, self.scores, *others)
        tokens, scores = first.tolist(), best.tolist()
        if self.again and (rows := [row for row, token in enumerate(tokens) if token < 0]):
            for row, token, score in zip(rows, *self.again(rows).wait(), strict=True):
                tokens[row], scores[row] = token, score
        return (tokens, scores), beside

    def among(self, places: Tensor, tokens: Tensor, scores: Tensor) -> Draws:
        """These draws at `places` `[M]` of more rows, which have tokens and scores already."""
        again = self.again
        found = tokens.index_copy(0, places, self.tokens), scores.index_copy(0, places, self.scores)
        if again is None:
            return Draws(*found)

        def drawn_again(rows: Sequence[int]) -> Draws:
            number = {row: own for own, row in enumerate(places.tolist())}
            return again([number[row] for row in rows])

        return Draws(*found, drawn_again)


class DrawnTree(NamedTuple):
    """A tree along which the target's draws are to be followed."""

    tree: DraftTree
    row: int  # of the root's logits; the other nodes' follow
    temperature: float
    seed: int  # of the noise
    position: int  # of the token after the root


@dataclass(frozen=True, eq=False, slots=True)
class SampledRows:
    """What R rows with a temperature above 0 are sampled with, on their device by one copy."""

    params: Sequence[SamplingParams]  # of each row
    numbers: Tensor  # [4, R] float64: temperatures, logarithms of min-p, top-p and top-k (infinity: all)
    keys: Tensor  # [R, 2] int64, of the noise
    has_noise: bool

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]] | None, device: torch.device
    ) -> SampledRows:
        """Rows with these parameters. `keys` are of their noise, two 32-bit words; None: there is none."""
        numbers, words = upload(cls.tables(params, keys), device)
        return cls(params, numbers, words, keys is not None)

    @staticmethod
    def tables(params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]] | None) -> list[Tensor]:
        """`numbers` and `keys`, on the host."""
        numbers = np.array(
            [
                [max(p.temperature, MIN_TEMPERATURE) for p in params],
                [log(p.min_p) for p in params],
                [p.top_p for p in params],
                [p.top_k if p.top_k > 0 else math.inf for p in params],
            ]
        )
        words = np.array([(0, 0)] * len(params) if keys is None else keys)
        return [torch.from_numpy(numbers), torch.from_numpy(words)]

    @property
    def temperatures(self) -> Tensor:
        """`[R]` float32."""
        return self.numbers[0].float()

    @property
    def floors(self) -> Tensor:
        """`[R]` float32: logarithm of min-p."""
        return self.numbers[1].float()

    def select(self, places: Sequence[int], logits: Tensor) -> tuple[SampledRows, Tensor]:
        """Some of the rows, with theirs of `logits`, `[R, V]`."""
        if len(places) == len(self.params):
            return self, logits
        rows = send(places, logits.device)
        params = [self.params[place] for place in places]
        numbers, keys = self.numbers.index_select(1, rows), self.keys.index_select(0, rows)
        return SampledRows(params, numbers, keys, self.has_noise), logits.index_select(0, rows)


class SamplingOps:
    """Stock operations, on any device. A subclass computes some of them in another way, with the same bits.

    M is the number of rows, and V that of tokens. Of equal numbers, the first one comes first where a
    subclass says so; stock operations leave it open but for `argmax`.
    """

    def ahead(self, nodes: Sequence[Asked], device: torch.device) -> Sequence[Asked]:
        """The nodes of a pass that are drawn before a verifier asks for some: none, or all.

        On a CPU a draw takes longer than a question, and most nodes of a tree are never asked for. Any other
        device is asked once, since a wait costs more than all draws.
        """
        return () if device.type == "cpu" else nodes

    def follow(self, logits: Tensor, trees: Sequence[DrawnTree]) -> Sequence[Verdict | None]:
        """The verdicts of `match` on trees whose draws need logits `[M, V]`, temperature and noise alone.

        None: it is not known here, and the verifier has to ask draw by draw.
        """
        return [None] * len(trees)

    def gumbel(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """Standard Gumbel noise, to the bit that of `noise.gumbel`, which has the arguments."""
        return noise.gumbel(keys, tokens)

    def argmax(self, x: Tensor) -> Tensor:
        """The place of each row's largest number, the first of equal ones: `[M, V]` float32 -> `[M]`."""
        return x.argmax(-1)

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The largest numbers of each row, `[M, min(count, V)]` values and places, the largest first.

        Args:
            x: `[M, V]` float32.
            count: how many are wanted in each row.
            factors: `[M]` float32 above 0. With them, values are log-softmax of each row times its factor.
        """
        values, places = x.topk(min(count, x.shape[1]), dim=-1)
        if factors is not None:
            values = (x * factors[:, None]).log_softmax(-1).gather(1, places)
        return values, places

    def race(self, x: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The tokens with the largest `number / temperature + noise`, without the noise of the others.

        Args:
            x: `[M, V]` float32.
            temperatures: `[M]` float32 above 0.
            keys: `[M, 2]` int64, of the noise that `gumbel` gives.
            count: how many are wanted in each row.

        Returns:
            `[M, min(count, V)]` values and tokens, the largest first. Minus infinity may be at any token.
        """
        everything = torch.arange(x.shape[1], device=x.device)[None]
        return self.largest(x / temperatures[:, None] + self.gumbel(keys, everything), count)

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """The probability of all tokens that are likelier than one of them, in each row.

        Args:
            x: `[M, V]` float32.
            factors: `[M]` float32 above 0. Probabilities are the softmax of `factor * x`.
            tops: `[M]`, the largest number of each row.
            floors: `[M]`; tokens with numbers below have probability 0.
            places: `[M]` int64, the token of each row, whose number is at least the floor. Equally likely
                tokens come in order of their ids.

        Returns:
            `[M]` float32.
        """
        own = x.gather(1, places[:, None])
        first = torch.arange(x.shape[1], device=x.device) < places[:, None]
        p = (x.masked_fill(x < floors[:, None], -torch.inf) * factors[:, None]).softmax(-1)
        return total(p * ((x > own) | (x == own) & first))[:, 0]

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities `[M]` of tokens `[M]`; ids and log-probabilities `[M, count]` of the best."""
        logprobs = logits.log_softmax(-1)  # [M, V]
        values, ids = logprobs.topk(count, dim=-1)
        return logprobs.gather(1, tokens[:, None])[:, 0], ids, values

    def log_total(self, x: Tensor) -> Tensor:
        """The logarithm of each row's sum of `e^x`: `[M, n]` float32 -> `[M, 1]`."""
        return log_total(x)

    def running_total(self, probs: Tensor) -> Tensor:
        """Sums of the first 1, 2, ... probabilities of each row: `[M, n]` float32."""
        return probs.cumsum(-1)

    def draw(self, logits: Tensor, rows: SampledRows) -> Draws:
        """The best token of each row of `scores`, and its score."""
        scores = self.scores(logits, rows)
        tokens = self.argmax(scores)
        return Draws(tokens, scores.gather(1, tokens[:, None])[:, 0])

    def scores(self, logits: Tensor, rows: SampledRows, ids: Tensor | None = None) -> Tensor:
        """Logits `[R, V]` divided by temperatures and truncated, plus noise if the rows have some.

        `ids` `[V]` int64 are the tokens that the columns stand for; None: all tokens.
        """
        device, vocab, params = logits.device, logits.shape[1], rows.params
        scaled = logits / rows.temperatures[:, None]
        if any(p.min_p > 0 for p in params):
            floors = scaled.amax(-1, keepdim=True) + rows.floors[:, None]
            scaled = scaled.masked_fill(scaled < floors, -math.inf)
        cut = [row for row, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab]
        full = scaled
        if len(cut) < len(params) and rows.has_noise:
            everything = torch.arange(vocab, device=device) if ids is None else ids
            full = scaled + self.gumbel(rows.keys, everything[None])
        width = min(NUCLEUS_WIDTH, vocab)
        while cut:
            own, some = rows.select(cut, scaled)
            values, tokens, complete = self.nucleus(some, own, width)
            if rows.has_noise:
                values = values + self.gumbel(own.keys, tokens if ids is None else ids[tokens])
            kept = torch.full_like(some, -math.inf).scatter_reduce_(1, tokens, values, "amax")
            full = kept if len(cut) == len(params) else full.index_copy(0, send(cut, device), kept)
            if width == vocab or all(0 < p.top_k <= width for p in own.params):
                break
            [done] = download(complete)
            cut = [row for row, is_done in zip(cut, done.tolist(), strict=True) if not is_done]
            width = min(16 * width, vocab)
        return full

    def nucleus(self, logits: Tensor, rows: SampledRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k, then top-p among the rest, within the `width` likeliest tokens.

        Returns:
            `[R, width]` logits, minus infinity for tokens that are cut; `[R, width]` their tokens; and `[R]`
            whether `width` was enough.
        """
        vocab = logits.shape[1]
        top_k, top_p = rows.numbers[3, :, None].clamp(max=vocab), rows.numbers[2, :, None].float()
        values, tokens = self.largest(logits, width)  # [R, width]
        values = values.masked_fill(torch.arange(width, device=logits.device) >= top_k, -math.inf)
        whole = torch.where(top_k <= width, self.log_total(values), self.log_total(logits))
        probs = (values - whole).exp()
        reached = self.running_total(probs)
        values = values.masked_fill(reached - probs >= top_p, -math.inf)
        in_sight = (top_k == vocab) & (reached[:, -1:] >= top_p)  # with a larger top_k, the total is unknown
        complete = (width == vocab) | (top_k <= width) | in_sight
        return values, tokens, complete[:, 0]


def log(share: float) -> float:
    """The logarithm of a share; minus infinity for 0."""
    return math.log(share) if share > 0 else -math.inf
