"""The automaton in C against the one of lists and dictionaries, match by match and tree by tree."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from kernels import FASTEST, STOCK

from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.automaton import Automaton, Matcher, Reading, StockAutomaton
from soothsay.drafters.ops.continuations import KnownNoise
from soothsay.drafters.ops.native_draft_ops import NativeAutomaton, NativeDraftOps, draft_ops

COUNTED = 6


def grown(
    matcher: Matcher, nodes: int, depth: int, draws: KnownNoise | None = None
) -> tuple[list[float], ...]:
    tree = DraftTree(0)
    matcher.grow(tree, nodes, depth, draws)
    return [*tree.tokens], [*tree.parents], tree.scores


@pytest.mark.parametrize("letters", [2, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_both_say_the_same(ops: NativeDraftOps, seed: int, letters: int) -> None:
    """Two automata read texts in turns. A matcher watches both, one or none of them while they grow."""
    rng = np.random.default_rng(seed)
    kinds: list[list[Automaton]] = [
        [StockAutomaton(COUNTED) for _ in range(3)],
        [ops.automaton(COUNTED) for _ in range(3)],
    ]
    matchers = [automata[2].matcher(2.0) for automata in kinds]
    texts = [[Reading() for _ in range(3)] for _ in kinds]
    said: list[int] = []
    lengths = set()
    for _ in range(150):
        tokens, other = (rng.integers(0, letters, int(rng.integers(0, 9))) for _ in range(2))
        text, which = int(rng.integers(3)), int(rng.integers(2))
        watched = [one for one in range(2) if rng.random() < 0.7] if rng.random() < 0.5 else None
        end = np.array(said[-COUNTED:], dtype=np.int64)
        said += tokens.tolist()
        if rng.random() < 0.5:  # a match that was missed is not caught up with
            other = np.array(said[-5:], dtype=np.int64)
        for automata, matcher, readings in zip(kinds, matchers, texts, strict=True):
            if watched is not None:
                matcher.watch([(automata[one], 8.0) for one in watched], end)
            matcher.read(tokens)
            automata[0].read(readings[text], other)
            if which:
                automata[1].read(Reading(), other)
        stock, native = texts
        assert [(one.end, one.counted) for one in native] == [(one.end, one.counted) for one in stock]
        assert [one.size for one in kinds[1]] == [one.size for one in kinds[0]]
        assert matchers[1].longest == matchers[0].longest
        lengths.add(matchers[0].longest)
        nodes, depth = int(rng.integers(1, 40)), int(rng.integers(0, 9))
        noise, first = int(rng.integers(-(2**63), 2**63)), int(rng.integers(0, 2**31))
        for draws in (None, KnownNoise(noise, first, *rng.uniform(0, 4, 2).tolist())):
            expected, found = (grown(matcher, nodes, depth, draws) for matcher in matchers)
            assert found == expected
    assert lengths >= {1, 2} or letters == 2


def test_a_large_one_is_the_same_and_goes_with_its_owner(ops: NativeDraftOps) -> None:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.geometric(0.02, 20_000), 9_000)
    both: list[Automaton] = [StockAutomaton(33), ops.automaton(33)]
    readings = Reading(), Reading()
    for automaton, reading in zip(both, readings, strict=True):
        automaton.read(reading, tokens)
    assert (readings[0].end, readings[0].counted) == (readings[1].end, readings[1].counted)
    own = [StockAutomaton(33), ops.automaton(33)]
    matchers = [automaton.matcher(2.0) for automaton in own]
    for begin in range(0, 19_000, 500):
        for automaton, matcher in zip(both, matchers, strict=True):
            matcher.watch([], tokens[:0])
            matcher.watch([(automaton, 2.0)], tokens[begin : begin + 40])
        assert matchers[0].longest == 32
        assert grown(matchers[1], 60, 12) == grown(matchers[0], 60, 12)
    del both, own, automaton
    gc.collect()
    assert len(grown(matchers[1], 60, 12)[0]) > 1  # a matcher keeps what it watches


def test_kernels_choose_the_automaton() -> None:
    assert isinstance(draft_ops(STOCK).automaton(5), StockAutomaton)
    if FASTEST is not STOCK:
        assert isinstance(draft_ops(FASTEST).automaton(5), NativeAutomaton)
