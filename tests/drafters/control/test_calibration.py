"""The calibration of scores, and which nodes of a tree were right."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from soothsay.core.tree import DraftTree
from soothsay.drafters.control.acceptance import AcceptanceCalibration, right_nodes


def chain(tokens: list[int], log_prob: float) -> DraftTree:
    tree = DraftTree(0)
    tree.extend(tokens, log_prob)
    return tree


def test_at_the_start_a_drafters_scores_are_believed() -> None:
    calibration = AcceptanceCalibration()
    for score in (-0.05, -0.7, -2.0):
        assert calibration.probability(score) == pytest.approx(math.exp(score), rel=0.15)
        assert calibration.probabilities(chain([1], score)) == [1.0, calibration.probability(score)]


def test_scores_that_are_too_high_or_too_low_are_corrected() -> None:
    rng = random.Random(0)
    for claimed, true in ((-0.1, 0.3), (-2.0, 0.8)):
        calibration = AcceptanceCalibration()
        for _ in range(1000):
            tree = chain([1], claimed)
            calibration.record(tree, {1} if rng.random() < true else set())
        assert calibration.probability(claimed) == pytest.approx(true, abs=0.08)


def test_the_first_drafts_are_believed_at_once() -> None:
    calibration = AcceptanceCalibration()
    calibration.record(chain([1, 2, 3, 4], -0.01), set())
    assert calibration.probability(-0.01) < 0.5


def test_probabilities_never_rise_as_scores_fall() -> None:
    rng = random.Random(1)
    calibration = AcceptanceCalibration()
    for _ in range(3000):
        score = -6 * rng.random()
        calibration.record(chain([1], score), {1} if rng.random() < rng.random() else set())
    table = [calibration.probability(-0.1 * i) for i in range(90)]
    assert all(a >= b for a, b in pairwise(table))
    assert len(set(table)) > 3


def test_a_probability_is_never_above_one() -> None:
    """Counts fade again and again, the right ones as much as all."""
    calibration = AcceptanceCalibration()
    for _ in range(3000):
        calibration.record(chain([1, 2], -0.1), {1, 2})
    table = [calibration.probability(-0.1 * i) for i in range(90)]
    assert 0.9 < max(table) <= 1
    assert calibration.claimed(1.0) <= 1


def test_old_counts_fade() -> None:
    calibration = AcceptanceCalibration()
    for right in (True, False):
        for _ in range(3000):
            calibration.record(chain([1], -0.1), {1} if right else set())
    assert calibration.probability(-0.1) < 0.05


def test_right_nodes_are_known_when_no_open_node_can_still_become_right() -> None:
    tree = DraftTree(0)
    tree.extend([1, 2, 3])
    tree.extend([1, 5])
    assert right_nodes(tree, [9]) == []
    assert right_nodes(tree, [1]) is None
    assert right_nodes(tree, [1, 5]) == [1, 4]
    assert right_nodes(tree, [1, 2]) is None
    assert right_nodes(tree, [1, 2, 7]) == [1, 2]
    assert right_nodes(tree, [1, 2, 3, 4]) == [1, 2, 3]
