"""`SamplingOps` on a GPU: no operation sums floats over a row, and draws of all nodes wait once.

Whatever reduces over a row is a maximum or a sum of whole numbers, which are exact in any order. Numbers are
compared by ranks: 64-bit integers that hold a float's bits and its token, so no two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from soothsay.core.drawing import CONTENDERS
from soothsay.core.sampling_ops import Asked, Draws, SampledRows, SamplingOps
from soothsay.model.gpu.launching import launch
from soothsay.model.gpu.source import draws

BLOCK = 1024
"""Tokens of a part of a row."""

FEW = 16
"""Numbers of a part that are looked for one after the other. More are found by sorting all ranks."""

UNITS = 2.0**40
"""Units of mass of the likeliest token. A sum over a vocabulary of 2^23 tokens fits 63 bits."""


class GpuSampling(SamplingOps):
    """Kernels of Triton, and operations of PyTorch that are exact. Equal numbers come in order of tokens."""

    def ahead(self, nodes: Sequence[Asked], device: torch.device) -> Sequence[Asked]:
        """See `SamplingOps`."""
        return nodes

    def gumbel(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """See `SamplingOps`."""
        keys, tokens = keys.contiguous(), tokens.contiguous()
        rows, width = len(keys), tokens.shape[1]
        out = torch.empty(rows, width, device=keys.device)
        stride = 0 if len(tokens) == 1 else width
        launch(draws.noise, (rows, _parts(width)), keys, tokens, out, stride, width, BLOCK=BLOCK)
        return out

    def argmax(self, x: Tensor) -> Tensor:
        """See `SamplingOps`."""
        return self.largest(x, 1)[1][:, 0]

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `SamplingOps`."""
        x, count = x.contiguous(), min(count, x.shape[1])
        values, tokens = _decoded(self._largest_ranks(x, count))
        if factors is not None:
            temperatures = factors.reciprocal()
            values = values / temperatures[:, None] - self._log_total(x, temperatures)
        return values, tokens

    def race(self, x: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `SamplingOps`."""
        return _Race(x, temperatures).run(keys, min(count, x.shape[1]))

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """See `SamplingOps`."""
        temperatures = factors.reciprocal()
        race = _Race(x, temperatures, floors / temperatures)
        masses = race.masses(tops / temperatures, places[:, None])  # [M, 2]
        return (masses[:, 0] / masses[:, 1]).float()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `SamplingOps`."""
        whole = self.log_total(logits)
        values, ids = self.largest(logits, count)
        return (logits.gather(1, tokens[:, None]) - whole)[:, 0], ids, values - whole

    def draw(self, logits: Tensor, rows: SampledRows) -> Draws:
        """See `SamplingOps`.

        Top-p is asked of `CONTENDERS` tokens. If it cuts all of them, the row is drawn again, behind another
        wait.
        """
        logits, params, vocab = logits.contiguous(), rows.params, logits.shape[1]
        tops = logits.amax(-1) / rows.temperatures
        race = _Race(logits, rows.temperatures, tops + rows.floors)
        if any(0 < p.top_k < vocab for p in params):
            race.lasts = self._last_ranks(logits, rows)
        count = min(CONTENDERS, vocab) if any(p.top_p < 1 for p in params) else 1
        values, tokens = race.run(rows.keys, count)
        if count == 1:
            return Draws(tokens[:, 0], values[:, 0])
        masses = race.masses(tops, tokens)  # [R, count + 1] float64
        kept = masses[:, :-1] < rows.numbers[2, :, None] * masses[:, -1:]
        kept |= ~values[:, :1].isfinite()  # there is nothing to draw
        places = torch.arange(count, device=logits.device).where(kept, count).amin(-1, keepdim=True)
        first = places.clamp(max=count - 1)
        drawn = tokens.gather(1, first).masked_fill(places == count, -1)[:, 0]

        def again(open_rows: Sequence[int]) -> Draws:
            own, some = rows.select(open_rows, logits)
            return super(GpuSampling, self).draw(some, own)

        return Draws(drawn, values.gather(1, first)[:, 0], again)

    def log_total(self, x: Tensor) -> Tensor:
        """See `SamplingOps`."""
        return self._log_total(x, torch.ones(len(x), device=x.device))

    def running_total(self, probs: Tensor) -> Tensor:
        """See `SamplingOps`."""
        return ((probs.double() * UNITS).long().cumsum(-1).double() / UNITS).float()

    def _log_total(self, x: Tensor, temperatures: Tensor) -> Tensor:
        """The logarithm of each row's sum of `e^(x / temperature)`: `[M, 1]`."""
        tops = x.amax(-1) / temperatures
        none = torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
        whole = _Race(x, temperatures).masses(tops, none)[:, 0]
        return (tops + (whole / UNITS).log().float())[:, None]

    def _largest_ranks(self, x: Tensor, count: int) -> Tensor:
        """`[M, count]` int64, the largest first."""
        if count <= FEW and count:
            return _best(x, count)
        every = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        launch(draws.ranks, (len(x), _parts(x.shape[1])), x, every, x.shape[1], BLOCK=BLOCK)
        return every.topk(count, dim=-1).values

    def _last_ranks(self, logits: Tensor, rows: SampledRows) -> Tensor:
        """`[R]` int64, the least rank that top-k keeps."""
        vocab = logits.shape[1]
        ranks = self._largest_ranks(logits, max(p.top_k for p in rows.params if p.top_k < vocab))
        top_k = rows.numbers[3, :, None]
        last = ranks.gather(1, (top_k.clamp(max=ranks.shape[1]) - 1).long())
        return last.masked_fill(top_k >= vocab, NO_RANK)[:, 0]


NO_RANK = -(2**63)
"""Below all ranks."""


class _Race:
    """Rows of numbers of which some tokens are cut.

    Args:
        x: `[M, V]` float32.
        temperatures: `[M]`, by which they are divided.
        floors: `[M]`, tokens are cut whose numbers are below them after the division; None: none are.
    """

    def __init__(self, x: Tensor, temperatures: Tensor, floors: Tensor | None = None):
        self.x, self.temperatures = x.contiguous(), temperatures
        self.floors = x.new_full((len(x),), -math.inf) if floors is None else floors
        self.lasts = torch.full((len(x),), NO_RANK, device=x.device)  # tokens of lower ranks are cut

    def run(self, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The values and tokens `[M, count]` with the largest number / temperature + noise."""
        rows = self.temperatures, self.floors, self.lasts, keys.contiguous()
        return _decoded(_best(self.x, count, *rows))

    def masses(self, tops: Tensor, tokens: Tensor) -> Tensor:
        """`[M, n + 1]` float64, in units: the mass before each of tokens `[M, n]`, and the whole mass."""
        rows, vocab, count = *self.x.shape, tokens.shape[1]
        out = torch.empty(rows, _parts(vocab), count + 1, dtype=torch.int64, device=self.x.device)
        given = self.x, self.temperatures, tops, self.floors, self.lasts, tokens.contiguous()
        launch(draws.masses, out.shape[:2], *given, out, vocab, COUNT=count, BLOCK=BLOCK)
        return out.sum(1).double()


def _best(x: Tensor, count: int, *noisy: Tensor) -> Tensor:
    """The ranks `[M, count]` of the best, the best first. `noisy`: what noise needs, see the kernel."""
    rows, parts = len(x), _parts(x.shape[1])
    out = torch.empty(rows, parts, count, dtype=torch.int64, device=x.device)
    given, has_noise = noisy or (x, x, x, x), bool(noisy)
    constants = {"COUNT": count, "HAS_NOISE": has_noise, "BLOCK": BLOCK}
    launch(draws.best, (rows, parts), x, *given, out, x.shape[1], **constants)
    return out[:, :, 0].amax(1, keepdim=True) if count == 1 else out.view(rows, -1).topk(count, dim=-1).values


def _decoded(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers and tokens that ranks stand for."""
    bits = (ranks >> 32).int()
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).view(torch.float32), 0xFFFFFFFF - (ranks & 0xFFFFFFFF)


def _parts(width: int) -> int:
    return -(-width // BLOCK)
