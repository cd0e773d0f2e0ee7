"""Rules that read and change states: native kernels against stock operations, and bits that stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from soothsay.core.states import LayerStates, StatePool
from soothsay.core.strands import Strand, Strands
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.ops.state_ops import Recurrence, SelectiveScan, StateSpace, TokenRule
from soothsay.model.specs.state_specs import DeltaSpec, KimiDeltaSpec, SelectiveSpec, StateSpaceSpec

STOCK = StockKernels()
DTYPES = [torch.float32, torch.bfloat16]
EPS = {"norm_eps": 1e-3}
SIZES = {
    # three columns of 16
    "groups": DeltaSpec(**EPS, key_heads=2, value_heads=4, key_size=32, value_size=48, taps=4),
    "tiled": DeltaSpec(**EPS, key_heads=2, value_heads=4, key_size=16, value_size=32, taps=2, tiled=True),
    "plain": DeltaSpec(**EPS, key_heads=3, value_heads=3, key_size=16, value_size=16, taps=3),
    "kimi": KimiDeltaSpec(
        **EPS,
        **{"key_heads": 3, "value_heads": 3, "key_size": 16, "value_size": 48, "taps": 3, "rank": 16},
    ),
    "space": StateSpaceSpec(**EPS, heads=4, head_size=48, groups=2, state_size=32, taps=4),
    "norm first": StateSpaceSpec(
        **EPS, heads=4, head_size=32, groups=4, state_size=16, taps=3, norm_first=True
    ),
    "not normed": StateSpaceSpec(**EPS, heads=3, head_size=16, groups=1, state_size=16, taps=2, normed=False),
    "selective": SelectiveSpec(size=48, state_size=32, rank=16, taps=3),
}
PARENTS = [-1, 0, 0, 1, 1, 3, 2, 5, 7, 7, 4, 3]


Spec = DeltaSpec | StateSpaceSpec | SelectiveSpec


class Rule:
    """Random weights and rows, and a pool of states that were not zero before."""

    def __init__(self, config: Spec, dtype: torch.dtype, rows: int = 150):
        torch.manual_seed(0)
        self.config, self.dtype = config, dtype
        self.weights = weights = _weights(config).requires_grad_(False)
        for vector in weights.parameters():
            if vector is not weights.taps:
                vector.normal_()
        self.rows = torch.randn(rows, config.state.channels + weights.outputs).to(dtype)
        self.gates = torch.randn(rows, config.state.gates).to(dtype)

    def pool(self) -> LayerStates:
        """Four slots for requests, two for snapshots."""
        pool = StatePool({0: self.config.state}, 4, 2, 16, self.dtype, torch.device("cpu"))
        layer = pool.layers[0]
        for part, seed in zip(layer, range(4), strict=True):
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
        plan = Strands(tuple(strands))
        return self.apply(kernels, self.rows[rows], self.gates[rows], states, plan)

    def apply(
        self, kernels: Kernels, rows: Tensor, gates: Tensor, states: LayerStates | None, plan: Strands
    ) -> Tensor:
        """Outputs of rows and gates."""
        return kernels.token_rule(rows, gates, self.weights, states, plan)


def _weights(config: Spec) -> TokenRule:
    if isinstance(config, SelectiveSpec):
        return SelectiveScan(config)
    return Recurrence(config) if isinstance(config, DeltaSpec) else StateSpace(config)


@pytest.fixture(params=SIZES.values(), ids=SIZES.keys())
def config(request: pytest.FixtureRequest) -> Spec:
    chosen: Spec = request.param
    return chosen


def close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert (result.float() - expected.float()).abs().max() < 1e-4 * expected.float().abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_like_stock_operations(kernels: NativeKernels, config: Spec, dtype: torch.dtype) -> None:
    """A new prompt that leaves snapshots, chunks that go on, trees on old and new states, a later level."""
    rule = Rule(config, dtype)
    strands = [
        Strand(0, 70, 0, (), slot=0, marks=((2, 4), (64, 5))),
        Strand(70, 2, 0, PARENTS, slot=1, is_new=False),
        Strand(84, 0, 4, PARENTS, slot=2, is_new=False),  # four nodes are in the journal
        Strand(92, 0, 0, PARENTS[:1], slot=3),
    ]
    found, expected = rule.pool(), rule.pool()
    close(rule.run(kernels, strands, found), rule.run(STOCK, strands, expected))
    for part, other in zip(found, expected, strict=True):
        close(part, other)
    within = [Strand(0, 40, 0, PARENTS), Strand(52, 3, 0, ())]
    close(rule.run(kernels, within, None), rule.run(STOCK, within, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows(kernels: NativeKernels, config: Spec, dtype: torch.dtype) -> None:
    """Rows of zeros have no direction, and some steps are too large for an exponential."""
    rule, strands = Rule(config, dtype), [Strand(0, 30, 0, ())]
    rule.rows[:8, : config.state.channels] = 0
    rule.gates[12:15], rule.gates[15:18] = 200, -200
    found = rule.run(kernels, strands, None)
    assert found.isfinite().all()
    close(found, rule.run(STOCK, strands, None))


def test_threads_share_heads_and_strands(kernels: NativeKernels, config: Spec) -> None:
    rule, strands = Rule(config, torch.float32, 1000), [Strand(0, 900, 0, ()), Strand(900, 80, 0, PARENTS)]
    alone = rule.run(kernels, strands, None)
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            assert torch.equal(rule.run(kernels, strands, None), alone)
    finally:
        torch.set_num_threads(1)


def test_threads_share_the_rows_of_a_convolution(kernels: NativeKernels) -> None:
    """Rows of milliseconds, since a worker needs a moment to begin."""
    scan = SelectiveScan(SelectiveSpec(size=48, state_size=32, rank=16, taps=3))
    rows = torch.randn(30_000, 48)
    plan = Strands((Strand(0, len(rows), 0, ()),))
    alone = kernels.convolved(rows, scan, None, plan)
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            assert torch.equal(kernels.convolved(rows, scan, None, plan), alone)
    finally:
        torch.set_num_threads(1)


def test_gates_of_another_type(kernels: NativeKernels, config: Spec) -> None:
    """They may come from a layer that stock operations multiply."""
    rule, plan = Rule(config, torch.bfloat16), Strands((Strand(0, 20, 0, ()),))
    rows, gates = rule.rows[:20], rule.gates[:20]
    found = rule.apply(kernels, rows, gates.float(), None, plan)
    assert torch.equal(found, rule.apply(kernels, rows, gates, None, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_chunks_of_a_prompt(kernels: NativeKernels, config: Spec, dtype: torch.dtype, size: int) -> None:
    """Any chunks, in any company, give the bits of single tokens; and snapshots those of states."""
    rule = Rule(config, dtype)
    plain, chunked, length, border = rule.pool(), rule.pool(), 100, 48
    one_by_one = []
    for i in range(length):
        strand = Strand(0, 1, 0, (), slot=0, is_new=i == 0)
        one_by_one.append(rule.run(kernels, [strand], plain, [i]))
        if i + 1 == border:
            snapshot = [part[0].clone() for part in plain[:2]]
    parts = []
    for begin in range(0, length, size):
        own = range(begin, min(begin + size, length))
        marks = ((border - begin, 5),) if begin < border <= own[-1] + 1 else ()
        other = Strand(0, 3, 0, (), slot=1)
        strand = Strand(3, len(own), 0, (), slot=0, is_new=begin == 0, marks=marks)
        parts.append(rule.run(kernels, [other, strand], chunked, [140, 141, 142, *own])[3:])
    assert torch.equal(torch.cat(parts), torch.cat(one_by_one))
    for part, expected in zip(chunked[:2], plain[:2], strict=True):
        assert torch.equal(part[0], expected[0])
    for part, expected in zip(chunked[:2], snapshot, strict=True):
        assert torch.equal(part[5], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nodes_of_a_tree(kernels: NativeKernels, config: Spec, dtype: torch.dtype) -> None:
    """Each node has the bits of its path's tokens one by one; the accepted path gives their state."""
    rule = Rule(config, dtype)
    states = rule.pool()
    before = [part.clone() for part in states]
    tree = rule.run(kernels, [Strand(0, 0, 0, PARENTS, slot=0, is_new=False)], states)
    assert torch.equal(states.matrices, before[0])
    assert torch.equal(states.inputs, before[1])
    begin = [part[0].clone() for part in states[:2]]
    for part, own in zip(states[:2], begin, strict=True):
        part[1] = own  # the same state, grown level by level
    levels = rule.run(kernels, [Strand(0, 0, 0, PARENTS[:5], slot=1, is_new=False)], states)
    rest = Strand(0, 0, 5, PARENTS, slot=1, is_new=False)
    levels = torch.cat([levels, rule.run(kernels, [rest], states, range(5, len(PARENTS)))])
    assert torch.equal(levels, tree)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = [leaf]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        for part, own in zip(states[:2], begin, strict=True):
            part[2], part[3] = own, own
        for node in path:
            found = rule.run(kernels, [Strand(0, 1, 0, (), slot=2, is_new=False)], states, [node])
            assert torch.equal(found[0], tree[node])
        rows, gates = states.journal[0, path], states.gates[0, path]
        strands = Strands((Strand(0, len(path), 0, (), slot=3, is_new=False),))
        rule.apply(kernels, rows, gates, states, strands)
        for part in states[:2]:
            assert torch.equal(part[3], part[2])
