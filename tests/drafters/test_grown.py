"""Trees that grow level by level: their shapes; and what the tests of recurrent heads share.

An `Oracle` computes a head from its raw weights in float64, with dense attention over whole sequences.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from one_shot import log_q
from torch import Tensor

from soothsay import LLM, Drafter, DrafterError, DraftTree, Observation, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.drafters.base import check_at_least_one
from soothsay.drafters.grown import Confident, Fixed, Guess, RecurrentDrafter
from soothsay.drafters.head import Head
from soothsay.drafters.template import EAGLE_TEMPLATE
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes
from soothsay.model.transformer import Transformer
from soothsay.result import Result

Make = Callable[..., Transformer]
VOCAB = 97
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=11)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, top_p=0.95)


def prompts(lengths: Sequence[int] = (40, 3, 17, 50, 30, 8, 1, 33)) -> list[list[int]]:
    """The longer ones begin like the first."""
    common = np.random.default_rng(9).integers(0, VOCAB, 24).tolist()
    return [
        [
            *common[: length - 1],
            *np.random.default_rng(length).integers(0, VOCAB, max(length - 24, 1)).tolist(),
        ]
        for length in lengths
    ]


MIXED = [replace(p, seed=i) for i, p in enumerate([SAMPLED, GREEDY, PENALIZED, GREEDY] * 2)]


@dataclass(frozen=True)
class Seen:
    """One proposal, and what it was made for."""

    request: Request
    tokens: list[int]
    max_nodes: int
    max_depth: int
    first_key: int | None  # None: the drafter knew nothing yet
    tree: DraftTree


@dataclass(eq=False)
class Watched(Drafter):
    """Notes the proposals of a drafter, and the committed tokens that it runs."""

    inner: RecurrentDrafter
    seen: list[Seen] = field(default_factory=list)
    num_run: int = 0
    most_run: int = 0

    def __post_init__(self) -> None:
        self.taps, self.max_nodes = self.inner.taps, self.inner.max_nodes
        pack = self.inner._pack

        def watching(batch: Any) -> Batch:
            count = sum(rows.num_rows for rows in batch.rows)
            self.num_run += sum(len(rows.tokens) for rows in batch.rows)
            self.most_run = max(self.most_run, count)
            return pack(batch)

        self.inner._pack = watching  # type: ignore[method-assign]

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        ready = [request for request in requests if self.inner.context.ready(request)]
        states = self.inner.context.states
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
    "preempted": {"engine": {"kv_tokens": 104, "block_size": 8}},
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
    """Answer all prompts together with a watched drafter; what plain decoding says must come out."""
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
    assert not drafter.inner.context.states, "requests that have ended are forgotten"
    assert drafter.most_run <= llm.config.max_rows
    return drafter, results, requests


class Oracle(ABC):
    """A head with one decoder block, from its raw weights in float64."""

    def __init__(self, head: Head, target: Transformer):
        self.config = head.config.block  # type: ignore[attr-defined]
        self.weights = {name: value.double() for name, value in head.state_dict().items()}
        self.target = {name: value.double() for name, value in target.state_dict().items()}
        self.taps = head.taps

    @abstractmethod
    def features(self, taps: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor: ...

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor: ...

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.target["embedding.weight"][list(tokens)]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * weight

    def attention(self, x: Tensor, positions: Tensor, past: Past, name: str = "block.attention.") -> Tensor:
        """Each row sees all that is past, and the rows up to itself."""
        c, weights = self.config, self.weights
        qkv = x @ weights[name + "qkv.weight"].T
        if name + "qkv.bias" in weights:
            qkv = qkv + weights[name + "qkv.bias"]
        heads = qkv.view(len(x), -1, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        past.add(rotate(k, positions, c.rope.theta), v)
        q = rotate(q, positions, c.rope.theta)
        k, v = past.keys.repeat_interleave(c.group, 1), past.values.repeat_interleave(c.group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(c.head_dim)
        rows, keys = scores.shape[1:]
        hidden = torch.arange(keys)[None] > torch.arange(keys - rows, keys)[:, None]
        weighed = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weighed, v).flatten(1) @ weights[name + "o.weight"].T

    def mlp(self, x: Tensor, name: str = "block.mlp.") -> Tensor:
        gate, up = (x @ self.weights[name + "gate_up.weight"].T).chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up) @ self.weights[name + "down.weight"].T

    def tree(self, seen: Seen, taps: Sequence[Tensor]) -> dict[int, Tensor]:
        """`[V]` logits at each node that has something below it, by the paper: nothing is cached."""
        assert seen.first_key is not None
        slots = torch.arange(seen.first_key, len(seen.tokens))
        features = self.features([tap.double() for tap in taps])
        past = Past()
        tokens = [seen.tokens[slot] for slot in slots]
        outs = {0: (self.forward(self.embed(tokens), features[slots - 1], slots, past)[-1:], past)}
        for node in range(1, len(seen.tree)):
            if seen.tree.children[node]:
                above, past = outs[seen.tree.parents[node]]
                past = copy.copy(past)
                at = torch.tensor([len(seen.tokens) - 1 + seen.tree.depths[node]])
                embedded = self.embed([seen.tree.tokens[node]])
                outs[node] = self.forward(embedded, above, at, past), past
        return {node: self.logits(out)[0] for node, (out, _) in outs.items()}


@dataclass
class Past:
    """Keys and values so far, `[S, H_kv, d]`."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.values = values if self.values is None else torch.cat([self.values, values])


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """`[T, H, d]`: dimensions i and i + d / 2 are a complex number that turns."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def taps_of(target: Transformer, tokens: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, ...]:
    """`[n, H]` features of a sequence, in one pass."""
    batch = Batch.pack([Rows(np.array(tokens), 0)], group=target.config.group, windows=target.config.windows)
    return target(batch, taps=taps)[1]


def check(oracle: Oracle, target: Transformer, seen: Seen, branch: int) -> None:
    """A tree has the scores that the oracle gives, and below each explored node the best that there is."""
    tree, committed = seen.tree, copy.copy(seen.request)
    committed._length = len(seen.tokens)  # as the request was
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
    reference = oracle(head, target)  # before the head is made ready to serve
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


class TestShapes:
    def test_a_fixed_shape_names_each_node_once(self) -> None:
        shape = Fixed(EAGLE_TEMPLATE)
        assert (shape.depth, shape.branch, shape.max_nodes) == (5, 4, 26)
        nodes: list[tuple[int, ...]] = [()]
        for node in nodes:
            nodes += [(*node, rank) for rank in shape.ranks(node)]
        assert sorted(nodes[1:]) == sorted(tuple(path) for path in EAGLE_TEMPLATE)

    def test_only_what_has_something_below_it_is_explored(self) -> None:
        shape = Fixed([(0,), (1,), (0, 0), (1, 1), (2,)])
        level = [Guess(-rank, 1 + rank, 0, (rank,)) for rank in (2, 1, 0)]
        assert [guess.ranks for guess in shape.explored(level)] == [(0,), (1,)]

    def test_confidence_chooses_the_best_few(self) -> None:
        shape = Confident(3, 2, 4)
        assert list(shape.ranks((1, 2))) == [0, 1, 2, 3]
        level = [Guess(score, i, 0, (i,)) for i, score in enumerate([-3.0, -1.0, -2.0])]
        assert [guess.node for guess in shape.explored(level)] == [1, 2]
        assert Confident(4, 1, 1).max_nodes == 5
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
        shape = Confident.within("x", Target(tiny(0), None, EngineConfig(max_tree=most), 4), depth, *asked)
        assert (shape.depth, shape.width, shape.branch) == (depth, *expected)

    def test_numbers_below_1_are_refused(self) -> None:
        check_at_least_one("x", a=1, b=3)
        with pytest.raises(DrafterError, match=r"^x\(a=1, b=0\): each must be at least 1$"):
            check_at_least_one("x", a=1, b=0)
