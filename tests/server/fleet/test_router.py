"""The rule of the router, by its costs."""

from __future__ import annotations

import numpy as np

from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.tenant import EVERYBODY, Tenant, prefix_digests
from soothsay.drafters.base import NoDrafter
from soothsay.server.fleet.router import ANSWER, MAX_SESSIONS, Router

SIZE = 16


def digests(tokens: list[int], tenant: Tenant = EVERYBODY) -> list[bytes]:
    return [*prefix_digests(tenant, np.array(tokens, dtype=np.int64), SIZE)]


def prompt(tokens: list[int], tenant: Tenant = EVERYBODY) -> tuple[int, list[bytes]]:
    return len(tokens), digests(tokens, tenant)


def idle(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def test_digests_are_those_of_the_engine() -> None:
    tokens, tenant = list(range(100)), Tenant("a", "b")
    request = Request(tokens, SamplingParams(), seed=0, limit=200, drafter=NoDrafter(None), tenant=tenant)  # type: ignore[arg-type]
    assert digests(tokens, tenant) == [request.digest(block) for block in range(6)]


def test_idle_engines_take_turns() -> None:
    router = Router[str](SIZE, 100)
    chosen = [router.choose(idle("a", "b", "c"), [prompt([i] * 40)]) for i in range(6)]
    assert sorted(chosen[:3]) == ["a", "b", "c"]
    assert chosen[:3] == chosen[3:]


def test_a_job_goes_where_its_prefix_is_unless_that_costs_more_than_reading_it() -> None:
    router = Router[str](SIZE, 100)
    text = list(range(160))
    router.note("b", digests(text))
    longer = prompt([*text, 7, 7, 7])
    assert router.hit("b", longer[1]) == 160
    assert router.hit("a", longer[1]) == 0
    for _ in range(3):
        assert router.choose(idle("a", "b"), [longer]) == "b"
    busy = 160 // ANSWER
    assert router.choose({"a": 0, "b": busy}, [longer]) == "b"
    assert router.choose({"a": 0, "b": busy + 1}, [longer]) == "a"


def test_tenants_attract_no_others() -> None:
    router = Router[str](SIZE, 100)
    text = list(range(160))
    router.note("b", digests(text, Tenant("one")))
    assert router.hit("b", digests(text, Tenant("two"))) == 0
    assert {router.choose(idle("a", "b"), [prompt(text, Tenant("two"))]) for _ in range(2)} == {"a", "b"}


def test_an_engine_that_has_ended_holds_nothing() -> None:
    router = Router[str](SIZE, 100)
    router.note("b", digests(list(range(160))))
    router.forget("b")
    assert router.hit("b", digests(list(range(160)))) == 0


def test_the_last_blocks_are_forgotten_first_and_the_oldest_texts() -> None:
    router = Router[str](SIZE, 12)
    old, new = list(range(160)), list(range(1000, 1160))
    router.note("a", digests(old))
    router.note("a", digests(new))
    assert router.hit("a", digests(new)) == 160
    assert router.hit("a", digests(old)) == 2 * SIZE


def test_a_text_that_is_read_again_is_remembered_for_longer() -> None:
    router = Router[str](SIZE, 20)
    first, second, third = (list(range(start, start + 160)) for start in (0, 1000, 2000))
    for text in (first, second, first, third):
        router.note("a", digests(text))
    assert [router.hit("a", digests(text)) for text in (first, second, third)] == [160, 0, 160]


def test_a_session_stays_where_it_was_and_sessions_are_bounded() -> None:
    router = Router[str](SIZE, 100)
    first = router.choose(idle("a", "b"), [prompt([1] * 10)], "mine")
    for i in range(5):
        assert router.choose(idle("a", "b"), [prompt([i] * 10)], "mine") == first
    busy = {one: 3 * (one == first) for one in ("a", "b")}
    assert router.choose(busy, [prompt([1] * 10)], "mine") != first
    for number in range(MAX_SESSIONS + 10):
        router.choose(idle("a", "b"), [prompt([1])], number)
    assert len(router._sessions) == MAX_SESSIONS
    oldest = next(iter(router._sessions))
    router.choose(idle("a", "b"), [prompt([1])], oldest)
    router.choose(idle("a", "b"), [prompt([1])], "another")
    assert {oldest, "another"} <= {*router._sessions}, "one was used again, and one is new"
