"""Drafters learn while they serve, from the right requests and in time. Tokens do not depend on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_drafter import resolve
from slow import mostly_slow

from soothsay import LLM, DrafterError, Request, SamplingParams
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, Target
from soothsay.drafters.learning.experience import (
    BINS,
    EDGES,
    FADE,
    ORDER,
    PRIOR,
    SILENT,
    SILENT_ON_IT,
    Experience,
    Opinion,
    Trust,
    bin_of,
)
from soothsay.drafters.learning.learning_drafter import PIECE, SAVED_UP, Allowance, Learning
from soothsay.drafters.registry import build_drafter

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)
PARAMS = [GREEDY, SAMPLED, replace(SAMPLED, verifier="rejection"), replace(SAMPLED, top_p=0.8, min_tokens=3)]
PROMPTS = ["The old boat", "A dog and a cat", "Once upon a time", "The old boat"]


def learning_target(llm: LLM, share: float = 1.0, **options: Any) -> Target:
    target = llm.engine.target
    return replace(target, config=replace(target.config, learn=share, **options))


class Saying(Drafter):
    """Says the same tokens always, each with probability `p`."""

    trained = True

    def __init__(self, tokens: Sequence[int], p: float = 0.5):
        self.tokens, self.p, self.max_nodes = tokens, p, 16

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.extend(self.tokens, math.log(self.p))
        return trees


def test_a_bin_has_the_probabilities_between_its_edges() -> None:
    assert [bin_of(edge) for edge in EDGES] == list(range(3, BINS))
    assert bin_of(1e-9) == 2
    assert bin_of(1.0) == BINS - 1


def test_trust_begins_with_both_and_follows_what_it_sees() -> None:
    trust = Trust()
    sure, unsure = bin_of(0.99), bin_of(0.05)
    assert trust.rate(Opinion(sure, SILENT)) > 0.9
    assert 0.4 < trust.rate(Opinion(sure, SILENT_ON_IT)) < 0.6
    assert 0.4 < trust.rate(Opinion(sure, unsure)) < 0.6
    for _ in range(200):
        trust.record(Opinion(sure, unsure), False)
    assert trust.rate(Opinion(sure, unsure)) < 0.05
    for _ in range(20 * int(FADE)):
        trust.record(Opinion(sure, unsure), True)
    assert 0.99 < trust.rate(Opinion(sure, unsure)) <= 1, "old counts fade"
    assert (trust.right <= trust.seen).all()
    assert trust.seen.max() <= FADE
    assert trust.seen.min() == PRIOR


def test_continuations_interpolate_all_orders() -> None:
    experience = Experience(1000)
    experience.counts.read((), [1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 2, 5])
    said = experience.continuations((1, 2))
    assert max(said, key=lambda token: said[token]) == 3
    assert set(said) == {3, 4, 5}, "5 followed 2 alone"
    assert sum(said.values()) < 1
    assert experience.continuations((77,)) == {}
    assert experience.continuations((77, 2)).keys() == experience.continuations((2,)).keys()


class TestAllowance:
    def test_work_stops_when_the_share_is_used(self) -> None:
        now = [0.0]
        allowance = Allowance(0.1, lambda: now[0])
        done: list[float] = []

        def work() -> bool:
            now[0] += 0.001
            done.append(now[0])
            return True

        assert allowance.spend(work)
        assert not done, "nothing was saved up"
        for _ in range(1000):
            now[0] += 0.01
            assert allowance.spend(work)
        assert 0.09 < len(done) * 0.001 / now[0] < 0.11

    def test_a_long_rest_allows_a_short_burst_only(self) -> None:
        now = [0.0]
        allowance = Allowance(0.5, lambda: now[0])
        now[0] = 1e6
        assert allowance.left == SAVED_UP

    def test_work_that_is_done_is_not_called_again(self) -> None:
        now = [0.0]
        allowance = Allowance(1.0, lambda: now[0])
        now[0] = 1.0
        calls: list[int] = []
        assert not allowance.spend(lambda: bool(calls.append(1)))
        assert calls == [1]


def answered(llm: LLM, drafter: Drafter, prompt: str, params: SamplingParams, tenant: Tenant) -> Request:
    (request,) = llm.requests(prompt, params, drafter=drafter, tenant=tenant, traced=True)
    llm.engine.add(request)
    while request.finish_reason is None:
        llm.engine.step()
    return request


def said(request: Request) -> list[int]:
    return [int(token) for token in request.tokens[request.num_prompt :]]


INNER = ["mtp", "medusa", "block", "eagle", "draft-model", "redrafter", "eagle3(model=UNTRAINED)"]


@pytest.mark.parametrize("spec", mostly_slow(INNER))
def test_tokens_are_plain_decodings_while_it_learns(sibyl: LLM, spec: str) -> None:
    """Greedy and sampled, together in one batch, again and again: each round knows more."""
    plain = [one.token_ids for one in sibyl.generate(PROMPTS, PARAMS)]
    spec = "redrafter(model=UNTRAINED)" if spec == "redrafter" else spec
    drafter = build_drafter(resolve(spec), learning_target(sibyl))
    assert isinstance(drafter, Learning)
    steps = []
    for _ in range(3):
        results = sibyl.generate(PROMPTS, PARAMS, drafter=drafter)
        same = [one.token_ids for one in results]
        assert [same[i] for i in (0, 1, 3)] == [plain[i] for i in (0, 1, 3)]  # rejection keeps the law alone
        steps.append(sum(results[i].stats.steps for i in (0, 1, 3)))
        while drafter.study():
            pass
    assert steps[-1] < steps[0]


def test_a_small_tree_stays_small(sibyl: LLM) -> None:
    """Who chose a chain of two tokens verifies three rows, whatever was learned."""
    target = learning_target(sibyl)
    drafter = build_drafter("mtp(depth=2,width=1,branch=1)", target)
    for _ in range(3):
        stats = answered(sibyl, drafter, PROMPTS[0], PARAMS[0], EVERYBODY).stats
        assert 0 < stats.drafted <= 2 * stats.steps
        while drafter.study():
            pass
    assert Learning(target, build_drafter("none", target)).max_nodes == target.config.max_tree


@pytest.mark.parametrize("spec", ["auto", "suffix | mtp", "suffix > medusa", "suffix + mtp"])
def test_parts_of_compositions_learn(sibyl: LLM, spec: str) -> None:
    plain = [one.token_ids for one in sibyl.generate(PROMPTS[:2], PARAMS[:2])]
    drafter = build_drafter(spec, learning_target(sibyl))
    assert sum(one.kind.startswith("learning-") for one in drafter.learned()) == 1
    for _ in range(3):
        assert [one.token_ids for one in sibyl.generate(PROMPTS[:2], PARAMS[:2], drafter=drafter)] == plain
    assert isinstance(drafter.study(), bool)


def test_preemption_changes_nothing(sibyl: LLM) -> None:
    tight = LLM(
        sibyl.model, tokenizer=sibyl.tokenizer, drafter="none", max_context=80, kv_tokens=96, block_size=8
    )
    drafter = build_drafter("suffix + ngram", tight.engine.target)
    drafter = Learning(learning_target(tight), drafter)
    params = [replace(GREEDY, max_tokens=40), replace(SAMPLED, max_tokens=40)] * 2
    plain = [one.token_ids for one in sibyl.generate(PROMPTS, params)]
    for _ in range(2):
        results = tight.generate(PROMPTS, params, drafter=drafter)
        assert [one.token_ids for one in results] == plain
    assert len(drafter._drafts) == 0


def test_no_draft_is_deeper_than_the_request_can_use(sibyl: LLM) -> None:
    drafter = Learning(learning_target(sibyl), Saying(range(8000, 8006), p=0.9))
    request = Request([1, 2], GREEDY, seed=0, limit=6, drafter=drafter)
    request.max_nodes = 16
    (tree,) = drafter.propose([request])
    assert max(tree.depths) == request.max_depth == 3


def test_tokens_that_nobody_knows_may_be_drawn_too(sibyl: LLM) -> None:
    """Each of thirty tokens came once, and some are looked at. They are not all that may come."""
    drafter = Learning(learning_target(sibyl), Saying([]))
    for token in range(100, 130):
        drafter.memories[EVERYBODY].counts.read([1, 2], [token])
    certain = []
    for seed in range(20):
        request = Request([1, 2], SAMPLED, seed=seed, limit=9, drafter=drafter)
        request.max_nodes = 16
        (tree,) = drafter.propose([request])
        certain.append(sum(math.exp(tree.scores[node]) for node in tree.children[0].values()))
    assert 0.5 < sum(certain) / len(certain) < 0.85


class TestWhatIsLearned:
    ANYONE = Tenant()

    @pytest.fixture
    def drafter(self, sibyl: LLM) -> Learning:
        """Around a drafter that is never right."""
        return Learning(learning_target(sibyl, learn_for_tenants=True), Saying([8000, 8001]))

    def test_wrong_drafts_are_believed_less_and_answers_are_remembered(
        self, sibyl: LLM, drafter: Learning
    ) -> None:
        first = answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE)
        while drafter.study():
            pass
        again = answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE)
        assert said(again) == said(first)
        assert (first.stats.steps, first.stats.accepted) == (24, 0)
        assert again.stats.steps < 12
        trust = drafter.memories[self.ANYONE].trust[False]
        assert trust.rate(Opinion(bin_of(0.5), SILENT)) < 0.3
        assert again.traces is not None
        authors = {name for trace in again.traces for name in trace.authors if name}
        assert "learned" in authors

    def test_tenants_do_not_teach_each_other(self, sibyl: LLM, drafter: Learning) -> None:
        bob = answered(sibyl, drafter, PROMPTS[0], GREEDY, Tenant("bob")).stats
        while drafter.study():
            pass
        assert answered(sibyl, drafter, PROMPTS[0], GREEDY, Tenant("ann")).stats == bob
        while drafter.study():
            pass
        assert answered(sibyl, drafter, PROMPTS[0], GREEDY, Tenant("ann")).stats != bob

    def test_tenants_teach_nothing_unless_that_is_asked_for(self, sibyl: LLM) -> None:
        drafter = Learning(learning_target(sibyl), Saying([8000, 8001]))
        for _ in range(2):
            request = answered(sibyl, drafter, PROMPTS[0], GREEDY, Tenant("ann"))
            assert request.stats.steps == 24
            assert not drafter.study()
        assert Tenant("ann") not in drafter.memories

    def test_a_long_answer_is_read_as_if_in_one_piece(self, drafter: Learning) -> None:
        prompt, answer = [*range(100, 110)], [*range(3 * PIECE)]
        request = Request(prompt, GREEDY, seed=0, limit=len(prompt) + len(answer), drafter=drafter)
        request.emit(answer)
        drafter.release(request)
        while drafter.study():
            pass
        whole = Experience(1000)
        whole.counts.read(prompt, answer)
        state = drafter.memories[self.ANYONE].state()
        assert all(np.array_equal(array, state[name]) for name, array in whole.state().items())

    def test_an_answer_that_has_not_ended_teaches_nothing(self, drafter: Learning) -> None:
        request = Request([1, 2, 3], GREEDY, seed=0, limit=20, drafter=drafter)
        request.emit([4, 5, 6])
        drafter.release(request)
        assert not drafter.study()
        assert not [*drafter.memories]

    def test_reset_forgets(self, sibyl: LLM, drafter: Learning) -> None:
        first = answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE)
        drafter.reset()
        assert not drafter.study()
        assert answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE).stats == first.stats

    def test_it_comes_back_from_arrays(self, sibyl: LLM, drafter: Learning) -> None:
        answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE)
        while drafter.study():
            pass
        state = {name: array.copy() for name, array in drafter.memories[self.ANYONE].state().items()}
        again = answered(sibyl, drafter, PROMPTS[0], GREEDY, self.ANYONE).stats
        other = Learning(drafter.target, Saying([8000, 8001]))
        other.restore(self.ANYONE, state)
        assert answered(sibyl, other, PROMPTS[0], GREEDY, self.ANYONE).stats == again

    def test_what_two_engines_have_learned_is_joined(self, drafter: Learning) -> None:
        parts = [Experience(10), Experience(10)]
        for number, part in enumerate(parts):
            part.counts.read([], [1, 2 + number, 1, 2])
            for _ in range(number + 3):
                part.trust[False].record(Opinion(2, 3), number == 1)
        for part in (*parts, *reversed(parts)):  # again: nothing counts twice
            drafter.restore(self.ANYONE, part.state())
        joined = drafter.memories[self.ANYONE]
        followers, *_ = joined.counts.followers((1,))
        assert dict(followers) == {2: 2, 3: 1}
        assert joined.trust[False].rate(Opinion(2, 3)) == parts[1].trust[False].rate(Opinion(2, 3))

    @pytest.mark.parametrize(
        "changes",
        [
            {"right": np.full((2, BINS, BINS), 2.0), "seen": np.ones((2, BINS, BINS))},
            {"right": np.full((2, BINS, BINS), 1e300)},
            {"right": np.full((2, BINS, BINS), -1.0)},
            {"right": np.zeros((2, BINS, BINS)), "seen": np.full((2, BINS, BINS), 0.5)},
            {"right": np.zeros((2, BINS, BINS)), "seen": np.full((2, BINS, BINS), 2 * FADE)},
            {"right": np.zeros((2, BINS, BINS), np.float32)},
            {"seen": np.full((2, BINS, BINS), np.nan)},
            {"seen": np.ones((2, BINS, BINS - 1))},
            {"contexts": np.zeros((3, ORDER), np.int32)},
        ],
        ids=range(9),
    )
    def test_lies_are_refused(self, drafter: Learning, changes: dict[str, Any]) -> None:
        with pytest.raises(DrafterError, match="damaged"):
            drafter.restore(self.ANYONE, {**Experience(10).state(), **changes})


def test_auto_learns_without_a_trained_drafter_too(sibyl: LLM) -> None:
    target = replace(learning_target(sibyl), path=None)
    drafter = build_drafter("auto", target)
    assert [one.kind for one in drafter.learned()] == ["suffix", "learning-none"]
    plain = [one.token_ids for one in sibyl.generate(PROMPTS[:2], PARAMS[:2])]
    for _ in range(3):
        assert [one.token_ids for one in sibyl.generate(PROMPTS[:2], PARAMS[:2], drafter=drafter)] == plain
        drafter.study()
    assert len(build_drafter("auto", replace(sibyl.engine.target, path=None)).learned()) == 1


def test_learning_without_a_trained_part_is_reported(sibyl: LLM) -> None:
    with pytest.warns(UserWarning, match=r"learn=0.1 has no effect: drafter 'suffix' has no trained part"):
        LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="suffix", learn=0.1, kv_tokens=512)


def test_what_was_learned_survives_a_restart(sibyl: LLM, tmp_path: Path) -> None:
    def new() -> LLM:
        target: dict[str, Any] = {"tokenizer": sibyl.tokenizer, "kv_tokens": 2048}
        spec = f"mtp(model={Path(sibyl.engine.target.path or '') / 'drafters' / 'mtp'})"
        return LLM(sibyl.model, drafter=spec, keep=tmp_path, learn=1.0, **target)

    old = new()
    first = old.generate(PROMPTS[0], GREEDY)
    while old.engine.study():
        pass
    assert old.save_learned() == 1
    again, restored = old.generate(PROMPTS[0], GREEDY), new().generate(PROMPTS[0], GREEDY)
    assert first.token_ids == again.token_ids == restored.token_ids
    assert again.stats.steps == restored.stats.steps < first.stats.steps
    old.forget_learned()
    assert not list(tmp_path.iterdir())
    assert old.generate(PROMPTS[0], GREEDY).stats.steps == first.stats.steps
