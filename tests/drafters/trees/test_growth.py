"""Growing trees level by level: what a drafter is asked, and what comes back to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import GREEDY, make_request
from kernels import OPS
from torch import Tensor

from soothsay import DraftTree
from soothsay.core.request import Request
from soothsay.drafters.trees.growth import (
    ConfidentShape,
    GrowingTree,
    TemplateShape,
    TreeGrower,
    TreeShape,
    parent_rows,
)
from soothsay.drafters.trees.templates import EAGLE_TEMPLATE

VOCAB = 12
Path = tuple[int, ...]


def logits_below(path: Path) -> Tensor:
    """Those of a drafter that remembers all that it has read, `[V]`."""
    seed = sum((i + 1) * 31**i * (token + 1) for i, token in enumerate(path))
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed % 2**31))


class Memory:
    """An expander whose states are the paths of nodes. It reads a node's token and its parent's state."""

    def __init__(self, unready: Sequence[Request] = ()):
        self.unready = unready
        self.asked: list[list[Path]] = []  # by level

    def ready(self, request: Request) -> bool:
        return request not in self.unready

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, list[Path]]:
        return self._below([(int(g.request.tokens[-1]),) for g in growing])

    def expand_nodes(self, growing: Sequence[GrowingTree], states: list[Path]) -> tuple[Tensor, list[Path]]:
        above = [states[row] for row in parent_rows(growing, torch.device("cpu")).tolist()]
        tokens = [token for g in growing for token in g.frontier_tokens]
        for g in growing:
            rows = g.frontier_rows(first_key=1)
            assert (rows.num_rows, rows.first, rows.first_key) == (len(g.frontier), g.frontier.start, 1)
            assert rows.tree is g.expanded
        return self._below([(*path, token) for path, token in zip(above, tokens, strict=True)])

    def _below(self, paths: list[Path]) -> tuple[Tensor, list[Path]]:
        self.asked.append(paths)
        return torch.stack([logits_below(path) for path in paths]), paths


def grown_alone(request: Request, shape: TreeShape, least: float = 0.0) -> set[Path]:
    """The nodes of a tree by its definition, without bookkeeping."""
    scores: dict[Path, float] = {(): 0.0}
    ranks: dict[Path, Path] = {(): ()}
    level: list[Path] = [()]
    explored = 1
    for depth in range(1, min(shape.depth, max(request.max_depth, 1)) + 1):
        bound = nth_best(scores, request.max_nodes)
        new: list[Path] = []
        for path in level:
            below = (2 * logits_below((int(request.tokens[-1]), *path))).log_softmax(-1)
            order = below.argsort(descending=True).tolist()
            for rank in shape.ranks(ranks[path]):
                node = (*path, order[rank])
                score = scores[path] + below[order[rank]].item()
                if score > bound:
                    scores[node], ranks[node] = score, (*ranks[path], rank)
                    new.append(node)
        if isinstance(shape, ConfidentShape):
            chosen = sorted(new, key=lambda node: -scores[node])[: shape.width]
        else:
            inner = [node for node in new if shape.ranks(ranks[node])]
            chosen = sorted(inner, key=lambda node: -scores[node])
        bound = nth_best(scores, request.max_nodes)
        chosen = [node for node in chosen[: request.max_nodes - explored] if scores[node] > bound]
        if depth >= request.max_depth or sum(math.exp(scores[node]) for node in chosen) < least:
            break
        level = [node for node in chosen if node[-1] not in request.end_tokens]
        explored += len(level)
    return set(scores)


def nth_best(scores: dict[Path, float], count: int) -> float:
    return sorted(scores.values())[-count] if len(scores) >= count else -math.inf


def nodes_of(tree: DraftTree) -> set[Path]:
    return {tuple(tree.tokens[above] for above in tree.path(node)[1:]) for node in range(len(tree))}


def requests() -> list[Request]:
    """Make requests of several tree sizes, some near their end, some with end tokens."""
    ends = replace(GREEDY, stop_token_ids=[0, 3, 5, 8])
    return [
        make_request((1, 2, 3), nodes=20),
        make_request((4, 5), nodes=5),
        make_request((6,), replace(GREEDY, max_tokens=3), nodes=20),
        make_request((3, 9), ends, nodes=12),
        make_request((7, 8), nodes=1),
    ]


SHAPES = {
    "chain": ConfidentShape(5, 1, 1),
    "wide": ConfidentShape(4, 3, 4),
    "template": TemplateShape(EAGLE_TEMPLATE),
}


@pytest.mark.parametrize("least", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("kind", SHAPES)
def test_trees_of_a_batch_are_those_of_each_request_by_definition(kind: str, least: float) -> None:
    memory, batch, shape = Memory(), requests(), SHAPES[kind]
    trees = TreeGrower(shape, OPS).grow(memory, batch, least)
    for request, tree in zip(batch[:-1], trees, strict=False):
        assert nodes_of(tree) == grown_alone(request, shape, least)
    assert len(trees[-1]) == 1, "there is room for the root only"
    assert max(len(tree) for tree in trees) > (5 if least < 0.9 or kind != "chain" else 1)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_node_is_computed_after_its_parent_and_only_once(kind: str) -> None:
    memory, batch = Memory(), requests()
    trees = TreeGrower(SHAPES[kind], OPS).grow(memory, batch)
    known = [{(tree.tokens[0], *path) for path in nodes_of(tree)} for tree in trees]
    for level, paths in enumerate(memory.asked):
        assert len({*paths}) == len(paths)
        assert {len(path) for path in paths} == {1 + level}
        assert all(any(path in own for own in known) for path in paths), "a state of another parent"
    assert len(memory.asked) > 3


def test_where_the_drafter_is_not_ready_nothing_is_computed() -> None:
    batch = requests()
    memory = Memory(unready=batch[1:])
    trees = TreeGrower(SHAPES["wide"], OPS).grow(memory, batch)
    assert [len(tree) > 1 for tree in trees] == [True, False, False, False, False]
    assert [tree.tokens[0] for tree in trees] == [3, 5, 6, 9, 8]
    assert memory.asked[0] == [(3,)]
    nobody = Memory(unready=batch)
    assert [len(tree) for tree in TreeGrower(SHAPES["wide"], OPS).grow(nobody, batch)] == [1] * 5
    assert nobody.asked == []


def test_no_more_is_drawn_than_the_grower_s_largest_tree_has() -> None:
    params = replace(GREEDY, temperature=1.0, verifier="rsd", seed=1)
    sizes = {}
    for most in (None, 4):
        grower = TreeGrower(ConfidentShape(4, 2, 3), OPS, most)
        trees = grower.grow(Memory(), [make_request((1, seed), params, nodes=30) for seed in range(20)])
        sizes[most] = max(len(tree) for tree in trees)
        assert all(tree.draws for tree in trees)
    assert sizes[4] == 4
    assert sizes[None] > 8
