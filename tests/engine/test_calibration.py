"""From scores to probabilities, against what was drawn."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from soothsay.engine.calibration import Calibration, settle
from soothsay.engine.tree import DraftTree


def chain(tokens: list[int], log_prob: float) -> DraftTree:
    tree = DraftTree(0)
    tree.extend(tokens, log_prob)
    return tree


def test_before_anything_is_known_a_drafter_is_believed() -> None:
    calibration = Calibration()
    for score in (-0.05, -0.7, -2.0):
        assert calibration.probability(score) == pytest.approx(math.exp(score), rel=0.15)


def test_a_boaster_is_taken_down_and_a_modest_one_up() -> None:
    rng = random.Random(0)
    for claimed, true in ((-0.1, 0.3), (-2.0, 0.8)):
        calibration = Calibration()
        for _ in range(1000):
            tree = chain([1], claimed)
            calibration.record(tree, {1} if rng.random() < true else set())
        assert calibration.probability(claimed) == pytest.approx(true, abs=0.08)


def test_probabilities_never_rise_as_scores_fall() -> None:
    rng = random.Random(1)
    calibration = Calibration()
    for _ in range(3000):
        score = -6 * rng.random()
        calibration.record(chain([1], score), {1} if rng.random() < rng.random() else set())
    table = [calibration.probability(-0.1 * i) for i in range(90)]
    assert all(a >= b for a, b in pairwise(table))
    assert len(set(table)) > 3


def test_what_was_true_once_fades() -> None:
    calibration = Calibration()
    for right in (True, False):
        for _ in range(3000):
            calibration.record(chain([1], -0.1), {1} if right else set())
    assert calibration.probability(-0.1) < 0.05


def test_a_tree_is_settled_when_nothing_in_it_can_still_come_true() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2, 3])
    tree.extend([1, 5])
    assert settle(tree, [9]) == []
    assert settle(tree, [1]) is None
    assert settle(tree, [1, 5]) == [1, 4]
    assert settle(tree, [1, 2]) is None
    assert settle(tree, [1, 2, 7]) == [1, 2]
    assert settle(tree, [1, 2, 3, 4]) == [1, 2, 3]
