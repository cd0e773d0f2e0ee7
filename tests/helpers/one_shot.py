"""Helpers for tests of drafters that read features: requests under stress, and plain formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from kernels import OPS
from torch import Tensor

from soothsay import LLM, Drafter, DraftTree, SamplingParams, Target
from soothsay.core.request import Observation, Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.drafters.heads.block import BlockDrafter
from soothsay.drafters.heads.hydra import Hydra
from soothsay.drafters.heads.medusa import Medusa
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter
from soothsay.drafters.ops.draft_ops import LEAST_REFINED
from soothsay.model.transformer import Transformer
from soothsay.result import Result

VOCAB = 97
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, top_p=0.95)
MANY = [replace(p, seed=i) for i, p in enumerate([SAMPLED, GREEDY, PENALIZED] * 2)] + [
    GREEDY,
    replace(SAMPLED, seed=6),
]

STRESSES: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"kv_tokens": 128, "block_size": 8},
    "in chunks": {"max_rows": 12},
    "after prefix hits": {"block_size": 8},
    "small trees": {"max_tree": 3},
}


def prompts(lengths: Sequence[int] = (40, 3, 17, 64, 30, 8, 1, 50)) -> list[list[int]]:
    """Make random prompts of these lengths. All share their first tokens, up to 24."""
    common = np.random.default_rng(9).integers(0, VOCAB, 24).tolist()
    return [
        [
            *common[: length - 1],
            *np.random.default_rng(length).integers(0, VOCAB, max(length - 24, 1)).tolist(),
        ]
        for length in lengths
    ]


@dataclass(frozen=True)
class Guess:
    """One proposed tree, with a copy of the request at that time."""

    request: Request
    max_nodes: int
    max_depth: int
    tree: DraftTree
    first_key: int  # first position in the drafter's KV cache; -1: it has none

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens.tolist()


WithKV = BlockDrafter | OnePassDrafter
OneShot = WithKV | Hydra | Medusa


def num_known(drafter: OneShot) -> int:
    """Count the requests that a drafter keeps state for."""
    return len(drafter.kv.states) if isinstance(drafter, WithKV) else len(drafter.kept)


def num_features(drafter: OneShot) -> int:
    """Count the features that a drafter keeps in memory. A view keeps its whole tensor in memory."""
    if isinstance(drafter, WithKV):
        return sum(len(state.features) for state in drafter.kv.states.values())
    kept = [feature for _, feature in drafter.kept.values()]
    storages = {feature.untyped_storage().data_ptr(): feature.untyped_storage().nbytes() for feature in kept}
    return sum(storages.values()) // kept[0].nbytes if kept else 0


class Watched(Drafter):
    """Records what another drafter proposes."""

    def __init__(self, drafter: OneShot):
        self.drafter, self.taps, self.max_nodes = drafter, drafter.taps, drafter.max_nodes
        self.guesses: list[Guess] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = self.drafter.propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            first_key = -1
            if isinstance(self.drafter, WithKV) and request in self.drafter.kv.states:
                first_key = self.drafter.kv.states[request].first_key
            was = copy.copy(request)
            self.guesses.append(Guess(was, request.max_nodes, request.max_depth, tree, first_key))
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        self.drafter.observe(observations)

    def release(self, request: Request) -> None:
        self.drafter.release(request)


def serve(
    target: Transformer, make: Callable[[Target], OneShot], stress: str = "at ease"
) -> tuple[Watched, list[Result]]:
    """Answer all prompts in one batch with a watched drafter. Asserts that tokens equal plain decoding's."""
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), MANY)
    llm = LLM(target, drafter="none", **{"kv_tokens": 4096, **STRESSES[stress]})
    drafter = Watched(make(llm.engine.target))
    if stress == "after prefix hits":
        llm.generate(prompts()[:3], GREEDY)  # no drafter: so it has never seen these blocks
        llm.generate(prompts()[3:5], GREEDY, drafter=drafter)
    hits: list[int] = []
    preemptions: list[int] = []
    remove = llm.engine.scheduler.remove

    def note(request: Request) -> None:
        hits.append(request.num_prefix_hits)
        preemptions.append(request.num_preemptions)
        remove(request)

    llm.engine.scheduler.remove = note  # type: ignore[method-assign]
    results = llm.generate(prompts(), MANY, drafter=drafter)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert num_known(drafter.drafter) == 0, "requests that have ended are forgotten"
    assert stress != "preempted" or sum(preemptions) > 0
    assert stress != "after prefix hits" or sum(hits) > 100
    return drafter, results


def made(drafter: Watched) -> list[Guess]:
    """Return the trees with draft tokens. Asserts that nearly all requests for draft tokens gave them."""
    wanted = [guess for guess in drafter.guesses if guess.max_nodes > 1]
    trees = [guess for guess in wanted if len(guess.tree) > 1]
    assert len(trees) > 0.8 * len(wanted) > 20
    return trees


def log_probs(guess: Guess, logits: Tensor) -> Tensor:
    """Apply the request's parameters and noise to logits by depth. Returns log-probabilities `[D, V]`."""
    chain = DraftTree(guess.tokens[-1])
    chain.extend(logits.argmax(-1).tolist()[:-1])
    return perturb(logits, [Nodes(guess.request, chain, range(len(logits)))], OPS).log_softmax(-1)


def has_near_tie(logits: Tensor) -> bool:
    """Whether rounding may decide which token is the likeliest one of a depth, of logits `[D, V]`."""
    best, second = logits.topk(2).values.T
    return bool((best - second).min() < 0.01)


def check_best_tree(guess: Guess, scores: Tensor, branch: int, size: int) -> None:
    """Assert that `guess` is the best tree for `scores` `[D, V]` by depth, compared with all paths."""
    tree = guess.tree
    for node in range(1, len(tree)):
        above = tree.parents[node]
        own = scores[tree.depths[above], tree.tokens[node]].item()
        assert abs(tree.scores[node] - tree.scores[above] - own) < 1e-3
    likeliest = scores[: guess.max_depth].topk(branch).values.tolist()
    every = [sum(path) for d in range(1, len(likeliest) + 1) for path in product(*likeliest[:d])]
    best = sorted((score for score in every if score > -1e30), reverse=True)
    expected = best[: min(size, guess.max_nodes - 1)]
    assert len(tree) == 1 + len(expected)
    assert np.allclose(sorted(tree.scores[1:], reverse=True), expected, atol=1e-3)


def log_q(logits: Tensor, nodes: Nodes) -> Tensor:
    """Return a drafter's log-probabilities after each node. At temperature 0, logits are doubled first."""
    return (perturb(logits, [nodes], OPS) * (1 if nodes.request.params.temperature else 2)).log_softmax(-1)


def bound_of(tree: DraftTree, max_nodes: int) -> float:
    """Return the score above which one more node would be verified."""
    return sorted(tree.scores)[-max_nodes] if len(tree) >= max_nodes else -math.inf


def check_children(tree: DraftTree, node: int, log_probs: Tensor, branch: int, max_nodes: int) -> None:
    """Assert that the children of a node are the likeliest tokens that would be verified."""
    best = {t: v for v, t in zip(*map(Tensor.tolist, log_probs.topk(branch)), strict=True) if v > -1e30}
    children, bound = tree.children[node], bound_of(tree, max_nodes)
    assert set(children) <= set(best)
    for token, value in best.items():
        score = tree.scores[node] + value
        if token in children:
            assert abs(tree.scores[children[token]] - score) < 1e-3
        else:
            assert score <= bound + 1e-3


def check_grown_tree(
    guess: Guess, logits_below: Callable[[list[int]], Tensor], width: int, branch: int, depth: int
) -> None:
    """Assert that `guess` grew by confidence. `logits_below` gives the logits after a path from the root."""
    tree, bound = guess.tree, bound_of(guess.tree, guess.max_nodes)
    for level in range(min(depth, guess.max_depth)):
        nodes = [node for node in range(len(tree)) if tree.depths[node] == level]
        for place, node in enumerate(sorted(nodes, key=lambda node: -tree.scores[node])):
            path = [tree.tokens[above] for above in tree.path(node)]
            scores = log_q(logits_below(path)[None], Nodes(guess.request, tree, [node]))
            if tree.children[node]:
                check_children(tree, node, scores[0], branch, guess.max_nodes)
                assert place < width
            elif place < width and 1 + width * level <= guess.max_nodes:  # the tree had room for its children
                assert tree.scores[node] + scores.max().item() <= bound + 1e-3
    assert len(tree) > 1
    assert max(tree.depths) <= min(depth, guess.max_depth)


def check_refined_tree(
    guess: Guess, before: Tensor, after: Callable[[list[int]], Tensor], largest: int
) -> None:
    """Assert that a node scores what the cell says of its path, and no path that is left out scores higher.

    Args:
        guess: a tree, and what was known when it grew.
        before: `[D, V]` logits by depth, the first refined, before penalties and truncation.
        after: gives the refined logits after a path from the root.
        largest: number of nodes, the root not counted.
    """
    scores, tree = log_probs(guess, before), guess.tree
    temperature = guess.request.params.temperature
    factor = 1.0 if temperature else 2.0
    left_out = [math.log(LEAST_REFINED)]
    for node in range(len(tree)):
        if tree.depths[node] < min(guess.max_depth, len(before)):
            path = [tree.tokens[above] for above in tree.path(node)]
            change = after(path) - before[len(path) - 1]
            logits = factor * (scores[len(path) - 1] + change.nan_to_num(0.0) / (temperature or 1.0))
            expected = tree.scores[node] + logits.log_softmax(-1)
            for token, child in tree.children[node].items():
                assert abs(tree.scores[child] - float(expected[token])) < 0.1
                expected[token] = -torch.inf
            left_out.append(float(expected.max()))
        assert tree.depths[node] <= max(guess.max_depth, 0)
    if len(tree) == min(largest + 1, guess.max_nodes):
        assert min(tree.scores) > max(left_out) - 0.1
    else:
        assert max(left_out[1:], default=-99.0) < left_out[0] + 0.1


def counting_model(vocab: int, step: int = 1) -> Transformer:
    """Make a target that always emits its last token plus `step`. Its features are one-hot tokens.

    Scale the output head to make the distribution sharper.
    """
    from tiny import TINY, adapted

    config = adapted(TINY, vocab_size=vocab, hidden_size=vocab, num_layers=1, windows=(None,))
    model = Transformer(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.o.weight", "mlp.down.weight")):
            parameter.zero_()
    model.embedding.weight.copy_(torch.eye(vocab))
    model.head.weight.copy_(torch.eye(vocab).roll(step, 0) * 2)
    return model


def most_features_kept(target: Transformer, make: Callable[[Target], OneShot]) -> int:
    """Return how many features a drafter keeps at most if it is never asked for draft tokens.

    The prompt has 40 tokens, and the answer 60.
    """
    llm = LLM(target, drafter="none", kv_tokens=512, block_size=8, max_tree=1)
    drafter = make(llm.engine.target)
    stream = llm.stream(prompts()[0], replace(GREEDY, max_tokens=60), drafter=drafter)
    lengths = [num_features(drafter) for _ in stream]
    assert stream.result.stats.drafted == 0
    return max(lengths[2:])
