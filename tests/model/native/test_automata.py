"""The automaton in C against the one of lists and dictionaries, state by state and tree by tree."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from kernels import STOCK

from soothsay.core.automaton import NOWHERE, Draws, Reading
from soothsay.core.tree import DraftTree
from soothsay.drafters.lookup.backoff import LEAST, WIDEST
from soothsay.drafters.lookup.stock_automaton import StockAutomaton, new_automaton
from soothsay.model.native.automata import NativeAutomaton
from soothsay.model.native.kernels import NativeKernels

COUNTED = 6


@pytest.mark.parametrize("letters", [2, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_both_say_the_same(kernels: NativeKernels, seed: int, letters: int) -> None:
    """Several texts are read in turns into one automaton. A second one reads only some of them."""
    rng = np.random.default_rng(seed)
    stock = [StockAutomaton(COUNTED) for _ in range(2)]
    native = [kernels.automaton(COUNTED, WIDEST, LEAST) for _ in range(2)]
    texts = [(Reading(), Reading()) for _ in range(3)]
    place = [NOWHERE, NOWHERE]
    lengths = set()
    for _ in range(150):
        tokens = rng.integers(0, letters, int(rng.integers(0, 9)))
        number = int(rng.integers(0, 3))
        there = [native[which].follow(at, tokens) for which, at in enumerate(place)]
        place = [stock[which].follow(at, tokens) for which, at in enumerate(place)]
        assert there == place
        lengths.add(place[0][1])
        one, other = texts[number]
        stock[0].read(one, tokens)
        native[0].read(other, tokens)
        if number == 2:
            stock[1].read(Reading(), tokens)
            native[1].read(Reading(), tokens)
        assert (one.end, one.counted) == (other.end, other.counted)
        assert [each.size for each in native] == [each.size for each in stock]
        repeated = stock[0].repeated(one)
        assert native[0].repeated(other) == repeated
        places = [(0, 2.0, repeated), (0, 8.0, place[0]), (1, 8.0, place[1])]
        known = [(which, doubt, at) for which, doubt, at in places if at[1]]
        if known:
            nodes, depth = int(rng.integers(1, 40)), int(rng.integers(0, 9))
            seed, first = int(rng.integers(-(2**63), 2**63)), int(rng.integers(0, 2**31))
            for draws in (None, Draws(seed, first, *rng.uniform(0, 4, 2).tolist())):
                expected, tree = DraftTree(0), DraftTree(0)
                own, others = ([(of[w], *rest) for w, *rest in known] for of in (stock, native))
                StockAutomaton.grow(expected, own, nodes, depth, draws)
                type(native[0]).grow(tree, others, nodes, depth, draws)
                assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
                assert tree.scores == expected.scores
    assert lengths >= {0, 1, 2} or letters == 2


def test_a_large_one_is_the_same_and_goes_with_its_owner(kernels: NativeKernels) -> None:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.geometric(0.02, 20_000), 9_000)
    stock, native = StockAutomaton(33), kernels.automaton(33, WIDEST, LEAST)
    readings = Reading(), Reading()
    stock.read(readings[0], tokens)
    native.read(readings[1], tokens)
    assert (readings[0].end, readings[0].counted) == (readings[1].end, readings[1].counted)
    for begin in range(0, 19_000, 500):
        part = tokens[begin : begin + 40]
        place = stock.follow(NOWHERE, part)
        assert native.follow(NOWHERE, part) == place
        expected, tree = DraftTree(0), DraftTree(0)
        stock.grow(expected, [(stock, 2.0, place)], 60, 12)
        native.grow(tree, [(native, 2.0, place)], 60, 12)
        assert (tree.tokens, tree.scores) == (expected.tokens, expected.scores)
    del native
    gc.collect()


def test_kernels_choose_the_automaton(kernels: NativeKernels) -> None:
    assert isinstance(new_automaton(5, kernels), NativeAutomaton)
    assert isinstance(new_automaton(5, STOCK), StockAutomaton)
