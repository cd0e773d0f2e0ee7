"""The shapes of trees that grow level by level."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from recurrent import Make

from soothsay import DrafterError, Target
from soothsay.config import EngineConfig
from soothsay.drafters.base import check_at_least_one
from soothsay.drafters.trees.growth import Candidate, ConfidentShape, TemplateShape
from soothsay.drafters.trees.templates import EAGLE_TEMPLATE


class TestShapes:
    def test_a_fixed_shape_names_each_node_once(self) -> None:
        shape = TemplateShape(EAGLE_TEMPLATE)
        assert (shape.depth, shape.branch, shape.max_nodes) == (5, 4, 26)
        nodes: list[tuple[int, ...]] = [()]
        for node in nodes:
            nodes += [(*node, rank) for rank in shape.ranks(node)]
        assert sorted(nodes[1:]) == sorted(tuple(path) for path in EAGLE_TEMPLATE)

    def test_only_what_has_something_below_it_is_explored(self) -> None:
        shape = TemplateShape([(0,), (1,), (0, 0), (1, 1), (2,)])
        level = [Candidate(-rank, 1 + rank, 0, (rank,)) for rank in (2, 1, 0)]
        assert [guess.ranks for guess in shape.explored(level)] == [(0,), (1,)]

    def test_confidence_chooses_the_best_few(self) -> None:
        shape = ConfidentShape(3, 2, 4)
        assert list(shape.ranks((1, 2))) == [0, 1, 2, 3]
        level = [Candidate(score, i, 0, (i,)) for i, score in enumerate([-3.0, -1.0, -2.0])]
        assert [guess.node for guess in shape.explored(level)] == [1, 2]
        assert ConfidentShape(4, 1, 1).max_nodes == 5
        assert shape.max_nodes == 1 + 4 + 2 * 2 * 4

    @pytest.mark.parametrize(
        ("most", "depth", "asked", "expected"),
        [
            (16, 8, (), (2, 3)),
            (60, 8, (), (8, 9)),
            (4, 8, (), (1, 2)),
            (9, 1, (), (8, 9)),
            (1, 3, (), (1, 2)),
            (60, 8, (3,), (3, 4)),
            (60, 8, (None, 2), (8, 2)),
            (16, 8, (5, 1), (5, 1)),
        ],
    )
    def test_a_tree_is_as_wide_as_it_has_room_for(
        self, most: int, depth: int, asked: Sequence[int | None], expected: tuple[int, int], tiny: Make
    ) -> None:
        target = Target(tiny(0), None, EngineConfig(max_tree=most), 4)
        shape = ConfidentShape.within("x", target, depth, *asked)
        assert (shape.depth, shape.width, shape.branch) == (depth, *expected)

    def test_numbers_below_1_are_refused(self) -> None:
        check_at_least_one("x", a=1, b=3)
        with pytest.raises(DrafterError, match=r"^x\(a=1, b=0\): each must be at least 1$"):
            check_at_least_one("x", a=1, b=0)
