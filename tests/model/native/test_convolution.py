"""Short convolutions: the bits of stock operations, whatever stands beside a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from soothsay.core.state_shape import StateShape
from soothsay.core.states import LayerStates, StatePool
from soothsay.core.strands import Strand, Strands
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.kernels import Kernels, StockKernels

STOCK = StockKernels()
DTYPES = [torch.float32, torch.bfloat16]
PARENTS = [-1, 0, 0, 1, 1, 3, 2, 5, 7, 7, 4, 3]


class Convolution:
    """Random taps and rows, and a pool of states that were not zero before."""

    def __init__(self, taps: int, dtype: torch.dtype, channels: int = 80, rows: int = 150):
        torch.manual_seed(0)
        self.shape, self.dtype = StateShape(channels, taps), dtype
        self.taps = torch.randn(taps, channels)
        self.rows = torch.randn(rows, channels).to(dtype)

    def pool(self) -> LayerStates:
        """Four slots for requests, two for snapshots."""
        layer = StatePool({0: self.shape}, 4, 2, 16, self.dtype, torch.device("cpu")).layers[0]
        for part, seed in zip((layer.inputs, layer.journal), range(2), strict=True):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
        return layer

    def run(
        self,
        kernels: Kernels,
        strands: Sequence[Strand],
        states: LayerStates | None,
        chosen: Sequence[int] | None = None,
    ) -> Tensor:
        """Outputs of the chosen rows, which are those of `strands`."""
        rows = torch.tensor(range(strands[-1].end) if chosen is None else chosen)
        return kernels.convolve(self.rows[rows], self.taps, states, Strands(tuple(strands)))


@pytest.fixture(params=[2, 3, 5], ids="{} taps".format)
def taps(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def equal_pools(found: LayerStates, expected: LayerStates) -> bool:
    return torch.equal(found.inputs, expected.inputs) and torch.equal(found.journal, expected.journal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_stock_operations(kernels: NativeKernels, taps: int, dtype: torch.dtype) -> None:
    """A new prompt that leaves snapshots, chunks that go on, trees on old and new states, a later level."""
    convolution = Convolution(taps, dtype)
    strands = [
        Strand(0, 70, 0, (), slot=0, marks=((1, 4), (64, 5))),
        Strand(70, 2, 0, PARENTS, slot=1, is_new=False),
        Strand(84, 0, 4, PARENTS, slot=2, is_new=False),  # four nodes are in the journal
        Strand(92, 0, 0, PARENTS[:1], slot=3),
    ]
    found, expected = convolution.pool(), convolution.pool()
    assert torch.equal(convolution.run(kernels, strands, found), convolution.run(STOCK, strands, expected))
    assert equal_pools(found, expected)
    within = [Strand(0, 40, 0, PARENTS), Strand(52, 3, 0, ())]
    assert torch.equal(convolution.run(kernels, within, None), convolution.run(STOCK, within, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_of_a_prompt(kernels: NativeKernels, taps: int, dtype: torch.dtype, size: int) -> None:
    """Any chunks, in any company, give the bits of single tokens."""
    convolution, length = Convolution(taps, dtype), 100
    plain, chunked = convolution.pool(), convolution.pool()
    one_by_one = [
        convolution.run(kernels, [Strand(0, 1, 0, (), slot=0, is_new=i == 0)], plain, [i])
        for i in range(length)
    ]
    parts = []
    for begin in range(0, length, size):
        own = range(begin, min(begin + size, length))
        strands = [Strand(0, 3, 0, (), slot=1), Strand(3, len(own), 0, (), slot=0, is_new=begin == 0)]
        parts.append(convolution.run(kernels, strands, chunked, [140, 141, 142, *own])[3:])
    assert torch.equal(torch.cat(parts), torch.cat(one_by_one))
    assert torch.equal(chunked.inputs[0], plain.inputs[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nodes_of_a_tree(kernels: NativeKernels, taps: int, dtype: torch.dtype) -> None:
    """Each node has the bits of its path's tokens one by one; the accepted path gives their state."""
    convolution = Convolution(taps, dtype)
    states = convolution.pool()
    begin = states.inputs[0].clone()
    tree = convolution.run(kernels, [Strand(0, 0, 0, PARENTS, slot=0, is_new=False)], states)
    assert torch.equal(states.inputs[0], begin)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = [leaf]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        states.inputs[2], states.inputs[3] = begin, begin
        for node in path:
            found = convolution.run(kernels, [Strand(0, 1, 0, (), slot=2, is_new=False)], states, [node])
            assert torch.equal(found[0], tree[node])
        strands = Strands((Strand(0, len(path), 0, (), slot=3, is_new=False),))
        kernels.convolve(states.journal[0, path], convolution.taps, states, strands)
        assert torch.equal(states.inputs[3], states.inputs[2])


@pytest.mark.parametrize("gated", [False, True])
def test_threads_change_no_bit(kernels: NativeKernels, gated: bool) -> None:
    """Rows of milliseconds, since a worker needs a moment to begin."""
    convolution = Convolution(4, torch.float32, rows=20_000)
    rows = convolution.rows.repeat(1, 3 if gated else 1)
    plan = Strands((Strand(0, len(rows), 0, ()),))
    convolve = kernels.gated_convolve if gated else kernels.convolve
    alone = convolve(rows.clone(), convolution.taps, None, plan)
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            assert torch.equal(convolve(rows.clone(), convolution.taps, None, plan), alone)
    finally:
        torch.set_num_threads(1)
