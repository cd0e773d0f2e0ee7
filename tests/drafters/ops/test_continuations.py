"""Growing the likeliest tree, against exhaustive enumeration."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from kernels import STOCK_OPS

from soothsay.core.arrays import FloatArray
from soothsay.core.noise import exponential, noise_key
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.ops.continuations import (
    LEAST,
    Followers,
    KnownNoise,
    Source,
    grow_continuations,
    known_noise,
)

Words = tuple[int, ...]


class Table(Source[Words]):
    """Random counts after each context of up to two tokens, and a random discount."""

    def __init__(self, seed: int, letters: int = 3):
        self.rng = np.random.default_rng(seed)
        self.letters = letters
        self.counts: dict[Words, Followers] = {}

    def followers(self, context: Words) -> Followers:
        if context not in self.counts:
            tokens = self.rng.permutation(self.letters)[: int(self.rng.integers(0, self.letters + 1))]
            counts = [(int(token), int(self.rng.integers(1, 9))) for token in tokens]
            total = sum(count for _, count in counts)
            self.counts[context] = Followers(counts, total, len(counts), float(self.rng.uniform(0.1, 1.0)))
        return self.counts[context]

    def shorter(self, context: Words) -> Words | None:
        return context[1:] if len(context) > 1 else None

    def after(self, context: Words, token: int) -> Words:
        return (*context, token)[-2:]

    def guesses(self, context: Words, path: float) -> dict[int, float]:
        """Each token by the longest context that has it; contexts as long as they have mass."""
        found: dict[int, float] = {}
        left = 1.0
        step: Words | None = context
        while step is not None and path * left >= LEAST:
            counts, total, distinct, doubt = self.followers(step)
            for token, count in counts:
                found[token] = max(found.get(token, 0.0), left * (count - doubt) / total)
            left *= min(doubt * distinct / total, 1.0) if total else 1.0
            step = self.shorter(step)
        return found


def enumerate_paths(table: Table, depth: int, draws: KnownNoise | None) -> dict[Words, float]:
    paths: dict[Words, float] = {(): 1.0}
    level = {(): ((7, 8), 1.0)}
    for number in range(depth):
        below = {}
        for path, (context, probability) in level.items():
            for token, share in table.guesses(context, probability).items():
                guess = share if draws is None else draws.probability(share, number, token)
                if probability * guess > LEAST:
                    below[(*path, token)] = (table.after(context, token), probability * guess)
        paths |= {path: probability for path, (_, probability) in below.items()}
        level = below
    return paths


def says(tree: DraftTree) -> dict[Words, float]:
    return {
        tuple(tree.tokens[n] for n in tree.path(node)[1:]): math.exp(tree.scores[node])
        for node in range(len(tree))
    }


@pytest.mark.parametrize("draws", [None, KnownNoise(7, 40, 2.5, 0.4)])
@pytest.mark.parametrize("seed", range(20))
def test_it_finds_the_likeliest_paths_of_all(seed: int, draws: KnownNoise | None) -> None:
    table = Table(seed)
    expected = enumerate_paths(table, 4, draws)
    tree = DraftTree(8)
    grow_continuations(tree, [(table, (7, 8))], nodes=10_000, depth=4, noise=draws)
    assert says(tree) == pytest.approx(expected)
    best = sorted(expected.values(), reverse=True)
    for nodes in (1, 2, 5, 9):
        tree = DraftTree(8)
        grow_continuations(tree, [(table, (7, 8))], nodes, 4, draws)
        assert len(tree) == min(nodes, len(expected))
        assert sorted(says(tree).values(), reverse=True) == pytest.approx(best[: len(tree)])
        assert all(above >= below for above, below in pairwise(tree.scores)), "the best first"


@pytest.mark.parametrize("seed", range(10))
def test_of_two_sources_the_surer_counts(seed: int) -> None:
    tables = [Table(seed), Table(seed + 100)]
    expected: dict[Words, float] = {}
    for table in tables:
        for path, probability in enumerate_paths(table, 1, None).items():
            expected[path] = max(expected.get(path, 0.0), probability)
    tree = DraftTree(8)
    grow_continuations(tree, [(table, (7, 8)) for table in tables], nodes=100, depth=1)
    assert says(tree) == pytest.approx(expected)


def test_nowhere_to_begin_and_no_room_to_go() -> None:
    for starts, nodes, depth in (([], 9, 9), ([(Table(0), (7, 8))], 1, 9), ([(Table(0), (7, 8))], 9, 0)):
        tree = DraftTree(8)
        grow_continuations(tree, starts, nodes, depth)
        assert len(tree) == 1


class Urn(Source[Words]):
    """Counts of 1,000 draws from a distribution, whatever the context."""

    def __init__(self, probabilities: FloatArray):
        counts = np.random.default_rng(1).multinomial(1000, probabilities)
        self.known = Followers([*enumerate(counts.tolist())], 1000, len(counts), 0.1)

    def followers(self, context: Words) -> Followers:
        return self.known

    def shorter(self, context: Words) -> Words | None:
        return None

    def after(self, context: Words, token: int) -> Words:
        return context


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_known_noise_says_what_will_be_drawn(temperature: float) -> None:
    """A guess that knows the noise is right more often than the likeliest token, whose share is known."""
    logits = torch.linspace(0, -3, 12)
    tempered = torch.softmax(logits / temperature, 0)
    urn, right, tokens = Urn(tempered.double().numpy()), 0, torch.arange(12)[None]
    params = SamplingParams(temperature=temperature)
    for seed in range(400):
        request = Request([5, 6], params, seed=seed, limit=9, drafter=NoDrafter(None))  # type: ignore[arg-type]
        tree = DraftTree(6)
        grow_continuations(tree, [(urn, ())], nodes=2, depth=4, noise=known_noise(request))
        noise = STOCK_OPS.gumbel(torch.tensor([noise_key(seed, 2)]), tokens)[0]
        right += tree.tokens[1:] == [int((logits / temperature + noise).argmax())]
    assert right / 400 > 1.3 * tempered[0]


def test_noise_is_that_of_the_draw() -> None:
    key = noise_key(3, 14)
    noise = STOCK_OPS.gumbel(torch.tensor([key]), torch.arange(100)[None])[0]
    assert noise.tolist() == pytest.approx([-math.log(exponential(key, t)) for t in range(100)], abs=1e-6)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"verifier": "rejection"}])
def test_draws_whose_noise_says_nothing(params: dict[str, Any]) -> None:
    request = Request([5], SamplingParams(**params), seed=1, limit=9, drafter=NoDrafter(None))  # type: ignore[arg-type]
    assert known_noise(request) is None
