"""Drafts of a recurrent head in one call, against its level-by-level twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from slow import distinct
from torch import Tensor

from soothsay import LLM, SamplingParams
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.heads.eagle3 import Eagle3, Eagle3Config, Eagle3Head
from soothsay.drafters.ops.draft_ops import DraftBatch, DraftOutput
from soothsay.drafters.ops.native_recurrent import NativeRecurrentDrafts
from soothsay.model.decoder import rope
from soothsay.model.decoder.rope import Rope
from soothsay.model.native.native_kernels import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="no native kernels run here")

PROMPTS = ["Tell me about rivers.", "Name three birds, and say where they live.", "What is a prime number?"]

PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=3),
    "few tokens": SamplingParams(max_tokens=40, temperature=1.1, top_k=7, seed=4),
    "a nucleus": SamplingParams(max_tokens=40, temperature=0.9, top_p=0.6, seed=5),
    "both": SamplingParams(max_tokens=40, temperature=0.9, top_p=0.8, top_k=20, seed=6),
    "a floor": SamplingParams(max_tokens=40, temperature=1.0, min_p=0.1, seed=7),
    "likeliest": SamplingParams(max_tokens=40, temperature=0.8, seed=8, verifier="typical"),
    "an answer that ends": SamplingParams(max_tokens=6, temperature=0),
}

Change = Callable[[Eagle3Config], Eagle3Config]

CONFIGS: dict[str, Change] = {
    "EAGLE-3": lambda c: c,
    "EAGLE-3.1": lambda c: replace(c, norm_taps="each", norm_output=True),
    "one norm of all features": lambda c: replace(c, norm_taps="whole"),
    "the other residual": lambda c: replace(c, norm_before_residual=True),
    "a joined residual": lambda c: replace(c, norm_taps="each", norm_output=True, joins=True),
    "an embedding of its own": lambda c: replace(c, own_embedding=True),
}


@pytest.fixture(scope="module", params=distinct("bfloat16", "int8"))
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("sibyl", dtype=request.param, drafter="none", kv_tokens=4096, prefix_caching=False)


def proposals(llm: LLM, drafter: Eagle3, params: SamplingParams) -> list[list[DraftTree]]:
    """The trees of every step of a batch."""
    seen: list[list[DraftTree]] = []
    propose = drafter.propose

    def watched(requests: Sequence[Request]) -> list[DraftTree]:
        seen.append(propose(requests))
        return seen[-1]

    drafter.propose = watched  # type: ignore[method-assign]
    llm.generate([llm.tokenizer.encode(prompt) for prompt in PROMPTS], params, drafter=drafter)
    del drafter.propose
    drafter.reset()
    return seen


def check_equal(llm: LLM, make: Callable[[], Eagle3], params: SamplingParams) -> None:
    """Assert that a drafter makes the same trees in one call and level by level."""
    at_once, by_levels = make(), make()
    assert at_once.at_once is not None
    by_levels.at_once = None
    ours, theirs = (proposals(llm, drafter, params) for drafter in (at_once, by_levels))
    assert len(ours) == len(theirs)
    nodes = 0
    for own, wanted in zip(ours, theirs, strict=True):
        for tree, other in zip(own, wanted, strict=True):
            assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
            # rows are summed over the head's tokens here, over all tokens there
            assert tree.scores == pytest.approx(other.scores, abs=1e-4)
            nodes += len(tree) - 1
    assert nodes > 10


@pytest.mark.parametrize("name", PARAMS)
def test_trees_are_those_of_the_twin(name: str, llm: LLM) -> None:
    check_equal(llm, lambda: Eagle3(llm.engine.target), PARAMS[name])


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 1), (4, 3, 2), (2, 2, 6)])
def test_trees_of_any_shape(shape: tuple[int, int, int], llm: LLM) -> None:
    depth, width, branch = shape
    made = partial(Eagle3, llm.engine.target, depth=depth, width=width, branch=branch)
    check_equal(llm, made, PARAMS["greedy"])


def test_cosines_are_asked_for_up_to_the_deepest_nodes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Rope.table
    monkeypatch.setattr(rope, "MIN_TABLE", 1)  # tables grow

    def no_more_than_asked_for(own: Rope, count: int) -> tuple[Tensor, Tensor]:
        cos, sin = (part.clone() for part in table(own, count))
        for part in cos, sin:
            assert len(part) >= count
            part[count:] = torch.nan
        return cos, sin

    monkeypatch.setattr(Rope, "table", no_more_than_asked_for)
    check_equal(llm, partial(Eagle3, llm.engine.target), PARAMS["greedy"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration(name: str, llm: LLM) -> None:
    target = llm.engine.target
    config = CONFIGS[name](Eagle3(target).served.head.config)  # type: ignore[arg-type]

    def make() -> Eagle3:
        torch.manual_seed(0)
        head = Eagle3Head(config, target.model.kernels)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 2)
        head.d2t += 3
        return Eagle3(target, head)

    check_equal(llm, make, PARAMS["greedy"])


def test_a_tree_stops_where_a_level_gains_too_little(llm: LLM) -> None:
    def make() -> Eagle3:
        drafter = Eagle3(llm.engine.target)
        drafter.min_level_gain = 0.5
        return drafter

    check_equal(llm, make, PARAMS["greedy"])


def test_what_changes_logits_is_drafted_level_by_level(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that are drafted for in one call."""
    drafter = Eagle3(llm.engine.target)
    grown: list[Request] = []
    grow = drafter.grower.grow
    monkeypatch.setattr(drafter.grower, "grow", lambda e, r, least: (grown.extend(r), grow(e, r, least))[1])
    params = [
        SamplingParams(max_tokens=20, seed=1),
        SamplingParams(max_tokens=20, seed=2, presence_penalty=0.5),
    ]
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    plain = [llm.generate(*one).token_ids for one in zip(prompts, params, strict=True)]
    results = llm.generate(prompts, params, drafter=drafter)
    assert [result.token_ids for result in results] == plain
    assert {request.params.presence_penalty for request in grown} == {0.5}
    assert all(result.stats.drafted > 10 for result in results)


def test_small_trees_of_a_drafter_that_is_sure() -> None:
    """No more nodes are computed than are verified, however deep the best path is."""
    llm = LLM(
        "sibyl", dtype="int8", drafter="none", kv_tokens=2048, max_tree=8, block_size=4, prefix_caching=False
    )
    check_equal(llm, partial(Eagle3, llm.engine.target, depth=9, width=6, branch=7), PARAMS["greedy"])


def test_a_tree_that_its_blocks_have_no_room_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    call, refused = NativeRecurrentDrafts.__call__, []

    def with_a_node_too_many_first(own: NativeRecurrentDrafts, batch: DraftBatch) -> list[DraftOutput | None]:
        (one,) = batch.inputs
        assert one.rows.table is not None
        room = len(one.rows.table) * batch.block_size - one.rows.start - len(one.rows.tokens)
        with pytest.raises(IndexError, match="fewer KV blocks") as error:
            call(own, replace(batch, inputs=[replace(one, nodes=room + 2)]))
        refused.append(error)
        return call(own, batch)

    monkeypatch.setattr(NativeRecurrentDrafts, "__call__", with_a_node_too_many_first)
    params = replace(PARAMS["an answer that ends"], ignore_eos=True)
    llm.generate(PROMPTS[0], params, drafter=Eagle3(llm.engine.target))
    assert refused


def test_stock_operations_have_no_such_call() -> None:
    llm = LLM("sibyl", dtype="float32", kernels="stock", drafter="none", kv_tokens=256)
    assert Eagle3(llm.engine.target).at_once is None
