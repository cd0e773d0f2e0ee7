"""When requests are sent, on a clock that jumps; and what is asked."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from virtual import run

from soothsay.bench.serve.server_load import (
    PAUSE,
    Arrivals,
    Mix,
    UserTurns,
    read_conversations,
)
from soothsay.errors import RequestError


class Calls:
    """Takes the next of `times` for each conversation, and remembers when each began and was due."""

    def __init__(self, times: Sequence[float], fails: bool = False):
        self.times, self.fails = times, fails
        self.begun: list[float] = []
        self.due: list[float] = []
        self.numbers: list[int] = []
        self.running = self.most = 0

    async def send(self, number: int, due: float) -> bool:
        clock = asyncio.get_running_loop().time
        self.numbers.append(number)
        self.begun.append(clock())
        self.due.append(due)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.times[number % len(self.times)])
        self.running -= 1
        return not self.fails


def go(load: Arrivals, calls: Calls, seed: str = "0") -> float:
    async def main() -> float:
        await load.run(calls.send, seed)
        return asyncio.get_running_loop().time()

    return run(main())


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    calls = Calls([1.0, 3.0])
    assert go(Arrivals("concurrency", 2, requests=6), calls) == pytest.approx(7)
    assert calls.begun == pytest.approx([0, 0, 1, 2, 3, 4])  # by hand: one has 1, 1, 3 and the other 3, 1, 3
    assert calls.due == pytest.approx(calls.begun)
    assert (calls.numbers, calls.most) == (list(range(6)), 2)


def test_a_duration_ends_what_begins_and_not_what_has_begun() -> None:
    calls = Calls([1.0])
    assert go(Arrivals("concurrency", 3, duration=2.5), calls) == pytest.approx(3)
    assert len(calls.begun) == 9


def test_failures_are_not_repeated_as_fast_as_can_be() -> None:
    calls = Calls([0.0], fails=True)
    go(Arrivals("concurrency", 2, duration=10 * PAUSE), calls)
    assert len(calls.begun) == pytest.approx(20, abs=2)
    calls = Calls([0.0], fails=True)
    go(Arrivals("burst", 2, duration=10 * PAUSE), calls)
    assert len(calls.begun) == pytest.approx(20, abs=2)


def test_a_burst_waits_for_the_one_before() -> None:
    calls = Calls([1.0, 2.0, 4.0])
    assert go(Arrivals("burst", 3, requests=7), calls) == pytest.approx(9)
    assert calls.begun == pytest.approx([0, 0, 0, 4, 4, 4, 8])
    assert calls.numbers == list(range(7))


def test_poisson_arrivals_are_exponential_and_do_not_wait_for_answers() -> None:
    calls = Calls([1000.0])
    go(Arrivals("rate", 2.5, requests=2000), calls)
    gaps = np.diff([0.0, *calls.begun])
    assert calls.most == 2000 or max(calls.begun) > 1000  # nothing was waited for
    assert np.mean(gaps) == pytest.approx(1 / 2.5, rel=0.06)
    assert scipy.stats.kstest(gaps, scipy.stats.expon(scale=1 / 2.5).cdf).pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.06
    assert calls.due == pytest.approx(calls.begun)


def test_arrivals_are_the_seeds_and_scale_with_the_rate() -> None:
    def begun(rate: float, seed: str) -> list[float]:
        calls = Calls([0.1])
        go(Arrivals("rate", rate, requests=20), calls, seed)
        return calls.begun

    assert begun(2, "a") == begun(2, "a") != begun(2, "b")
    assert begun(4, "a") == pytest.approx([time / 2 for time in begun(2, "a")])
    timed = Calls([0.1])
    go(Arrivals("rate", 2, duration=3), timed, "a")
    assert timed.begun == [time for time in begun(2, "a") if time < 3]


@pytest.mark.parametrize("level", [0, -1, 1.5, math.inf, math.nan])
@pytest.mark.parametrize("kind", ["concurrency", "burst"])
def test_levels_that_make_no_sense(kind: str, level: float) -> None:
    with pytest.raises(RequestError, match=f"{kind} .* is not possible: it must be a whole number"):
        Arrivals(kind, level, requests=1)  # type: ignore[arg-type]


def test_loads_that_make_no_sense() -> None:
    for rate in (0, -1, math.inf, math.nan):
        with pytest.raises(RequestError, match="above zero"):
            Arrivals("rate", rate, requests=1)
    for options in ({}, {"requests": 1, "duration": 1.0}):
        with pytest.raises(RequestError, match="and not both"):
            Arrivals("rate", 1, **options)
    for options in ({"requests": 0}, {"duration": 0.0}):
        with pytest.raises(RequestError, match="at least one request"):
            Arrivals("rate", 1, **options)


def questions(count: int) -> list[UserTurns]:
    return [UserTurns((f"question {i} of them", f"more {i}")) for i in range(count)]


def test_a_mix_asks_everything_before_anything_again() -> None:
    mix = Mix(questions(20), seed=3)
    first = [mix[i].turns for i in range(20)]
    assert sorted(first) == sorted((f"question {i} of them",) for i in range(20))
    assert [mix[i].turns for i in range(20, 40)] == first
    assert [Mix(questions(20), seed=3)[i].turns for i in range(20)] == first
    assert [Mix(questions(20), seed=4)[i].turns for i in range(20)] != first
    assert all(len(Mix(questions(20), turns=2)[i].turns) == 2 for i in range(20))
    digests = [
        Mix(questions(20), seed, turns=turns, shared_prefix=prefix, long_share=share, long_words=words).digest
        for seed, turns, prefix, share, words in [
            *[(0, 1, 0, 0.0, 9), (1, 1, 0, 0.0, 9), (0, 2, 0, 0.0, 9)],
            *[(0, 1, 5, 0.0, 9), (0, 1, 0, 0.5, 9), (0, 1, 0, 0.5, 8)],
        ]
    ]
    assert len({*digests}) == len(digests)


def test_a_shared_prefix_is_the_same_for_all_and_goes_before_what_a_system_says() -> None:
    own = UserTurns(("Why?",), ({"role": "system", "content": "Be kind."},))
    mix = Mix([*questions(9), own], shared_prefix=30)
    said = [mix[i].before for i in range(10)]
    assert all(len(before) == 1 and before[0]["role"] == "system" for before in said)
    texts = {before[0]["content"] for before in said}
    shared = min(texts, key=len)
    assert texts == {shared, f"{shared}\n\nBe kind."}
    assert len(shared.split()) == 30
    assert shared.startswith("question 0 of them more 0 question 1 of them")
    assert own.before[0]["content"] == "Be kind."  # untouched


def test_a_share_of_prompts_is_long_and_no_two_alike() -> None:
    mix = Mix(questions(400), long_share=0.3, long_words=50)
    turns = [mix[i].turns[0] for i in range(400)]
    long = [text for text in turns if len(text.split()) > 50]
    assert len(long) == pytest.approx(120, abs=30)
    assert all("\n\nquestion " in text and len(text.split()) == 54 for text in long)
    assert len({text[:100] for text in long}) > 0.9 * len(long)
    assert all(len(mix[i].turns[0].split()) > 50 for i in range(3)) == (len(turns[0].split()) > 50)
    everything = Mix(questions(5), long_share=1.0, long_words=1000)  # more words than there are
    assert len(everything[0].turns[0].split()) == 1004


def test_files_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    system, user, answer = ({"role": role, "content": role[:2]} for role in ("system", "user", "assistant"))
    lines = [
        {"messages": [system, user, answer, user, answer]},
        {"turns": ["one", "two"], "category": "writing"},
        {"prompt": "text"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_conversations(path) == [
        UserTurns(("us",), (system, user, answer)),  # type: ignore[arg-type]
        UserTurns(("one", "two")),
        UserTurns(("text",)),
    ]
    path.write_text(json.dumps({"messages": [system]}))
    with pytest.raises(RequestError, match="prompt 1: no message is the user's"):
        read_conversations(path)
