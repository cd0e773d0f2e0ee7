"""The operations of sampling in the library: noise, the largest numbers, races."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from soothsay.core.drawing import RacingOps
from soothsay.core.params import MIN_TEMPERATURE
from soothsay.core.sampling_ops import NUCLEUS_WIDTH, DrawnTree
from soothsay.core.verify import Verdict
from soothsay.model.native.library import Library
from soothsay.model.native.native_linear import address

_ZERO = array("q", [0])


def _room(x: Tensor, count: int) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Rows, their width, and how many numbers are looked for; room for these, and for their places."""
    rows, width = x.shape
    count = min(count, width)
    return (rows, width, count), torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)


class NativeSampling(Library, RacingOps):
    """`SamplingOps` in C."""

    def follow(self, logits: Tensor, trees: Sequence[DrawnTree]) -> Sequence[Verdict | None]:
        """See `SamplingOps`. Draws of logits that are not finite are not known here."""
        plan, temperatures, room = array("q"), array("f"), 0
        for tree, row, temperature, seed, position in trees:
            size = len(tree.tokens)
            plan.extend((row, size, seed, position, *tree.tokens, *tree.parents))
            temperatures.append(max(temperature, MIN_TEMPERATURE) if temperature else 0.0)
            room += size + 1
        found = _ZERO * room
        self._loaded.soothsay_follow(  # on as many threads as the pass before it
            *(logits.data_ptr(), logits.size(1), plan.buffer_info()[0], temperatures.buffer_info()[0]),
            *(len(trees), found.buffer_info()[0]),
        )
        verdicts: list[Verdict | None] = []
        numbers, begin = found.tolist(), 0
        for tree, *_ in trees:
            tokens, end = tree.tokens, begin + 1 + numbers[begin]
            path = numbers[begin + 1 : end]
            known = [*map(tokens.__getitem__, path), numbers[end]]
            verdicts.append(Verdict(path, known) if end > begin else None)
            begin += len(tokens) + 1
        return verdicts

    def gumbel(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """See `SamplingOps`."""
        keys, tokens = keys.contiguous(), tokens.contiguous()
        rows, width = len(keys), tokens.shape[1]
        out = torch.empty(rows, width)
        self._library.soothsay_gumbel(
            keys.data_ptr(), tokens.data_ptr(), len(tokens) == 1, rows, width, out.data_ptr()
        )
        return out

    def largest(self, x: Tensor, count: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `SamplingOps`. The first of equal ones; minus infinity is at place 0."""
        if count > NUCLEUS_WIDTH:
            return super().largest(x, count, factors)
        x = x.contiguous()
        sizes, values, places = _room(x, count)
        self._library.soothsay_largest(
            x.data_ptr(), address(factors), *sizes, values.data_ptr(), places.data_ptr()
        )
        return values, places

    def argmax(self, x: Tensor) -> Tensor:
        """See `SamplingOps`."""
        return self.largest(x, 1)[1][:, 0]

    def race(self, x: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `SamplingOps`."""
        x, keys = x.contiguous(), keys.contiguous()
        sizes, values, places = _room(x, count)
        self._library.soothsay_race(
            *(x.data_ptr(), temperatures.data_ptr(), keys.data_ptr()),
            *(*sizes, values.data_ptr(), places.data_ptr()),
        )
        return values, places

    def mass_before(self, x: Tensor, factors: Tensor, tops: Tensor, floors: Tensor, places: Tensor) -> Tensor:
        """See `SamplingOps`."""
        x, rows = x.contiguous(), [factors.contiguous(), tops.contiguous(), floors.contiguous()]
        places, out = places.contiguous(), torch.empty(len(x))
        self._library.soothsay_mass_before(
            x.data_ptr(), *(row.data_ptr() for row in rows), places.data_ptr(), *x.shape, out.data_ptr()
        )
        return out
