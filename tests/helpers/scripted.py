"""A simulated world for tests of the controller: its own clock, and drafters with a known acceptance rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from verifying import match

from soothsay import SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, Target
from soothsay.model.timing.pass_times import PassTimes

TARGET = Target(SimpleNamespace(experts_run=None), None, EngineConfig(), 0)  # type: ignore[arg-type]

FLAT = PassTimes([1, 16, 32, 1024], [0], [[10.0, 11.0, 12.0, 300.0]])
"""Memory-bound, as large models are at small batches: 16 rows cost little more than one."""

STEEP = PassTimes([1, 2, 1024], [0], [[1.0, 2.0, 1024.0]])
"""Bound by arithmetic: every row costs as much as the first."""


class World:
    """A clock, the times of passes, and the randomness of drafters."""

    def __init__(self, times: PassTimes, seed: int = 0):
        self.times, self.now = times, 0.0
        self.rows = 0  # of the last pass
        self.random = random.Random(seed)

    def clock(self) -> float:
        return self.now


def future(request: Request, offset: int) -> int:
    """Return the token that the request will have at position `offset`: arbitrary but fixed."""
    return (offset * 7919 + request.seed * 104_729) % 50_000


@dataclass
class Scripted(Drafter):
    """A drafter of chains. Each draft token is right with a given probability."""

    world: World
    chance: Callable[[Request], float]
    cost: float
    depth: int = 4
    calls: int = 0
    asked: int = 0

    def __post_init__(self) -> None:
        self.max_nodes = 1 + self.depth

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.world.now += self.cost
        self.calls += 1
        self.asked += len(requests)
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> DraftTree:
        tree, node, here = DraftTree(int(request.tokens[-1])), 0, len(request.tokens)
        for level in range(self.depth):
            right = self.world.random.random() < self.chance(request)
            token = future(request, here + level) if right else 60_000 + level
            node = tree.add(node, token, -0.2)
        return tree


def run(
    world: World,
    drafter: Drafter,
    count: int,
    steps: int,
    seeds: Sequence[int] | None = None,
    limit: int = 100_000,
    prompt: int = 3,
) -> tuple[float, list[Request]]:
    """Return the throughput of `count` requests over `steps` steps, in tokens a second, and the requests."""
    params = SamplingParams(temperature=0, max_tokens=100_000)
    requests = [
        Request(list(range(prompt)), params, seed=seed, limit=limit, drafter=drafter)
        for seed in (seeds or range(count))
    ]
    for request in requests:
        request.cached = prompt - 1
        request.max_nodes = 16
    features = tuple(torch.zeros(prompt - 1, 1) for _ in drafter.taps)
    if features:
        drafter.observe([Observation(request, 0, prompt - 1, features) for request in requests])
    begin, tokens = world.now, 0
    for _ in range(steps):
        trees = drafter.propose(requests)
        trees = [tree.prune(request.max_nodes, 100) for tree, request in zip(trees, requests, strict=True)]
        context = sum(len(request.tokens) for request in requests) / count
        world.rows = sum(map(len, trees))
        world.now += world.times(world.rows, context)
        seen = []
        for request, tree in zip(requests, trees, strict=True):
            here = len(request.tokens)
            draws = [
                future(request, here + depth) if right else -1
                for depth, right in zip(tree.depths, _right(tree, request), strict=True)
            ]
            taps = tuple(torch.zeros(len(tree), 1) for _ in drafter.taps)
            seen.append(Observation(request, here - 1, 1, taps, tree, None, match(tree, draws)))
        drafter.observe(seen)
        for observation in seen:
            assert observation.verdict is not None
            observation.request.emit(observation.verdict.tokens)
            observation.request.cached = len(observation.request.tokens) - 1
            tokens += len(observation.verdict.tokens)
    return tokens / (world.now - begin), requests


def _right(tree: DraftTree, request: Request) -> list[bool]:
    here, right = len(request.tokens), [True]
    for node in range(1, len(tree)):
        token = future(request, here + tree.depths[node] - 1)
        right.append(right[tree.parents[node]] and tree.tokens[node] == token)
    return right
