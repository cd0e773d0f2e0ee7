"""The simulator: exact times of small traces, what must always hold, and its files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from soothsay.bench.fleet.fleet_bench import bench_fleet, fleet_chart
from soothsay.bench.fleet.simulated_engine import Speculation
from soothsay.bench.fleet.simulation import OTHERS, Outcome, simulate
from soothsay.bench.fleet.step_times import StepTimes, measure_steps
from soothsay.bench.fleet.trace import Conversations, Piece, TracedRequest, read_trace, token_ids
from soothsay.config import EngineConfig
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.model.pass_times import PassTimes
from soothsay.server.fleet.router import Router

RULES = {"router": Router[int], **OTHERS}

ANSWERS = PassTimes([1, 11], [1], [[1.0, 2.0]])

FLAT = StepTimes(ANSWERS, ANSWERS, PassTimes([1, 101], [1], [[1.0, 11.0]]))
"""n answers take 0.9 + 0.1 n seconds, and m rows of prompts 0.9 + 0.1 m, 0.1 m beside answers."""

CONFIG = EngineConfig(kv_tokens=4096)


def asked(session: str, arrival: float, prompt: list[tuple[str, int]], answer: int) -> TracedRequest:
    pieces = tuple(Piece(*one) for one in prompt)
    return TracedRequest(session, arrival, pieces, Piece(f"answer {session} {arrival}", answer))


def run(
    trace: list[TracedRequest] | Conversations,
    replicas: int = 1,
    rule: str = "router",
    speculation: Speculation = Speculation(),  # noqa: B008
    config: EngineConfig = CONFIG,
) -> Outcome:
    return simulate(trace, replicas, RULES[rule], FLAT, config, speculation)


def times(outcome: Outcome) -> dict[str, tuple[float, float]]:
    return {one.traced.session: (round(one.first, 6), round(one.end, 6)) for one in outcome.requests}


def test_one_request() -> None:
    """A prompt of 41 tokens takes 5 s and brings a token; two more take 1 s each."""
    outcome = run([asked("a", 2.0, [("x", 41)], 3)])
    assert times(outcome) == {"a": (7.0, 9.0)}
    assert outcome.seconds == pytest.approx(7)
    assert outcome.throughput == pytest.approx(3 / 7)
    assert outcome.hit_rate == 0


def test_two_requests_share_steps() -> None:
    """b comes in a's first step (1 to 6 s). Then 21 rows and one answer take 3.1 s, and two answers 1.1 s."""
    outcome = run([asked("a", 1.0, [("x", 41)], 3), asked("b", 1.5, [("y", 21)], 2)])
    assert times(outcome) == {"a": (6.0, 10.2), "b": (9.1, 10.2)}


def test_answers_with_a_common_prefix_take_less_time() -> None:
    """Each token of context of n answers takes n ms, and 0.4 n ms if others have it too.

    b waits for the prefix that a reads. Of its 41 tokens, 32 are in blocks that both have.
    """
    contexts, answers = [1, 101], [1, 11]
    alone = PassTimes(answers, contexts, [[1.0 + n * c / 1000 for n in answers] for c in contexts])
    together = PassTimes(answers, contexts, [[1.0 + n * c / 2500 for n in answers] for c in contexts])
    times = StepTimes(alone, together, FLAT.reading)
    assert times(2, 100, 50, 0, 0) == pytest.approx(1.0 + 2 * (50 + 0.4 * 50) / 1000)
    trace = [asked(session, 0.0, [("x", 41)], 3) for session in "ab"]
    ends = {}
    for name, steps in (("none", StepTimes(alone, alone, FLAT.reading)), ("shared", times)):
        outcome = simulate(trace, 1, RULES["router"], steps, CONFIG)
        ends[name] = max(one.end for one in outcome.requests)
    # a decodes while b reads its last tokens, and then with b; at last b is alone
    assert ends["none"] - ends["shared"] == pytest.approx(0.6 * (1 + 2) * 32 / 1000)


def test_a_prefix_is_read_once_by_each_engine() -> None:
    """Full blocks of 16 tokens are found. a's answer has ended, so its 32 of 41 tokens are cached for b."""
    trace = [asked("a", 0.0, [("x", 41)], 1), asked("b", 50.0, [("x", 41), ("z", 10)], 1)]
    outcome = run(trace)
    assert [one.request.num_prefix_hits for one in outcome.requests] == [0, 32]
    assert times(outcome) == {"a": (5.0, 5.0), "b": (52.8, 52.8)}  # 51 - 32 = 19 rows
    assert run(trace, 2, "router").hit_rate == pytest.approx(32 / 92)
    assert run(trace, 2, "round robin").hit_rate == 0
    assert run(trace, config=EngineConfig(kv_tokens=64)).hit_rate == pytest.approx(32 / 92)


def test_the_router_knows_what_an_engine_is_about_to_read() -> None:
    """b comes in a's first step, and has the same prompt. 192 tokens are worth more than an idle engine."""
    trace = [asked("a", 0.0, [("x", 200)], 2), asked("b", 0.5, [("x", 200)], 2)]
    assert run(trace, 2).hit_rate == pytest.approx(192 / 400)
    assert run(trace, 2, "least load").hit_rate == 0


def test_blocks_are_evicted() -> None:
    """A pool of 64 tokens has forgotten a's prompt when b has been read."""
    trace = [asked("a", 0, [("x", 41)], 1), asked("b", 50, [("y", 60)], 1), asked("c", 99, [("x", 41)], 1)]
    assert run(trace).hit_rate == pytest.approx(32 / 142)
    assert run(trace, config=EngineConfig(kv_tokens=64)).hit_rate == 0


def test_a_session_waits_for_its_answer() -> None:
    first, second = asked("a", 0.0, [("x", 41)], 1), asked("a", 1.0, [("y", 11)], 1)
    later = TracedRequest("a", 1.0, second.prompt, second.answer, pause=4.0)
    assert [one.due for one in run([first, second], 2).requests] == [0.0, 5.0]
    assert [one.due for one in run([first, later], 2).requests] == [0.0, 9.0]


def test_rules_choose_engines() -> None:
    """a is long. Round robin sends c after it; least load sends it to b's engine, which is idle again."""
    trace = [asked(s, t, [(s, n)], 1) for s, t, n in (("a", 0, 101), ("b", 1, 11), ("c", 4, 11))]
    assert times(run(trace, 2, "round robin"))["c"] == (13.0, 13.0)
    assert times(run(trace, 2, "least load"))["c"] == (6.0, 6.0)


def test_speculation() -> None:
    """A step brings 1, 2, 1, 2, ... tokens and has two nodes more, each of which takes 0.1 s."""
    outcome = run([asked("a", 0.0, [("x", 40)], 7)], speculation=Speculation(nodes=3, tokens=1.5))
    (one,) = outcome.requests
    assert one.request.stats.steps == 5
    assert one.request.num_output == 7
    assert one.request.tokens.tolist() == [*token_ids((*one.traced.prompt, one.traced.answer))]
    assert one.first == pytest.approx(5.1)
    assert one.end == pytest.approx(5.1 + 3 * 1.2 + 1.0)  # the last token needs no tree


LOAD = Conversations(
    sessions=6, turns=3, rate=0.05, system=40, systems=2, question=9, answer=5, pause=2, seed=3
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_nothing_is_lost(rule: str, replicas: int) -> None:
    """Each request is answered once and whole, in order within its session, no faster than by steps alone."""
    trace = [*LOAD]
    outcome = run(trace, replicas, rule, config=EngineConfig(kv_tokens=256, max_rows=64, max_requests=4))
    assert {one.traced for one in outcome.requests} == {*trace}
    assert len(outcome.requests) == len(trace)
    for one in outcome.requests:
        assert one.request.num_output == one.traced.answer.tokens
        assert one.traced.arrival <= one.due < one.first <= one.end
        assert one.end - one.first >= one.traced.answer.tokens - 1 - 1e-6
    assert 0 < outcome.hit_rate < 1


def test_the_seed_decides() -> None:
    def results(load: Conversations) -> list[tuple[str, float, float]]:
        return [(one.traced.session, one.first, one.end) for one in run(load, 2).requests]

    assert results(LOAD) == results(LOAD)
    assert results(LOAD) != results(Conversations(sessions=6, turns=3, rate=0.05, seed=4))


def test_more_engines_answer_sooner() -> None:
    load = Conversations(sessions=24, turns=2, system=64, fixed=True)
    found = [run(load, count) for count in (1, 2, 4, 8)]
    throughput = [outcome.throughput for outcome in found]
    assert throughput == sorted(throughput)
    first = [outcome.first_token() for outcome in found]
    assert first == sorted(first, reverse=True)


def test_conversations() -> None:
    trace = [*Conversations(sessions=2, turns=2, rate=1.0, fixed=True)]
    assert [one.num_prompt for one in trace] == [530, 592] * 2
    assert trace[1].prompt[-2] == trace[0].answer
    assert trace[0].prompt[0] == trace[2].prompt[0]
    assert trace[0].arrival == trace[1].arrival == 0.0 < trace[2].arrival
    assert {one.arrival for one in LOAD.times(2)} > {0.0}
    assert len([*LOAD.times(2)]) == 36
    assert token_ids([Piece("x", 9)]).tolist() == token_ids([Piece("x", 5), Piece("x", 9)]).tolist()[5:]
    assert token_ids([Piece("x", 5)]).tolist() == token_ids([Piece("x", 9)]).tolist()[:5]
    assert token_ids([Piece("\ud800", 3)]).size == 3  # a name that is no text in UTF-8
    assert math.isinf(Conversations().times(3).rate)


LINE = {"session": "a", "arrival": 0.5, "prompt": [["system", 500], ["q1", 30]], "answer": ["a1", 64]}


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n\n" + json.dumps({**LINE, "pause": 2}) + "\n")
    first, second = read_trace(path)
    assert first == TracedRequest("a", 0.5, (Piece("system", 500), Piece("q1", 30)), Piece("a1", 64))
    assert second.pause == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        "[",
        "[]",
        "[" * 10000,
        *(json.dumps({**LINE, **change}) for change in ({"arrival": -1}, {"arrival": "1"}, {"prompt": []})),
        *(json.dumps({**LINE, "answer": piece}) for piece in (["a", 0], ["a", 1 << 40], ["a"], "ab", 3)),
        json.dumps({**LINE, "arrival": math.nan}),
    ],
)
def test_a_bad_trace_is_named(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + wrong + "\n")
    with pytest.raises(RequestError, match="line 2"):
        read_trace(path)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match="no requests"):
        read_trace(tmp_path / "empty")
    with pytest.raises(RequestError, match="session a does not fit"):
        run([asked("a", 0, [("x", 60)], 5)], config=EngineConfig(kv_tokens=64))
    with pytest.raises(RequestError, match="no times of steps"):
        StepTimes.read(tmp_path / "empty")


def test_times_are_kept(tmp_path: Path) -> None:
    FLAT.save(tmp_path / "times.json")
    read = StepTimes.read(tmp_path / "times.json")
    for step in ((1, 0, 0, 0, 0), (5, 100, 64, 0, 0), (0, 0, 0, 50, 9), (3, 9, 0, 70, 9)):
        assert read(*step) == FLAT(*step)
    assert FLAT(3, 0, 0, 11, 0) == pytest.approx(1.2 + 1.1)


@pytest.mark.slow
def test_steps_are_measured() -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=1 << 16)
    times = measure_steps(llm)
    assert 0 < times(1, 128, 0, 0, 0) < times(32, 128, 0, 0, 0) < times(32, 1024, 0, 256, 128)
    assert not llm.engine.has_work


def test_rules_are_compared() -> None:
    load = Conversations(sessions=3, turns=2, system=64, fixed=True)
    rows = bench_fleet(load, [1, 2], RULES, FLAT, CONFIG, Speculation())
    assert [(row.replicas, row.rule) for row in rows] == [(count, rule) for count in (1, 2) for rule in RULES]
    assert len({(row.throughput, row.hit_rate, row.first_token) for row in rows[:3]}) == 1
    router, _, in_turn = rows[3:]
    assert router.hit_rate >= in_turn.hit_rate
    pytest.importorskip("matplotlib")
    assert len(fleet_chart(rows).axes) == 4
