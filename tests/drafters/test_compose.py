"""Several drafters as one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_auto import FLAT, TARGET, Scripted, World, future, run

from soothsay import SamplingParams
from soothsay.drafters.base import Drafter, Observation
from soothsay.drafters.compose import Cascade, Merged, merge
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Verdict


class Taps(Drafter):
    """Keeps what it is shown."""

    def __init__(self, *taps: int):
        self.taps = taps
        self.seen: list[Observation] = []
        self.released: list[Request] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree(int(request.tokens[-1])) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, request: Request) -> None:
        self.released.append(request)


def request() -> Request:
    params = SamplingParams(temperature=0, max_tokens=10)
    return Request([1, 2, 3], params, seed=0, limit=20, drafter=Taps())


def test_each_part_sees_the_layers_that_it_asked_for_and_every_release() -> None:
    parts = [Taps(4, 2), Taps(), Taps(4)]
    one = Merged(TARGET, parts)
    assert one.taps == (4, 2, 4)
    asked = request()
    trees = one.propose([asked])
    layers = tuple(torch.full((1, 3), float(tap)) for tap in one.taps)
    one.observe([Observation(asked, 2, 1, layers, trees[0], None, Verdict([], [9]))])
    one.release(asked)
    for part in parts:
        assert [int(tap[0, 0]) for tap in part.seen[0].taps] == list(part.taps)
        assert part.released == [asked]


def test_merging_keeps_every_path_and_the_best_scores() -> None:
    a, b = DraftTree(7), DraftTree(7)
    a.extend([1, 2], -0.5)
    b.extend([1, 3], -0.2)
    b.extend([4], -0.9)
    merged = merge([a, b])
    paths = {tuple(merged.tokens[node] for node in path) for path in merged.paths()}
    assert paths == {(7, 1, 2), (7, 1, 3), (7, 4)}
    assert merged.scores[merged.walk([1])[-1]] == pytest.approx(-0.2)
    assert len(a) == 3  # what a drafter has made stays as it was


@pytest.mark.parametrize(("first", "asked"), [(0.95, 0), (0.05, 300)])
def test_a_cascade_asks_the_second_where_the_first_is_bad(first: float, asked: int) -> None:
    world = World(FLAT)
    parts = [Scripted(world, lambda _: first, 0.1), Scripted(world, lambda _: 0.6, 0.1)]
    run(world, Cascade(TARGET, parts), 1, 300)
    assert abs(parts[1].calls - asked) < 40


def test_a_cascade_tells_good_matches_from_bad_ones() -> None:
    """The first drafter is right where it says so, every other step: then the second is not asked."""

    class Moody(Scripted):
        def _tree(self, request: Request) -> DraftTree:
            tree, here = DraftTree(int(request.tokens[-1])), len(request.tokens)
            sure = here % 2 == 0
            for level in range(4):
                token = future(request, here + level) if sure else 60_000
                tree.extend([token], -0.1 if sure else -2.0, parent=len(tree) - 1)
            return tree

    world = World(FLAT)
    parts = [Moody(world, lambda _: 0.0, 0.1), Scripted(world, lambda _: 0.5, 0.1, depth=2)]
    rate, _ = run(world, Cascade(TARGET, parts), 1, 300)
    assert 50 < parts[1].calls < 250
    for index in range(2):
        world = World(FLAT)
        alone = [Moody(world, lambda _: 0.0, 0.1), Scripted(world, lambda _: 0.5, 0.1, depth=2)][index]
        assert rate > 1.03 * run(world, alone, 1, 300)[0]


def test_a_part_that_was_trained_for_another_model_is_reported() -> None:
    world = World(FLAT)
    parts = [Scripted(world, lambda _: 0.9, 0.1), Scripted(world, lambda _: 0.0, 0.1)]
    parts[1].trained = True
    with pytest.warns(UserWarning, match="Scripted guessed right in 0 of its first 100 steps"):
        run(world, Merged(TARGET, parts), 1, 120)
