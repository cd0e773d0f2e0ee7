"""Trees over refined guesses: that they are the best ones by exact enumeration, for all kernels."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.draft_ops import LEAST_REFINED, Candidates, Refinement
from soothsay.drafters.ops.native_draft_ops import draft_ops
from soothsay.model.native.library import VARIANTS
from soothsay.model.native.native_kernels import load_native
from soothsay.model.ops.kernels import Kernels, StockKernels

KERNELS: list[Kernels] = [StockKernels()]
KERNELS += [kernels for variant in VARIANTS if (kernels := load_native([variant])) is not None]

TOKENS, DEPTHS, UNITS = 9, 3, 32


def drawn(seed: int, kept: int = TOKENS) -> tuple[Refinement, Candidates]:
    """A cell at random, and the best `kept` guesses of a pass."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    refinement = Refinement(
        tokens=normal(TOKENS, UNITS).bfloat16(),
        carry=0.3 * normal(UNITS, UNITS).bfloat16(),
        out=0.6 * normal(TOKENS, UNITS).bfloat16(),
        followers=normal(TOKENS, TOKENS).argsort(-1)[:, :3].contiguous(),
    )
    scores, factor = normal(DEPTHS, TOKENS), 1.3
    values, places = (factor * scores).log_softmax(-1).topk(kept)
    return refinement, Candidates(
        scores, factor, values, places, normal(DEPTHS, UNITS), normal(UNITS), scale=0.7
    )


def path_score(refinement: Refinement, candidates: Candidates, path: tuple[int, ...]) -> float:
    """The log-probability of a path of tokens, by the definition of the cell."""
    r, c, state = refinement, candidates, candidates.root
    log_p = (c.factor * c.scores).log_softmax(-1)
    total = float(log_p[0, path[0]]) if path[0] in c.places[0] else -math.inf
    for depth, token in enumerate(path[1:], 1):
        before = path[depth - 1]
        state = F.silu(c.read[depth] + r.tokens[before].float() + state @ r.carry.float())
        known = sorted({*c.places[depth].tolist(), *r.followers[before].tolist()})
        refined = torch.full((TOKENS,), -math.inf)
        refined[known] = log_p[depth, known] + c.scale * (r.out[known].float() @ state)
        outside = (1 - log_p[depth, known].exp().sum()).clamp(min=0)
        whole = torch.cat([refined, outside.log()[None]]).logsumexp(0)
        total += float(min(refined[token] - whole, torch.tensor(0.0)))
    return total


@cache
def scores_of_all_paths(seed: int, kept: int) -> dict[tuple[int, ...], float]:
    """The score of every path, the best first. It takes longer than all else here."""
    refinement, candidates = drawn(seed, kept)
    paths = (path for d in range(DEPTHS) for path in itertools.product(range(TOKENS), repeat=d + 1))
    scores = {path: path_score(refinement, candidates, path) for path in paths}
    return dict(sorted(scores.items(), key=lambda scored: -scored[1]))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize(
    ("kept", "depth", "nodes"),
    [(TOKENS, 3, 20), (5, 3, 12), (TOKENS, 2, 60), (TOKENS, 9, 2), (TOKENS, 9, 60)],
)
def test_the_best_paths_by_enumeration(kernels: Kernels, kept: int, depth: int, nodes: int) -> None:
    for seed in range(3):
        refinement, candidates = drawn(seed, kept)
        scores = scores_of_all_paths(seed, kept)
        best = [path for path in scores if len(path) <= depth and scores[path] >= math.log(LEAST_REFINED)]
        places, parents, found = draft_ops(kernels).grow_paths(refinement, candidates, nodes, depth)
        tree = DraftTree(-1)
        tree.append_nodes(places[1:], parents[1:], found[1:])
        made = [tuple(tree.tokens[node] for node in tree.path(n)[1:]) for n in range(1, len(tree))]
        assert made == best[: nodes - 1]
        assert found[1:] == pytest.approx([scores[path] for path in made], abs=2e-3)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
def test_guesses_that_are_impossible_are_in_no_tree(kernels: Kernels) -> None:
    refinement, candidates = drawn(3)
    candidates.values[:, 2:] = -math.inf
    candidates.scores.scatter_(1, candidates.places[:, 2:], -math.inf)
    places, parents, _ = draft_ops(kernels).grow_paths(refinement, candidates, 60, 3)
    assert len(places) > 4
    depths = [0]
    for place, parent in zip(places[1:], parents[1:], strict=True):
        depths.append(depths[parent] + 1)
        assert place in candidates.places[depths[-1] - 1, :2]
    assert draft_ops(kernels).grow_paths(refinement, candidates, 60, 0)[0] == [0]
    assert draft_ops(kernels).grow_paths(refinement, candidates, 1, 3)[1] == [-1]
