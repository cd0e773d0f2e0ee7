"""EAGLE and EAGLE-2 against their formula."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from oracles import EagleOracle, make_eagle_head, taps_of
from recurrent import (
    STRESSES,
    Make,
    Watched,
    check,
    check_all,
    prompts,
    serve,
)
from slow import mostly_slow

from soothsay import LLM, SamplingParams
from soothsay.drafters.heads.eagle import Eagle, Eagle2
from soothsay.drafters.heads.recurrent_drafter import RecurrentDrafter
from soothsay.drafters.trees.templates import EAGLE_TEMPLATE
from soothsay.model.kernel_sets import best_kernels
from soothsay.model.transformer import Transformer


@pytest.mark.parametrize("kind", [Eagle, Eagle2])
@pytest.mark.parametrize("stress", mostly_slow(STRESSES))
def test_guesses_are_the_formula_s(stress: str, kind: type[RecurrentDrafter], tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle_head(target)
    check_all(stress, target, head, EagleOracle, lambda t: kind(t, head), branch=4)


def test_without_bias_and_with_those_of_qwen2(tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle_head(target, bias=False, qkv_bias=True)
    check_all("at ease", target, head, EagleOracle, lambda t: Eagle2(t, head, 3, 2, 3), branch=3)


def test_it_is_right_about_what_it_sees_whoever_used_its_memory_before(tiny: Make) -> None:
    """Blocks go from request to request, some drafted for and some not, some found and some written anew."""
    rng = np.random.default_rng(0)
    target = tiny(0)
    head = make_eagle_head(target)
    oracle = EagleOracle(head, target)
    llm = LLM(target, drafter="none", kv_tokens=48, block_size=4, max_rows=16)
    drafter = Watched(Eagle2(llm.engine.target, head, 2, 2, 2))
    params = SamplingParams(temperature=0, max_tokens=7)
    for _ in range(60):
        many = [[int(rng.integers(2))] * int(rng.integers(1, 14)) + [int(rng.integers(2))] for _ in range(3)]
        chosen = [drafter if rng.random() < 0.6 else "none" for _ in many]
        llm.generate(many, params, drafter=chosen)
    guessed = [seen for seen in drafter.seen if seen.first_key is not None and seen.max_nodes > 1]
    late = [seen for seen in guessed if seen.first_key != 1]
    assert len(guessed) > 200
    assert len(late) > 20
    for seen in guessed[::4] + late[::4]:
        check(oracle, target, seen, 2)


def test_a_conversation_goes_on_where_it_was(tiny: Make) -> None:
    """All but the last few tokens of an answer are there already, and all of them are seen."""
    target = tiny(0)
    llm = LLM(target, drafter="none", kv_tokens=512, block_size=4)
    drafter = Watched(Eagle2(llm.engine.target, make_eagle_head(target)))
    params = SamplingParams(max_tokens=30, temperature=0)
    first = llm.generate(prompts()[3], params, drafter=drafter)
    said = first.prompt_token_ids + first.token_ids
    assert drafter.num_run < len(said), "nothing is run twice"
    drafter.num_run = 0
    drafter.seen.clear()
    llm.generate([*said, 1, 2, 3], params, drafter=drafter)
    assert {seen.first_key for seen in drafter.seen} == {None, 1}
    assert drafter.num_run < 30 + 3 + 2 * 4


def test_a_cancelled_request_leaves_what_it_has(tiny: Make) -> None:
    target = tiny(0)
    llm = LLM(target, drafter="none", kv_tokens=512, block_size=4)
    drafter = Watched(Eagle2(llm.engine.target, make_eagle_head(target)))
    stream = llm.stream(prompts()[3], SamplingParams(temperature=0), drafter=drafter)
    next(iter(stream))
    stream.cancel()
    assert not drafter.inner.kv.states
    assert drafter.num_run == 47, "the full blocks of its prompt, less the first row"
    drafter.num_run = 0
    llm.generate([*prompts()[3], 1, 2], SamplingParams(temperature=0, max_tokens=3), drafter=drafter)
    assert drafter.num_run < 9


def test_nothing_is_run_for_a_single_node(tiny: Make) -> None:
    target = tiny(0)
    drafter, results, _ = serve(target, lambda t: Eagle(t, make_eagle_head(target)), engine={"max_tree": 1})
    assert sum(result.stats.drafted for result in results) == 0
    assert drafter.num_run < sum(len(result.prompt_token_ids) + 24 for result in results), "full blocks only"


def test_a_template_says_which_ranks_are_there(tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle_head(target)
    oracle = EagleOracle(head, target)
    drafter, _, _ = serve(target, lambda t: Eagle(t, head), engine={"max_tree": 64})
    full = [seen for seen in drafter.seen if len(seen.tree) == 26]
    assert len(full) > 20
    for seen in full[::10]:
        logits = oracle.tree(seen, taps_of(target, seen.tokens, oracle.taps))
        if seen.request.params.temperature > 0:
            continue
        paths = set()
        for node in range(1, 26):
            path = seen.tree.path(node)
            paths.add(
                tuple(
                    logits[above].argsort(descending=True).tolist().index(seen.tree.tokens[below])
                    for above, below in pairwise(path)
                )
            )
        assert paths == {tuple(path) for path in EAGLE_TEMPLATE}


@pytest.mark.parametrize("stress", ["at ease", "after prefixes it never saw"])
def test_with_the_fastest_kernels_that_are_here(stress: str, tiny: Make) -> None:
    slow = tiny(0, hidden_size=64, head_dim=32, attention_scale=32**-0.5)
    target = Transformer(slow.spec, best_kernels(slow.spec)).eval().requires_grad_(False)
    target.load_state_dict(slow.state_dict())
    head = make_eagle_head(target, kernels=target.kernels)
    check_all(stress, target, head, EagleOracle, lambda t: Eagle2(t, head), branch=3)
