"""Helpers for tests of recurrent heads: requests under stress, and trees compared with an oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from one_shot import log_q
from oracles import VOCAB, Oracle, Seen, taps_of

from soothsay import LLM, Drafter, DraftTree, Observation, SamplingParams, Target
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes
from soothsay.drafters.heads.recurrent_drafter import RecurrentDrafter
from soothsay.drafters.heads.trained_head import Head
from soothsay.model.transformer import Transformer
from soothsay.result import Result

Make = Callable[..., Transformer]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=11)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, top_p=0.95)


def prompts(lengths: Sequence[int] = (40, 3, 17, 50, 30, 8, 1, 33)) -> list[list[int]]:
    """Make random prompts of these lengths. All share their first tokens, up to 24."""
    common = np.random.default_rng(9).integers(0, VOCAB, 24).tolist()
    return [
        [
            *common[: length - 1],
            *np.random.default_rng(length).integers(0, VOCAB, max(length - 24, 1)).tolist(),
        ]
        for length in lengths
    ]


MIXED = [replace(p, seed=i) for i, p in enumerate([SAMPLED, GREEDY, PENALIZED, GREEDY] * 2)]


@dataclass(eq=False)
class Watched(Drafter):
    """Records the proposals of a drafter, and counts the committed tokens that it runs."""

    inner: RecurrentDrafter
    seen: list[Seen] = field(default_factory=list)
    num_run: int = 0
    most_run: int = 0

    def __post_init__(self) -> None:
        self.taps, self.max_nodes = self.inner.taps, self.inner.max_nodes
        pack = self.inner.pack

        def watching(requests: Sequence[Rows]) -> Batch:
            self.num_run += sum(len(rows.tokens) for rows in requests)
            self.most_run = max(self.most_run, sum(rows.num_rows for rows in requests))
            return pack(requests)

        self.inner.pack = watching  # type: ignore[method-assign]

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        ready = [request for request in requests if self.inner.kv.ready(request)]
        states = self.inner.kv.states
        trees = self.inner.propose(requests)
        self.seen += [
            Seen(
                request,
                request.tokens.tolist(),
                request.max_nodes,
                request.max_depth,
                states[request].first_key if request in ready else None,
                tree,
            )
            for request, tree in zip(requests, trees, strict=True)
        ]
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        self.inner.observe(observations)

    def release(self, request: Request) -> None:
        self.inner.release(request)


STRESSES: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"engine": {"kv_tokens": 96, "block_size": 8}},
    "after prefixes it never saw": {"before": "none"},
    "after prefixes it saw": {"before": "itself"},
    "in small chunks": {"engine": {"max_rows": 18, "block_size": 4}},
    "with a tree cut short": {"engine": {"max_tree": 3}},
}


def serve(
    target: Transformer,
    make: Callable[[Target], RecurrentDrafter],
    *,
    before: str = "",
    engine: dict[str, Any] | None = None,
) -> tuple[Watched, list[Result], list[Request]]:
    """Answer all prompts in one batch with a watched drafter. Asserts that tokens equal plain decoding's."""
    llm = LLM(target, drafter="none", **{"kv_tokens": 4096, **(engine or {})})
    drafter = Watched(make(llm.engine.target))
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), MIXED)
    if before:
        llm.generate(prompts(), MIXED, drafter=drafter if before == "itself" else "none")
    drafter.seen.clear()
    drafter.num_run = drafter.most_run = 0
    requests: list[Request] = []
    add = llm.engine.add
    llm.engine.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    results = llm.generate(prompts(), MIXED, drafter=drafter)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert not drafter.inner.kv.states, "requests that have ended are forgotten"
    assert drafter.most_run <= llm.config.max_rows
    return drafter, results, requests


def check(oracle: Oracle, target: Transformer, seen: Seen, branch: int) -> None:
    """Assert that a tree has the oracle's scores, and that explored nodes have the best children."""
    tree, committed = seen.tree, copy.copy(seen.request)
    committed.length = len(seen.tokens)  # the length at the time of the proposal
    by_node = oracle.tree(seen, taps_of(target, seen.tokens, oracle.taps))
    nodes = sorted(by_node)
    logits = torch.stack([by_node[node] for node in nodes]).float()
    scores = log_q(logits, Nodes(committed, tree, nodes))
    for row, node in enumerate(nodes):
        best = [t for t in scores[row].topk(branch).indices.tolist() if scores[row, t] > -math.inf]
        children = tree.children[node]
        assert set(children) <= set(best)
        for token, child in children.items():
            expected = tree.scores[node] + scores[row, token].item()
            assert tree.scores[child] == pytest.approx(expected, abs=2e-3)


def check_all(
    stress: str,
    target: Transformer,
    head: Head,
    oracle: type[Oracle],
    make: Callable[[Target], RecurrentDrafter],
    branch: int,
) -> None:
    reference = oracle(head, target)  # before the head is prepared for serving
    drafter, _, requests = serve(target, make, **STRESSES[stress])
    if stress == "preempted":
        assert sum(request.num_preemptions for request in requests) > 2
    guessed = [seen for seen in drafter.seen if seen.first_key is not None and seen.max_nodes > 1]
    silent = [seen for seen in drafter.seen if seen not in guessed]
    assert len(guessed) > 2 * len(requests)
    assert all(len(seen.tree) == 1 for seen in silent)
    assert all(len(seen.tree) > 1 for seen in guessed if seen.max_depth > 0)
    for seen in guessed[:: max(1, len(guessed) // 60)]:
        check(reference, target, seen, branch)
    late = {seen.first_key for seen in guessed} - {1}
    if stress == "after prefixes it never saw":
        assert late
        assert all(key % 16 == 1 for key in late)
    else:
        assert not late, "what it has seen once stays visible"
    if stress.startswith("after prefixes"):
        assert all(request.num_prefix_hits > 0 for request in requests if request.num_prompt > 16)
