"""Admission, budget, preemption and memory, on the real scheduler with real requests and no model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason
from soothsay.core.cache import BlockAllocator
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Verdict
from soothsay.drafters.base import NoDrafter, Target
from soothsay.engine import scheduler
from soothsay.engine.pace import MIN_PREFILL_ROWS
from soothsay.engine.scheduler import Scheduler

SIZE = 4  # tokens in a block


class Recording(NoDrafter):
    """A drafter of trees with a given number of nodes. It records the requests that it releases."""

    def __init__(self, max_nodes: int, released: list[Request]):
        super().__init__(Target(None, None, None, 0))  # type: ignore[arg-type]
        self.max_nodes, self.released = max_nodes, released

    def release(self, request: Request) -> None:
        self.released.append(request)


class Serving:
    """A scheduler without a model: a chain of draft tokens is accepted where `step` says so.

    `row_seconds` is what a row of a step costs, on a virtual clock.
    """

    def __init__(self, num_blocks: int, *, share: bool = True, row_seconds: float = 0.0, **config: Any):
        self.config = EngineConfig(block_size=SIZE, prefix_caching=share, **config)
        self.allocator = BlockAllocator(num_blocks, SIZE, share=share)
        self.evicted: list[Request] = []
        self.row_seconds, self.now = row_seconds, 0.0
        self.scheduler = Scheduler(self.config, self.allocator, clock=lambda: self.now)

    def add(
        self,
        prompt: int | Sequence[int],
        max_nodes: int = 1,
        max_tokens: int = 40,
        caller: str | None = None,
        **options: Any,
    ) -> Request:
        """A request; a number of tokens stands for a prompt that turns nothing with others."""
        if isinstance(prompt, int):
            prompt = np.random.default_rng().integers(0, 1 << 40, prompt).tolist()
        request = Request(
            prompt,
            SamplingParams(max_tokens=max_tokens),
            seed=0,
            limit=len(prompt) + max_tokens,
            drafter=Recording(max_nodes, self.evicted),
            block_size=SIZE,
            **options,
        )
        request.caller = caller
        self.scheduler.add(request)
        return request

    def step(self) -> list[Turn]:
        """A step in which no draft token is accepted, and the target always says 1."""
        turns = self.scheduler.schedule()
        self.finish(turns, lambda turn: [1])
        return turns

    def finish(self, turns: Sequence[Turn], says: Callable[[Turn], Sequence[int]]) -> None:
        """The rest of a step. For each turn with a tree `says` gives the tokens: accepted ones, the bonus."""
        for turn in turns:
            if turn.reaches_end:
                *accepted, bonus = says(turn)
                turn.tree = DraftTree(int(turn.request.tokens[-1]))
                turn.tree.extend(accepted)
                path = [*range(1, len(accepted) + 1)]
                turn.verdict = Verdict(path, [*accepted, bonus])
                turn.authors = dict.fromkeys(path, "recording")
        self.now += self.row_seconds * sum(turn.num_rows for turn in turns)
        self.scheduler.update(turns)


def rows(turns: Sequence[Turn]) -> list[tuple[Request, int]]:
    return [(turn.request, turn.num_tokens) for turn in turns]


def trees(turns: Sequence[Turn]) -> list[int]:
    return [turn.request.max_nodes for turn in turns if turn.reaches_end]


class TestBudget:
    def test_a_prompt_goes_in_as_many_chunks_as_it_takes(self) -> None:
        serving = Serving(64, max_rows=10)
        long = serving.add(23)
        assert rows(serving.step()) == [(long, 10)]
        assert rows(serving.step()) == [(long, 10)]
        assert long.num_output == 0
        assert rows(serving.step()) == [(long, 3)]
        assert rows(serving.step()) == [(long, 1)]
        assert long.num_output == 2

    def test_whoever_came_first_goes_first_and_leaves_half_of_the_rows_to_those_behind(self) -> None:
        serving = Serving(64, max_rows=10)
        first, second, third = serving.add(30), serving.add(2), serving.add(6)
        assert rows(serving.step()) == [(first, 6), (second, 2), (third, 2)]
        assert rows(serving.step()) == [(first, 5), (second, 1), (third, 4)]
        assert second.num_output == 2
        assert rows(serving.step()) == [(first, 8), (second, 1), (third, 1)]

    @pytest.mark.parametrize("others", [1, 5, 40])
    def test_a_short_prompt_does_not_wait_for_long_ones(self, others: int) -> None:
        serving = Serving(4000, max_rows=100, max_stall=0.5, row_seconds=0.005)
        for _ in range(others):
            serving.add(300)
        serving.step()
        short = serving.add(50 // others)
        before = serving.now
        while not short.num_output:
            serving.step()
        assert serving.now - before <= 0.5 * 1.1

    def test_a_newcomer_waits_for_a_short_step_where_nobody_decodes(self) -> None:
        serving = Serving(2000, max_rows=512, max_stall=0.1, row_seconds=0.001)
        serving.add(5000)
        took = []
        for _ in range(20):
            before = serving.now
            serving.step()
            took.append(serving.now - before)
        assert took[0] == pytest.approx(0.512), "nothing is known yet"
        assert max(took[1:]) == pytest.approx(0.1, rel=0.05)

    def test_more_requests_than_rows_take_turns_by_coming_first(self) -> None:
        serving = Serving(64, max_rows=2)
        a, b, _ = serving.add(3), serving.add(1), serving.add(1)
        assert rows(serving.step()) == [(a, 1), (b, 1)]

    def test_a_prompt_is_read_slowly_where_others_would_wait_for_it(self) -> None:
        serving = Serving(64, max_rows=100, max_stall=0.1, row_seconds=0.1 / 45.5)  # 45 rows in the time
        serving.scheduler.pace.follow(50, 50 * serving.row_seconds)
        waits, long = serving.add(3), serving.add(150)
        assert rows(serving.step()) == [(waits, 3), (long, 42)]
        assert rows(serving.step()) == [(waits, 1), (long, 44)]
        serving.scheduler.remove(waits)
        assert rows(serving.step()) == [(long, 45)]

    def test_the_time_of_masks_is_not_that_of_rows(self) -> None:
        serving = Serving(64, row_seconds=0.01, max_stall=1.0)
        request = serving.add(40)
        request.constraint = SimpleNamespace(seconds=5.0, limit=lambda tokens: None)  # type: ignore[assignment]
        turns = serving.scheduler.schedule()
        serving.now += 5.0
        serving.finish(turns, lambda turn: [1])
        assert serving.scheduler.pace.rows(1000, 1) == pytest.approx(100, abs=1)

    def test_newcomers_are_read_slowly_too(self) -> None:
        serving = Serving(64, max_rows=100, max_stall=0.1, row_seconds=0.1 / 45.5)
        serving.scheduler.pace.follow(50, 50 * serving.row_seconds)
        first = serving.add(3)
        serving.step()
        second, third = serving.add(30), serving.add(30)
        assert rows(serving.step()) == [(first, 1), (second, 22), (third, 22)]

    def test_an_answer_that_has_lost_its_engine_makes_others_wait_no_longer(self) -> None:
        serving = Serving(64, max_rows=100, max_stall=0.1, row_seconds=0.1 / 45.5)
        serving.scheduler.pace.follow(50, 50 * serving.row_seconds)
        first = serving.add(3)
        serving.step()
        second = serving.add(80)
        second.resume([1] * 10, ended=False)
        assert rows(serving.step()) == [(first, 1), (second, 44)]

    def test_guesses_are_not_cut_for_prompts(self) -> None:
        serving = Serving(64, max_rows=100, max_stall=0.1, row_seconds=1.0, max_tree=8)
        serving.scheduler.pace.follow(50, 50.0)  # nothing fits
        first = serving.add(3, 8)
        serving.step()
        second = serving.add(90)
        turns = serving.scheduler.schedule()
        assert rows(turns) == [(first, 1), (second, 1 + MIN_PREFILL_ROWS)], "some rows are read in any case"
        assert trees(turns) == [8]

    def test_no_more_requests_run_than_allowed(self) -> None:
        serving = Serving(64, max_requests=2)
        a, b, c = (serving.add(3, max_tokens=1) for _ in range(3))
        assert rows(serving.step()) == [(a, 3), (b, 3)]
        assert rows(serving.step()) == [(c, 3)]

    def test_newcomers_join_those_who_run(self) -> None:
        serving = Serving(64, max_rows=6)
        a = serving.add(2)
        serving.step()
        b = serving.add(7)
        assert rows(serving.step()) == [(a, 1), (b, 5)]

    def test_nothing_to_do_is_no_turn(self) -> None:
        assert Serving(4).scheduler.schedule() == []


class TestTrees:
    def test_a_tree_is_as_large_as_its_drafter_and_the_configuration_allow(self) -> None:
        serving = Serving(64, max_tree=8)
        for nodes in (1, 5, 8, 100):
            serving.add(3, nodes)
        assert trees(serving.scheduler.schedule()) == [1, 5, 8, 8]

    def test_only_a_share_that_reaches_the_end_has_one(self) -> None:
        serving = Serving(64, max_rows=10)
        request = serving.add(15, 8)
        turns = serving.step()
        assert not turns[0].reaches_end
        assert trees(serving.scheduler.schedule()) == [6], "of ten rows, five are tokens"
        assert request.max_nodes == 6

    def test_scarce_rows_are_shared_out_evenly(self) -> None:
        serving = Serving(64, max_rows=19)
        for _ in range(4):
            serving.add(1, 16)
        assert trees(serving.scheduler.schedule()) == [4, 5, 5, 5]

    def test_what_one_leaves_others_take(self) -> None:
        serving = Serving(64, max_rows=16)
        for nodes in (1, 2, 16, 16):
            serving.add(1, nodes)
        assert trees(serving.scheduler.schedule()) == [1, 2, 6, 7]

    @pytest.mark.parametrize(("left", "nodes"), [(1, 1), (2, 8), (3, 8)])
    def test_a_guess_that_no_bonus_can_follow_is_no_use(self, left: int, nodes: int) -> None:
        serving = Serving(64)
        serving.add(3, 8, max_tokens=left)
        assert trees(serving.scheduler.schedule()) == [nodes]

    @pytest.mark.parametrize(("guesses", "nodes"), [(0, 1), (2, 3), (7, 8), (9, 8), (None, 8)])
    def test_a_request_may_bound_its_guesses(self, guesses: int | None, nodes: int) -> None:
        serving = Serving(64)
        serving.add(3, 8, max_guesses=guesses)
        serving.add(3, 8)
        assert trees(serving.scheduler.schedule()) == [nodes, 8]

    def test_scarce_blocks_cut_trees_before_they_cost_anyone_his_place(self) -> None:
        serving = Serving(4)
        a, b = serving.add(6, 16, max_tokens=9), serving.add(1, 16, max_tokens=9)
        turns = serving.scheduler.schedule()
        assert [turn.request for turn in turns] == [a, b]
        assert trees(turns) == [7, 4], "two blocks and the one that is free; one block"
        assert serving.allocator.num_free == 0
        assert (len(a.blocks), len(b.blocks)) == (3, 1)
        assert serving.evicted == []

    def test_blocks_of_a_tree_are_kept_for_the_tokens_to_come(self) -> None:
        serving = Serving(8)
        a = serving.add(4, 5)
        serving.step()
        assert len(a.blocks) == 2
        serving.step()
        assert (len(a.blocks), serving.allocator.num_free) == (3, 5)


class TestMemory:
    def test_a_newcomer_waits_until_everyone_who_runs_keeps_a_block_in_hand(self) -> None:
        serving = Serving(6)
        a = serving.add(8)
        serving.step()
        b = serving.add(13)  # four blocks: all that are left
        assert rows(serving.step()) == [(a, 1)]
        assert list(serving.scheduler.waiting) == [b]
        serving.scheduler.remove(a)
        assert rows(serving.step()) == [(b, 13)]

    @pytest.mark.parametrize(("long", "passes"), [(9, True), (13, False), (17, False)])
    def test_only_those_pass_a_request_without_room_that_leave_it_its_room(
        self, long: int, passes: bool
    ) -> None:
        serving = Serving(7)
        a = serving.add(12)
        serving.step()
        b, c = serving.add(long), serving.add(1)
        assert rows(serving.step()) == [(a, 1), (c, 1)][: 1 + passes]
        assert serving.scheduler.waiting == ([b] if passes else [b, c])
        serving.scheduler.remove(a)
        assert rows(serving.step())[0] == (b, long)

    def test_those_that_keep_passing_do_not_keep_a_long_prompt_waiting(self) -> None:
        serving = Serving(20)
        serving.add(40, max_tokens=8)
        serving.step()
        long = serving.add(40)
        for _ in range(30):
            serving.add(3, max_tokens=12)
            serving.step()
        assert long in serving.scheduler.running
        assert long.num_output > 10
        assert not long.num_preemptions

    def test_a_preempted_request_is_passed_only_by_callers_that_have_nothing_running(self) -> None:
        serving = Serving(8, share=False)
        a, b, c = (serving.add(7, caller="a") for _ in range(3))
        while not serving.evicted:
            serving.step()
        d = serving.add(1, caller="a")
        assert rows(serving.step()) == [(a, 1), (b, 1)]
        assert serving.scheduler.waiting == [c, d]
        e = serving.add(1, caller="e")
        assert rows(serving.step()) == [(a, 1), (b, 1), (e, 1)]
        assert serving.scheduler.waiting == [c, d]

    def test_the_last_to_come_goes_when_blocks_run_out_and_is_first_in_line(self) -> None:
        serving = Serving(6, share=False)
        a, b, c = (
            serving.add(4),
            serving.add(4),
            serving.add(3),
        )  # a and b need a second block soon, c not yet
        serving.step()
        d = serving.add(1)
        assert rows(serving.step()) == [(a, 1), (b, 1), (c, 1)], "one block is left, and three run"
        assert serving.allocator.num_free == 1
        assert rows(serving.step()) == [(a, 1), (b, 1), (c, 1)]
        assert serving.allocator.num_free == 0
        for _ in range(2):
            serving.step()
        assert rows(serving.step()) == [(a, 1), (b, 1)]
        assert serving.evicted == [c]
        assert list(serving.scheduler.waiting) == [c, d]
        assert (c.blocks, c.cached, c.num_preemptions) == ([], 0, 1)
        assert len(c.tokens) == 3 + 5, "its tokens are kept"
        assert a.num_preemptions == b.num_preemptions == 0

    def test_a_preempted_request_comes_back_with_all_its_tokens_pending(self) -> None:
        serving = Serving(3, share=False)
        a, b = serving.add(4, max_tokens=5), serving.add(3, max_tokens=9)
        while a.finish_reason is None:
            serving.step()
        assert (len(b.tokens), b.num_preemptions, serving.evicted) == (5, 1, [b, a])
        assert rows(serving.step()) == [(b, 5)]

    def test_who_had_to_go_does_not_come_back_in_the_same_step(self) -> None:
        """Even where he would fit without the blocks of his tree: blocks would go to and fro."""
        serving = Serving(6, share=False)
        a, b = serving.add(4), serving.add(1, 16)
        while not serving.evicted:
            before = serving.step()
        assert rows(before) == [(a, 1)]
        assert rows(serving.step()) == [(a, 1), (b, len(b.tokens) - 1)]

    def test_it_finds_again_what_it_had_computed(self) -> None:
        serving = Serving(5)
        a, b = serving.add(4, max_tokens=12), serving.add(5, max_tokens=12)
        while not serving.evicted:
            serving.step()
        serving.scheduler.remove(a)
        told = len(b.tokens)
        assert b.num_prefix_hits == 0
        (turn,) = serving.scheduler.schedule()
        assert turn.request is b
        assert 0 < b.cached == told - turn.num_tokens
        assert b.cached % SIZE == 0
        assert b.num_prefix_hits == 0, "only what was found at first counts"

    def test_the_last_one_can_have_all_the_memory(self) -> None:
        serving = Serving(4, share=False)
        a, b = serving.add(3, max_tokens=13), serving.add(3, max_tokens=13)
        for _ in range(60):
            serving.step()
        assert (len(a.tokens), len(b.tokens)) == (16, 16)
        assert b.num_preemptions > 0
        assert serving.allocator.num_free == 4

    def test_whoever_runs_out_last_goes_himself(self) -> None:
        serving = Serving(3, share=False)
        a, b = serving.add(4), serving.add(3)
        serving.step()
        serving.step()
        serving.step()  # a has two blocks, b one that is full
        assert rows(serving.step()) == [(a, 1)]
        assert serving.evicted == [b]
        assert serving.allocator.num_free == 1

    def test_a_request_can_leave_from_anywhere(self) -> None:
        serving = Serving(8, max_requests=1)
        a, b, c = serving.add(4), serving.add(4), serving.add(4)
        serving.step()
        serving.scheduler.remove(b)
        assert serving.evicted == [], "it had nothing to lose"
        serving.scheduler.remove(a)
        serving.scheduler.remove(a)
        assert serving.evicted == [a]
        assert serving.allocator.num_free == 8
        assert rows(serving.step()) == [(c, 4)]


class TestPriority:
    def test_the_lowest_is_admitted_first_and_equals_as_they_came(self) -> None:
        serving = Serving(64, max_requests=1)
        asked = [serving.add(3, max_tokens=1, priority=priority) for priority in (0, 5, -1, 5, 0, -1)]
        order = [asked.index(turn.request) for _ in asked for turn in serving.step()]
        assert order == [2, 5, 0, 4, 1, 3]

    def test_a_newcomer_s_prompt_is_read_before_that_of_others(self) -> None:
        serving = Serving(64, max_rows=10)
        late = serving.add(40, priority=1)
        assert rows(serving.step()) == [(late, 10)]
        soon = serving.add(20)
        assert rows(serving.step()) == [(soon, 5), (late, 5)]

    def test_nobody_has_to_go_only_because_another_came(self) -> None:
        serving = Serving(6)
        late = serving.add(15, priority=1)
        serving.step()
        soon = serving.add(12)
        assert rows(serving.step()) == [(late, 1)]
        assert serving.scheduler.waiting == [soon]

    def test_the_highest_goes_when_blocks_run_out_and_keeps_its_place(self) -> None:
        serving = Serving(6, share=False)
        worst, middle, best = (serving.add(4, priority=priority) for priority in (2, 1, 0))
        assert [turn.request for turn in serving.step()] == [best, middle, worst]
        equal = serving.add(9, priority=2)
        while not serving.evicted:
            serving.step()
        assert serving.evicted == [worst], "not whoever came last"
        assert serving.scheduler.waiting == [worst, equal], "it came before its equal"
        better = serving.add(4, priority=1)
        assert serving.scheduler.waiting == [better, worst, equal]
        assert serving.scheduler.running == [best, middle]

    def test_of_equals_the_last_to_come_goes(self) -> None:
        serving = Serving(6, share=False)
        a, b, c = serving.add(4, priority=3), serving.add(4, priority=3), serving.add(3)
        while not serving.evicted:
            serving.step()
        assert serving.evicted == [b]
        assert serving.scheduler.running == [c, a]


class TestCallers:
    def test_callers_take_turns_and_each_one_s_requests_come_in_order(self) -> None:
        serving = Serving(64, max_requests=1)
        asked = [serving.add(3, max_tokens=1, caller=caller) for caller in "aaaabbc"]
        order = [asked.index(turn.request) for _ in asked for turn in serving.step()]
        assert order == [0, 4, 6, 1, 5, 2, 3]

    def test_a_newcomer_waits_for_one_request_of_each_caller(self) -> None:
        serving = Serving(640, max_requests=4)
        many = [serving.add(3, max_tokens=2, caller="a") for _ in range(100)]
        for _ in range(20):
            serving.step()
        late = serving.add(3, max_tokens=1, caller="b")
        serving.step()
        serving.step()
        assert late.finish_reason is not None
        assert [request.finish_reason is not None for request in many] == [True] * 43 + [False] * 57

    def test_a_caller_leaves_places_to_others_and_one_without_a_name_takes_all(self) -> None:
        serving = Serving(640, max_requests=16)
        for _ in range(40):
            serving.add(3, caller="a")
        assert len(serving.step()) == 14
        other = serving.add(3, caller="b")
        assert (other, 3) in rows(serving.step())
        serving = Serving(640, max_requests=16)
        for _ in range(40):
            serving.add(3)
        assert len(serving.step()) == 16

    def test_a_preempted_request_keeps_its_place(self) -> None:
        serving = Serving(6, share=False)
        _, b = serving.add(8, caller="a"), serving.add(8, caller="b")
        while not serving.evicted:
            serving.step()
        serving.add(1, caller="c")
        assert serving.scheduler.waiting[0] is b

    def test_a_steady_stream_of_newcomers_does_not_keep_the_many_of_another_waiting(self) -> None:
        serving = Serving(64, max_requests=1)
        many = [serving.add(3, max_tokens=1, caller="a") for _ in range(5)]
        for number in range(40):
            serving.add(3, max_tokens=1, caller=f"new {number}")
            serving.step()
        assert [request.finish_reason is not None for request in many] == [True] * 5

    def test_cancelled_requests_do_not_count(self) -> None:
        serving = Serving(64, max_requests=1)
        for request in [serving.add(3, caller="a") for _ in range(50)]:
            serving.scheduler.remove(request)
        a, _, c = serving.add(3, max_tokens=1, caller="a"), *(serving.add(3, 1, 1, "b") for _ in range(2))
        serving.step()
        serving.step()
        assert a.finish_reason is not None
        assert c.finish_reason is None


PREFIX = list(range(100, 112))  # three blocks


class TestSharedPrefixes:
    def test_full_blocks_are_found_at_admission(self) -> None:
        serving = Serving(16)
        a = serving.add([*PREFIX, 1])
        serving.step()
        b = serving.add([*PREFIX, 2, 3])
        assert rows(serving.step()) == [(a, 1), (b, 2)]
        assert b.blocks[:3] == a.blocks[:3]
        assert b.num_prefix_hits == 12

    def test_the_last_token_is_never_found(self) -> None:
        """Its logits are needed, so at least one row is computed."""
        serving = Serving(16)
        serving.add(PREFIX, max_tokens=1)
        serving.step()
        b = serving.add(PREFIX)
        assert rows(serving.step()) == [(b, 4)]
        assert b.num_prefix_hits == 8

    def test_a_request_waits_while_another_computes_the_same_prefix(self) -> None:
        serving = Serving(32, max_rows=8)
        a, b = serving.add([*PREFIX, 1]), serving.add([*PREFIX, 2])
        assert rows(serving.step()) == [(a, 8)]
        assert rows(serving.step()) == [(a, 5)], "b could have joined, but a's third block is on its way"
        assert rows(serving.step()) == [(a, 1), (b, 1)]
        assert b.num_prefix_hits == 12

    def test_one_that_leaves_while_it_waits_for_a_prefix_holds_no_other(self) -> None:
        serving = Serving(32, max_rows=8)
        a, b = serving.add([*PREFIX, 1]), serving.add([*PREFIX, 2])
        serving.step()
        assert b.awaited == (a, 12)
        serving.scheduler.remove(b)
        assert b.awaited is None, "a caller may keep the answer"

    def test_the_draft_beyond_the_end_of_an_answer_is_not_found(self) -> None:
        """The block's last token was accepted, and is not in the answer."""
        serving = Serving(8)
        request = serving.add(3, max_nodes=6, max_tokens=4)
        serving.finish(serving.scheduler.schedule(), lambda turn: [1] * 6)
        assert (request.num_output, serving.allocator.num_cached) == (4, 1)

    def test_others_pass_those_that_wait_for_a_prefix(self) -> None:
        serving = Serving(64, max_rows=10)
        a, *equal = [serving.add([*PREFIX, 1], max_tokens=9) for _ in range(8)]
        b = serving.add(3)
        assert rows(serving.step()) == [(a, 7), (b, 3)]
        assert serving.scheduler.waiting == equal, "each keeps its place"
        c = serving.add([7])
        assert rows(serving.step()) == [(a, 6), (b, 1), (c, 1)]
        serving.step()
        assert serving.scheduler.running == [a, *equal, b, c]
        assert [own.num_prefix_hits for own in equal] == [12] * 7

    def test_nobody_passes_one_that_has_waited_for_a_prefix_and_lacks_memory_now(self) -> None:
        serving = Serving(9, max_rows=8)
        a, long = serving.add([*PREFIX, 1], max_tokens=4), serving.add([*PREFIX, *range(11)])
        b = serving.add(11, max_tokens=2)
        serving.step()
        assert serving.scheduler.running == [a, b]
        serving.step()
        c = serving.add(1)
        serving.step()
        assert serving.scheduler.waiting == [long, c]
        while long in serving.scheduler.waiting:
            assert c in serving.scheduler.waiting
            serving.step()
        assert long.num_prefix_hits == 12

    @pytest.mark.parametrize("how", ["cancelled", "preempted", "failed"])
    def test_the_next_one_computes_a_prefix_if_the_first_one_does_not(self, how: str) -> None:
        serving = Serving(64, max_rows=6)
        a, b, c = (serving.add([*PREFIX, 1], priority=number) for number in (5, 6, 7))
        assert rows(serving.step()) == [(a, 6)]
        if how == "failed":
            serving.scheduler.fail(a, RuntimeError())
        elif how == "cancelled":
            serving.scheduler.remove(a)
        else:
            serving.scheduler.preempt(a)
        first, *others = [b, c] if how != "preempted" else [a, b, c]
        assert rows(serving.step()) == [(first, 6)], "after the block that was found"
        assert serving.scheduler.waiting == others
        serving.step()
        serving.step()
        assert [own.num_prefix_hits for own in others] == [12] * len(others)

    def test_a_prefix_is_not_awaited_from_those_that_are_served_later(self) -> None:
        serving = Serving(64, max_rows=6)
        later = serving.add([*PREFIX, 1], priority=1)
        assert rows(serving.step()) == [(later, 6)]
        urgent = serving.add([*PREFIX, 2])
        serving.step()
        assert serving.scheduler.running == [urgent, later]
        assert urgent.num_prefix_hits == 4, "it goes on where the other one was"

    def test_those_that_wait_are_looked_up_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        serving = Serving(1000, max_rows=8)
        first = serving.add(400)
        others = [serving.add(first.tokens.tolist()) for _ in range(50)]
        found: list[int] = []
        find = serving.allocator.find
        monkeypatch.setattr(
            serving.allocator, "find", lambda digests: [find(digests), found.append(len(digests))][0]
        )
        for _ in range(40):
            serving.step()
        assert len(found) == 1 + len(others), "the first one when it starts"
        serving.scheduler.remove(first)
        found.clear()
        monkeypatch.setattr(scheduler, "MAX_LOOKUPS", 1000)
        last = serving.add(1)
        assert [turn.request for turn in serving.step()] == others[:1]
        assert sum(found) <= 1000 + 2 * 100
        for _ in range(5):
            serving.step()
        assert last in serving.scheduler.running, "its turn comes when the others have been looked up"

    def test_a_block_that_is_not_full_yet_is_not_compared(self) -> None:
        """Its digest would stay, and stand for what the memory happened to hold."""
        serving = Serving(16)
        short, long = serving.add(PREFIX[:6]), serving.add(PREFIX)
        assert long.num_common_blocks(short, 3) == 1
        short.emit(PREFIX[6:8])
        assert short.digest(1) == long.digest(1)

    def test_nobody_waits_for_a_block_that_ends_with_his_last_token(self) -> None:
        serving = Serving(32)
        a, b = serving.add([*PREFIX[:4], 1]), serving.add(PREFIX[:4])
        assert rows(serving.step()) == [(a, 5), (b, 4)]

    def test_nobody_waits_for_a_block_that_is_there_but_cannot_be_found(self) -> None:
        """Two have computed it, the one that could be found is gone, the other has it for himself."""
        serving = Serving(8)
        a, b = serving.add([*PREFIX[:4], 1], max_tokens=1), serving.add(PREFIX[:4])
        serving.step()
        assert serving.allocator.digest(0) == a.digest(0) == b.digest(0)
        serving.add(16, max_tokens=1)
        while serving.allocator.digest(0) is not None:
            serving.step()
        assert serving.allocator.find([b.digest(0)]) == []
        c = serving.add([*PREFIX[:4], 2])
        assert rows(serving.step()) == [(b, 1), (c, 5)]

    def test_a_request_with_another_beginning_does_not_wait(self) -> None:
        serving = Serving(32, max_rows=20)
        a, b = serving.add([*PREFIX, 1]), serving.add([7, *PREFIX])
        assert rows(serving.step()) == [(a, 10), (b, 10)]

    def test_nobody_waits_where_nothing_is_shared(self) -> None:
        serving = Serving(32, share=False)
        a, b = serving.add([*PREFIX, 1]), serving.add([*PREFIX, 1])
        assert rows(serving.step()) == [(a, 13), (b, 13)]
        assert set(a.blocks).isdisjoint(b.blocks)

    def test_a_request_that_has_to_wait_holds_no_block_meanwhile(self) -> None:
        serving = Serving(9)
        a = serving.add(PREFIX)
        serving.step()
        b = serving.add([*PREFIX[:8], *range(18)])  # two are found, five wanted, one in hand for a
        assert rows(serving.step()) == [(a, 1)]
        assert b.blocks == []
        serving.scheduler.remove(a)
        assert serving.allocator.num_free == 9
        assert rows(serving.step()) == [(b, 18)]


def some_tokens(rng: random.Random, turn: Turn) -> list[int]:
    """A bonus token, after as many accepted ones as the turn's tree may have."""
    accepted = rng.randint(0, min(turn.request.max_nodes - 1, max(turn.request.max_depth, 0)))
    return [rng.randrange(2) for _ in range(1 + accepted)]


def check(serving: Serving, turns: Sequence[Turn], before: Sequence[Request]) -> None:
    """Assert what must hold between `schedule` and the pass."""
    scheduler, config = serving.scheduler, serving.config
    running = scheduler.running
    sizes = [s.num_tokens + (s.request.max_nodes - 1 if s.reaches_end else 0) for s in turns]
    assert sum(sizes) <= config.max_rows
    assert len({turn.request for turn in turns} & {*running}) == len(turns), "a turn each"
    assert len(running) <= config.max_requests
    stayed = sum(request in running for request in before)
    assert len(turns) >= min(stayed, config.max_rows), "everyone who ran gets a row"
    for turn, size in zip(turns, sizes, strict=True):
        request = turn.request
        assert 1 <= turn.num_tokens <= request.num_pending
        assert 1 <= request.max_nodes <= min(request.drafter.max_nodes, config.max_tree)
        assert len(request.blocks) * SIZE >= request.cached + size, "blocks cover the rows"
    for request in running:
        assert request.cached < len(request.tokens)
    for request in scheduler.waiting:
        assert (request.blocks, request.cached) == ([], 0)
    owners = Counter(block for request in running for block in request.blocks)
    assert serving.allocator.num_free == serving.allocator.num_blocks - len(owners)
    contents: dict[int, bytes] = {}
    for request in running:
        assert len(set(request.blocks)) == len(request.blocks)
        for i, block in enumerate(request.blocks):
            if owners[block] > 1:
                assert request.cached >= (i + 1) * SIZE, "shared blocks are full"
                assert contents.setdefault(block, request.digest(i)) == request.digest(i)


@pytest.mark.parametrize("priorities", [[0], [0, 0, 1, -2]], ids=["equal", "priorities"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_leaks_and_nobody_starves_in_random_runs(
    seed: int, share: bool, priorities: Sequence[int]
) -> None:
    rng = random.Random(seed)
    serving = Serving(
        rng.choice([10, 14, 40]),
        share=share,
        max_rows=rng.choice([3, 9, 40]),
        max_requests=rng.choice([2, 5, 9]),
        max_tree=rng.choice([1, 4, 8]),
    )
    scheduler, arrived = serving.scheduler, []
    for step in range(600):
        if step < 150 and rng.random() < 0.3:
            prompt = [rng.randrange(2)] * rng.randrange(1, 13) + rng.choices(range(2), k=rng.randrange(1, 9))
            nodes, most = rng.choice([1, 3, 12]), rng.randrange(1, 20)
            arrived.append(serving.add(prompt, nodes, max_tokens=most, priority=rng.choice(priorities)))
        if step < 150 and rng.random() < 0.05 and scheduler.running:
            scheduler.remove(rng.choice([*scheduler.running, *scheduler.waiting]))
        before = list(scheduler.running)
        turns = scheduler.schedule()
        check(serving, turns, before)
        order = {request: (request.priority, arrived.index(request)) for request in arrived}
        for part in (scheduler.running, scheduler.waiting):
            assert part == sorted(part, key=order.__getitem__)
        last = max((order[request] for request in scheduler.running if request not in before), default=())
        for request in scheduler.waiting:
            later = [other for other in scheduler.running if order[other] > order[request]]
            held = sum(-(-len(other.tokens) // SIZE) for other in (*later, request))
            room = request is not scheduler.waiting[0] or held <= serving.allocator.num_blocks
            assert order[request] > last or request.awaited or room, "passed only by those that leave room"
        assert turns or not (scheduler.running or scheduler.waiting)
        serving.finish(turns, partial(some_tokens, rng))
    assert not scheduler.running
    assert not scheduler.waiting
    assert serving.allocator.num_free == serving.allocator.num_blocks
    if not share:
        assert serving.allocator.num_cached == 0


def test_random_runs_see_what_they_are_meant_to_test() -> None:
    """Enough preemption, sharing and cut trees, or the run above would prove little."""
    rng = random.Random(0)
    serving = Serving(12, max_rows=16, max_requests=5, max_tree=6)
    requests = [serving.add([0] * 8 + rng.choices(range(2), k=5), 6, max_tokens=15) for _ in range(20)]
    cut = 0
    while any(request.finish_reason is None for request in requests):
        turns = serving.scheduler.schedule()
        cut += sum(turn.reaches_end and turn.request.max_nodes < 6 for turn in turns)
        serving.finish(turns, partial(some_tokens, rng))
    assert sum(request.num_preemptions for request in requests) > 5
    assert sum(request.num_prefix_hits > 0 for request in requests) > 10
    assert cut > 20


def test_a_request_whose_masks_take_long_sits_out_and_goes_on() -> None:
    serving = Serving(64, max_rows=32, row_seconds=0.05)
    dear, other = serving.add(5), serving.add(5)
    dear.constraint = SimpleNamespace(seconds=0.2, limit=lambda tokens: None)  # type: ignore[assignment]
    took = [[turn.request for turn in serving.step()] for _ in range(12)]
    assert all(other in requests for requests in took)
    assert 2 <= sum(dear in requests for requests in took) <= 5
    serving.scheduler.remove(other)
    assert [[turn.request for turn in serving.step()] for _ in range(3)] == [[dear]] * 3


def test_a_preemption_ends_the_turns_where_requests_sit_out() -> None:
    serving = Serving(14, max_rows=32, share=False)
    requests = [serving.add(SIZE - 1) for _ in range(3)]
    requests[1].constraint = SimpleNamespace(seconds=0.2, limit=lambda tokens: None)  # type: ignore[assignment]
    for _ in range(200):
        turns = serving.step()
        assert all(turn.request.blocks or turn.request.finish_reason for turn in turns)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
