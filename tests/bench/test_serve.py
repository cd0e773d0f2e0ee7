"""`bench serve` against servers of known behaviour: its figures are those that follow from the delays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from serving import serving
from typer import BadParameter
from typer.testing import CliRunner
from virtual import BETWEEN, FIRST, Fake, in_thread, run

from soothsay.bench.chat_client import ChatClient
from soothsay.bench.serve.load_page import notes, tables
from soothsay.bench.serve.serve_bench import LoadPlan, LoadTarget, Progress, ServeBench
from soothsay.bench.serve.serve_results import MEASURES, LoadResults, LoadRow, Sample, Slo, median_of
from soothsay.bench.serve.server_load import PAUSE, Arrivals, Mix, UserTurns, default_conversations
from soothsay.cli.app import app
from soothsay.cli.bench.load_commands import parse_target, seconds
from soothsay.errors import RequestError, SoothsayError

ANSWER = FIRST + 3 * BETWEEN
"""Seconds of an answer of four pieces."""

TTFT, CHUNK, TOKEN, E2E = MEASURES


def conversations(count: int = 100) -> list[UserTurns]:
    return [UserTurns((f"question {i}", f"and {i}?")) for i in range(count)]


def measure(
    fakes: dict[str, Fake],
    loads: Sequence[Arrivals],
    *,
    rounds: int = 1,
    path: Path | None = None,
    mix: Mix | None = None,
    optional: dict[str, Any] | None = None,
    interrupt: float | None = None,
    model: str = "",
    progress: Progress = lambda *_: None,
    **plan: Any,
) -> LoadResults:
    """Run the benchmark. `interrupt`: virtual seconds after which it is interrupted."""

    async def main() -> LoadResults:
        with ExitStack() as stack:
            for fake in fakes.values():
                stack.callback((await fake.start()).close)
            targets = [
                LoadTarget(name, ChatClient(fake.url, model, timeout=100, optional=optional))
                for name, fake in fakes.items()
            ]
            bench = ServeBench(
                targets,
                mix or Mix(conversations()),
                LoadPlan(loads, rounds=rounds, **plan),
                path=path,
                progress=progress,
            )
            task = asyncio.create_task(bench.run())
            if interrupt is None:
                return await task
            await asyncio.sleep(interrupt)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return bench.results

    return run(main())


def test_one_target_in_a_closed_loop() -> None:
    fake = Fake(usage={"completion_tokens": 8})
    results = measure({"a": fake}, [Arrivals("concurrency", 4, requests=8)], warm_up=3, max_tokens=8)
    (row,) = results.rows()
    (trial,) = results.trials
    assert (len(fake.bodies), fake.most) == (3 + 8, 4)
    assert trial.seconds == pytest.approx(2 * ANSWER)
    assert trial.request_rate == pytest.approx(8 / (2 * ANSWER))
    assert trial.token_rate == pytest.approx(64 / (2 * ANSWER))
    for found, expected in ((TTFT, FIRST), (CHUNK, BETWEEN), (TOKEN, BETWEEN / 2), (E2E, ANSWER)):
        assert row.percentiles(found) == pytest.approx([expected] * 4)
    assert (row.tokens_a_chunk, row.accepted, row.cached) == (2.0, None, None)
    assert row.mean_in_flight == pytest.approx(4)
    assert all(sample.late == 0 for sample in row.samples)
    assert [count for _, count in trial.in_flight()] == [4, 4, 0]
    assert fake.bodies[-1].keys() == {
        *("model", "messages", "stream", "stream_options", "max_tokens", "temperature", "seed")
    }
    assert (fake.bodies[-1]["model"], fake.bodies[-1]["max_tokens"]) == ("m", 8)
    assert sorted(body["seed"] for body in fake.bodies[3:]) == list(range(8))


def test_a_queue_shows_in_the_time_to_the_first_token() -> None:
    """Four at once at a server that serves one at a time: each waits for those before."""
    results = measure({"a": Fake(serial=True)}, [Arrivals("burst", 4, requests=4)])
    (row,) = results.rows()
    firsts = sorted(sample.first or 0 for sample in row.samples)
    assert firsts == pytest.approx([FIRST + i * ANSWER for i in range(4)])
    assert row.percentiles(TTFT)[0] == pytest.approx(statistics.median(firsts))
    assert row.percentiles(CHUNK) == pytest.approx([BETWEEN] * 4)
    (trial,) = results.trials
    assert trial.goodput(Slo(first=FIRST + ANSWER)) == pytest.approx(2 / (4 * ANSWER))
    assert trial.goodput(Slo(end=2 * ANSWER, first=100)) == pytest.approx(2 / (4 * ANSWER))
    assert trial.goodput(Slo(per_token=BETWEEN * 0.99)) == 0
    assert trial.goodput(Slo(per_token=BETWEEN * 1.01)) == pytest.approx(trial.request_rate)


def test_an_open_loop_does_not_wait_and_is_the_same_for_all() -> None:
    fakes = {"slow": Fake(serial=True), "fast": Fake()}
    results = measure(fakes, [Arrivals("rate", 4, requests=30)], seed=5)
    slow, fast = results.rows()
    (one,), (other,) = slow.trials.values(), fast.trials.values()
    times = [[sample.sent for sample in sorted(t.samples, key=lambda s: s.number)] for t in (one, other)]
    assert times[0] == pytest.approx(times[1])
    ends, free = [], 0.0  # independently: a queue with one server
    for sent in times[0]:
        free = max(free, sent) + ANSWER
        ends.append(free - sent)
    assert sorted(s.end for s in one.samples) == pytest.approx(sorted(ends), abs=1e-4)
    assert [s.end for s in other.samples] == pytest.approx([ANSWER] * 30, abs=1e-4)
    assert one.in_flight()[-1][1] == 0
    assert max(n for _, n in one.in_flight()) > max(n for _, n in other.in_flight())


def test_targets_take_turns_with_the_same_questions() -> None:
    fakes = {"a": Fake(), "b": Fake(first=3 * FIRST, between=3 * BETWEEN)}
    loads = [Arrivals("concurrency", level, requests=4) for level in (1, 2)]
    results = measure(fakes, loads, rounds=2, warm_up=1)
    asked = [fake.prompts for fake in fakes.values()]
    assert sorted(asked[0]) == sorted(asked[1])
    assert len({*asked[0]}) == 16  # nothing twice
    order = [*results.by_key]
    assert [(name, load[-1], number) for name, load, number in order] == [
        *[("a", "1", 1), ("b", "1", 1), ("b", "2", 1), ("a", "2", 1)],
        *[("b", "1", 2), ("a", "1", 2), ("a", "2", 2), ("b", "2", 2)],
    ]
    first, second, *_ = results.rows()
    assert (first.target, second.target, first.load) == ("a", "b", "concurrency 1")
    assert second.ratio(first, lambda trial: trial.token_rate) == pytest.approx(1 / 3, rel=1e-3)
    assert second.ratio(first, median_of(E2E)) == pytest.approx(3, rel=1e-3)
    throughput, latency, means = tables(results, Slo(first=2 * FIRST))
    assert throughput.headings[3:7] == ["req/s", "tokens/s", "ratio", "goodput"]
    assert throughput.rows[1][1:7] == ["b", "8/8", f"{1 / (3 * ANSWER):.2f}", "2.1", "0.33x", "0.00"]
    assert latency.rows[0] == ["concurrency 1", "TTFT", "a", "250.0", "250.0", "250.0", "250.0", ""]
    assert latency.rows[1][-1] == "3.00x"
    assert means.rows[3] == ["concurrency 2", "b", "2.0", "", "", ""]


def test_ratios_are_medians_over_rounds() -> None:
    def row(name: str, ends: Sequence[float]) -> LoadRow:
        trials = {i: replace(trial, round=i, seconds=end) for i, end in enumerate(ends, start=1)}
        return LoadRow(name, "x", 1, trials)

    (trial,) = measure({"a": Fake()}, [Arrivals("burst", 1, requests=1)]).trials
    one, other = row("a", [1, 10, 4]), row("b", [2, 5, 2])
    ratio = other.ratio(one, lambda trial: trial.request_rate)
    assert ratio == pytest.approx(statistics.median([1 / 2, 10 / 5, 4 / 2]))
    assert row("c", [2]).ratio(one, lambda trial: trial.request_rate) == pytest.approx(0.5)
    assert other.ratio(one, lambda trial: 0.0) is None


def test_percentiles_are_of_all_rounds_and_errors_are_no_latencies() -> None:
    (trial,) = measure({"a": Fake()}, [Arrivals("burst", 1, requests=1)]).trials
    rng = np.random.default_rng(0)
    times = rng.exponential(size=(2, 101))
    failed = Sample(0, 0, 0, 0, end=1e9, error="429")
    trials = {
        i: replace(
            trial,
            round=i,
            samples=[failed, *(Sample(0, 0, 0, 0, end=t, pieces=[t, 2 * t, 4 * t], tokens=6) for t in own)],
        )
        for i, own in enumerate(times.tolist(), start=1)
    }
    row = LoadRow("a", "x", 1, trials)
    ordered = sorted(times.flatten())
    place = 0.9 * (len(ordered) - 1)
    p90 = ordered[int(place)] + (place % 1) * (ordered[int(place) + 1] - ordered[int(place)])
    assert row.percentiles(E2E)[1] == pytest.approx(p90)
    assert row.percentiles(TOKEN)[1] == pytest.approx(p90 * 1.5 / 2)  # gaps of 1 and 2, two tokens a piece
    assert Counter(one.error for one in row.samples if one.error) == {"429": 2}
    assert not Slo(end=1e10).met(failed)


def test_what_the_server_tells_is_added_up() -> None:
    usage = {
        "completion_tokens": 12,
        "prompt_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 30},
        "speculation": {"drafted": 20, "accepted": 8, "mean_accepted": 3.0},
    }
    results = measure({"a": Fake(usage=usage)}, [Arrivals("concurrency", 1, requests=3)])
    (row,) = results.rows()
    assert tables(results, Slo())[2].rows == [["concurrency 1", "a", "1.0", "3.00", "3.00", "75%"]]
    assert (row.accepted, row.cached) == (pytest.approx(3.0), pytest.approx(0.75))
    assert sum(sample.drafted for sample in row.samples) == 60


def test_turns_are_asked_behind_the_servers_own_answers() -> None:
    fake = Fake()
    results = measure(
        {"a": fake}, [Arrivals("concurrency", 1, requests=2)], mix=Mix(conversations(), turns=2)
    )
    first, second = fake.bodies[-2:]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1]["content"] == "Hello there!"
    (trial,) = results.trials
    assert [(s.number, s.turn) for s in trial.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trial.seconds == pytest.approx(4 * ANSWER)
    assert all(sample.late == 0 for sample in trial.samples)


def test_errors_are_counted_by_kind_and_the_rest_goes_on() -> None:
    def fail(number: int) -> str | None:
        return {4: "429 Too Many Requests", 5: "hang up", 6: "429 Too Many Requests"}.get(number)

    results = measure({"a": Fake(fail=fail)}, [Arrivals("concurrency", 1, requests=8)], warm_up=2)
    (row,) = results.rows()
    assert Counter(one.error for one in row.samples if one.error) == {"429": 2, "broke off": 1}
    assert (len(row.samples), len(row.answered)) == (8, 5)
    (trial,) = results.trials
    assert trial.request_rate == pytest.approx(5 / trial.seconds)
    said = notes(results, Slo())
    assert said[0].startswith("a: 2 requests failed (429), such as: m at 127.0.0.1")
    assert "chunks are counted" in said[2]


def test_a_conversation_ends_with_a_failure_and_its_client_rests() -> None:
    fake = Fake(fail=lambda number: "500 Oh" if number == 1 else None)
    load = [Arrivals("concurrency", 1, requests=2)]
    (trial,) = measure({"a": fake}, load, mix=Mix(conversations(), turns=2), warm_up=1).trials
    assert [(s.number, s.turn, s.error) for s in trial.samples] == [(0, 0, "500"), (1, 0, ""), (1, 1, "")]
    assert trial.samples[1].sent == pytest.approx(PAUSE)


def test_a_server_that_goes_away_does_not_stop_the_others() -> None:
    class Mortal(Fake):
        async def start(self) -> asyncio.Server:
            self.server = await super().start()
            return self.server

    gone = Mortal(fail=lambda number: gone.server.close() if number == 3 else None)  # type: ignore[func-returns-value]
    results = measure({"gone": gone, "stays": Fake()}, [Arrivals("concurrency", 1, requests=6)], warm_up=1)
    rows = {row.target: row for row in results.rows()}
    assert Counter(one.error for one in rows["gone"].samples if one.error) == {"unreachable": 3}
    assert len(rows["stays"].answered) == 6


@pytest.mark.parametrize("refuses", [True, False])
def test_it_is_said_whether_ignore_eos_was_taken(refuses: bool) -> None:
    fake = Fake(refuses={"ignore_eos"} if refuses else set(), usage={"completion_tokens": 3})
    load = [Arrivals("concurrency", 1, requests=2)]
    results = measure({"a": fake}, load, optional={"ignore_eos": True})
    assert ("ignore_eos" in fake.bodies[-1]) != refuses
    assert any("refuses ignore_eos" in note for note in notes(results, Slo())) == refuses


def test_answers_that_end_early_in_spite_of_it_are_counted() -> None:
    (trial,) = (results := measure({"a": Fake()}, [Arrivals("burst", 1, requests=1)], max_tokens=9)).trials
    results.conditions["bodies"] = [{"ignore_eos": True}]
    assert not any("in spite" in note for note in notes(results, Slo()))  # "length" may be the context's
    results.add(replace(trial, samples=[replace(trial.samples[0], finish_reason="stop")]))
    assert any("1 of 1 answers ended before their 9 tokens" in note for note in notes(results, Slo()))


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    loads = [Arrivals("concurrency", 2, requests=4)]
    fakes = {"a": Fake(port=0), "b": Fake()}
    measure(fakes, loads, path=path, warm_up=1)
    before = path.read_text()
    assert LoadResults.read(path).rows() == measure(fakes, loads, path=path, warm_up=1).rows()
    assert path.read_text() == before
    assert [len(fake.prompts) for fake in fakes.values()] == [4, 4]
    lines = before.splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed while it wrote
    results = measure(fakes, loads, path=path, rounds=2, warm_up=1)
    assert [len(fake.prompts) for fake in fakes.values()] == [8, 12]
    assert fakes["b"].prompts[:4] == fakes["b"].prompts[4:8] == fakes["a"].prompts[:4]
    assert sorted(fakes["b"].prompts[8:]) == sorted(fakes["a"].prompts[4:])
    assert len(results.trials) == 4
    with pytest.raises(SoothsayError, match="another run: other loads; give a new file"):
        measure(fakes, [Arrivals("concurrency", 2, requests=5)], path=path, warm_up=1)
    path.write_text('{"targets": []}\n{"question": 1}\n')
    with pytest.raises(SoothsayError, match="measurements of 'bench serve' are expected"):
        LoadResults.read(path)


def test_an_interrupt_keeps_what_is_there_and_it_is_done_anew(tmp_path: Path) -> None:
    path, fakes = tmp_path / "r.jsonl", {"a": Fake()}
    loads = [Arrivals("concurrency", 1, requests=8)]
    begin = ANSWER  # the warm-up's
    results = measure(fakes, loads, path=path, warm_up=1, interrupt=begin + 2.5 * ANSWER)
    (trial,) = results.trials
    assert (len(trial.samples), trial.whole, trial.begun) == (2, False, 3)
    assert trial.seconds == pytest.approx(2.5 * ANSWER, abs=1e-3)
    assert any("interrupted" in note for note in notes(results, Slo()))
    results = measure(fakes, loads, path=path, warm_up=1)
    (trial,) = results.trials
    assert (len(trial.samples), trial.whole, trial.begin) == (8, True, 3)  # with what was not asked yet
    (row,) = LoadResults.read(path).rows()
    assert len(row.samples) == 8


@pytest.mark.parametrize(
    ("load", "total"),
    [(Arrivals("concurrency", 2, requests=6), 12), (Arrivals("rate", 5, duration=3.0), 6)],
)
def test_progress_counts_conversations_or_seconds(load: Arrivals, total: int) -> None:
    told: list[tuple[int, int, int]] = []
    fakes = {"a": Fake(), "b": Fake(fail=lambda number: "500 Oh" if number > 3 else None)}
    results = measure(fakes, [load], progress=lambda *state: told.append(state))
    tokens = sum(sample.tokens for trial in results.trials for sample in trial.samples)
    assert told[0] == (0, total, 0)
    assert told[-1] == (total, total, tokens)
    assert told == sorted(told)


def test_it_is_said_when_targets_share_a_server() -> None:
    fakes = {"a": (fake := Fake()), "b": Fake()}
    load = [Arrivals("burst", 1, requests=1)]
    assert not any("share a server" in note for note in notes(measure(fakes, load), Slo()))
    fake.first = fake.between = 0.001
    with in_thread(fake):
        targets = [LoadTarget(name, ChatClient(fake.url, "m")) for name in fakes]
        results = asyncio.run(ServeBench(targets, Mix(conversations()), LoadPlan(load)).run())
    assert any("share a server" in note for note in notes(results, Slo()))


def test_it_is_said_when_the_benchmark_is_late_or_busy() -> None:
    (trial,) = (results := measure({"a": Fake()}, [Arrivals("burst", 1, requests=1)])).trials
    assert not [note for note in notes(results, Slo()) if "The benchmark" in note]
    late = replace(trial.samples[0], sent=trial.samples[0].due + 0.02)
    results.add(replace(trial, samples=[late], cpu=0.6 * trial.seconds))
    assert [note for note in notes(results, Slo()) if "The benchmark" in note] == [
        "The benchmark sent requests up to 20 ms too late.",
        "The benchmark itself took up to 60% of a core.",
    ]


def test_it_is_said_when_questions_come_again() -> None:
    results = measure({"a": Fake()}, [Arrivals("burst", 1, requests=3)], mix=Mix(conversations(2)))
    assert any("some were asked again" in note for note in notes(results, Slo()))


@pytest.mark.parametrize(
    ("fake", "model", "error"),
    [
        (Fake(models=["m", "other"]), "wrong", "a has no model 'wrong'; choose from m, other"),
        (Fake(models=["m", "other"]), "", "a has several models; choose from m, other"),
        (Fake(models=None), "", "answered 404"),
        (Fake(fail=lambda _: "401 Unauthorized"), "", "answered 401"),
    ],
)
def test_a_target_that_cannot_be_asked(fake: Fake, model: str, error: str) -> None:
    with pytest.raises(SoothsayError, match=error):
        measure({"a": fake}, [Arrivals("burst", 1, requests=1)], model=model)
    assert not fake.prompts


def test_a_server_that_lists_no_models_is_believed() -> None:
    assert (
        measure({"a": Fake(models=None)}, [Arrivals("burst", 1, requests=1)], model="mine").rows()[0].answered
    )


def test_names_must_differ() -> None:
    target = LoadTarget("a", ChatClient("http://localhost:1/v1", "m"))
    load = Arrivals("burst", 1, requests=1)
    for targets, loads in (
        ([target, target], [load]),
        ([], [load]),
        ([target], [load, load]),
        ([target], []),
    ):
        with pytest.raises(RequestError, match="need names of their own"):
            ServeBench(targets, Mix(conversations()), LoadPlan(loads))


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("2", 2), ("1.5s", 1.5), ("2min", 120), (".5 s", 0.5)]
)
def test_times(text: str, value: float) -> None:
    assert seconds(text, "--x") == pytest.approx(value)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [{"category": "writing", "turns": [f"question {i}", "and?"]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def invoke(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *options], env={"COLUMNS": "80"})


def quick(**options: Any) -> Fake:
    return Fake(first=0.01, between=0.001, **options)


def test_the_command_measures_shows_and_draws(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_MINE", "sesame")
    one, other = quick(usage={"completion_tokens": 4}), quick()
    files = {name: tmp_path / f"r.{name}" for name in ("json", "html")}
    with in_thread(one, other):
        result = invoke(
            f"--target=one={one.url},key=KEY_OF_MINE",
            f'--target=other={other.url},model=m,speculation={{"drafter":"suffix","max_nodes":8}},note=hi',
            *("--concurrency=1,2", "--requests=2,4", "--rounds=2", "--slo-ttft=5s", "--shared-prefix=20"),
            *(f"--spec-bench={questions}", "--turns=2"),
            *(f"--{name}={path}" for name, path in files.items()),
        )
    assert (result.exit_code, result.exception) == (0, None)
    assert all(f"concurrency {level}" in result.output for level in (1, 2))
    assert "8/8" in result.output  # two rounds of two conversations of two turns
    assert "other: does not count its tokens" in result.output
    assert {*one.keys} == {"bearer sesame"}
    assert {*other.keys} == {""}
    assert "sesame" not in files["json"].read_text()
    assert other.bodies[-1]["speculation"] == {"drafter": "suffix", "max_nodes": 8}
    assert other.bodies[-1]["note"] == "hi"
    assert {len(body["messages"][0]["content"].split()) for body in one.bodies[2:]} == {20}
    page = files["html"].read_text()
    assert page.count("<svg") == 1
    assert all(text in page for text in ("one", "goodput", "</html>"))
    assert all(f"<b>{measure.name}</b>: " in page for measure in MEASURES)
    assert "http://www.w3.org" not in page.split("<svg")[0]
    assert [(t.load, len(t.samples)) for t in LoadResults.read(files["json"]).trials[:4]] == [
        *[("concurrency 1", 4)] * 2,
        *[("concurrency 2", 8)] * 2,
    ]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Where tests run in the background of a shell, signals of Ctrl-C are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_shows_what_is_there(questions: Path, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    fake, path = Fake(first=0.1, between=0.01, fail=fail), tmp_path / "r.json"
    with in_thread(fake):
        result = invoke(
            *(f"--target={fake.url}", "--concurrency=1", f"--prompts={questions}", f"--json={path}"),
            f"--png={tmp_path / 'r.png'}",
        )
    assert result.exit_code == 130
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "5/5" in result.output
    assert "A trial was interrupted" in result.output
    assert len(LoadResults.read(path).trials[0].samples) == 5


def test_the_command_needs_nothing_but_a_server() -> None:
    """Default prompts, default load, and the path of OpenAI's protocol."""
    fake = quick()
    with in_thread(fake):
        result = invoke(fake.url.removesuffix("/v1"), "--requests=6")
    assert (result.exit_code, result.exception) == (0, None)
    assert "concurrency 4" in result.output
    assert "6/6" in result.output
    assert len({*fake.prompts}) == 6
    assert {*fake.prompts} <= {turns for one in default_conversations() for turns in one.turns}


def test_the_commands_servers_may_be_written_in_two_ways() -> None:
    one, other = quick(), quick()
    with in_thread(one, other):
        result = invoke(f"a={one.url}", "--target", f"b={other.url},model=m", "--burst=2", "--requests=2")
    assert result.exit_code == 0
    assert [*sorted(one.prompts)] == [*sorted(other.prompts)]
    order = [line.split()[-6:] for line in result.output.splitlines() if "2/2" in line]
    assert [cells[-5] if "x" in cells[-1] else cells[-4] for cells in order] == ["a", "b"]


def test_a_real_server_is_measured_as_the_readme_says() -> None:
    with serving(engines.sibyl) as running:
        result = invoke(running.url, "--concurrency=1,2", "--requests=3", "--max-tokens=6", "--ignore-eos")
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.count("3/3") == 2
    assert "failed" not in result.output
    assert "chunks are counted" not in result.output  # it tells its tokens


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://localhost:8000", "localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "localhost:8000", "http://localhost:8000/"),
        ("mine=https://host/api/v1", "mine", "https://host/api/v1"),
    ],
)
def test_a_server_without_a_path_has_the_usual_one(text: str, name: str, url: str) -> None:
    target = parse_target(text, 1.0, False)
    assert (target.name, target.client.url.geturl()) == (name, url)


def test_a_key_is_checked_before_it_is_sent_or_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-1\r\n")
    with in_thread(fake := quick()):
        assert invoke(f"{fake.url},key=KEY", "--requests=1").exit_code == 0
    assert {*fake.keys} == {"bearer sk-1"}
    for wrong in ("schlüssel", "sk-1\nX-Other: 2", "sk\t1"):
        monkeypatch.setenv("KEY", wrong)
        with pytest.raises(BadParameter, match=r"key=KEY: there are characters in it that no key has$"):
            parse_target("http://localhost:1,key=KEY", 1.0, False)


def test_the_default_conversations_differ() -> None:
    asked = [one.turns for one in default_conversations()]
    assert len({turns[0] for turns in asked}) == len(asked) == 256
    assert all(len({*turns}) == 8 for turns in asked)
    assert not any("{" in text for text in asked)


def test_a_target_that_answers_nothing_is_a_failure(questions: Path) -> None:
    fake = quick(fail=lambda number: "500 Oh" if number > 1 else None)
    with in_thread(fake):
        result = invoke(f"--target={fake.url}", "--burst=2", "--requests=2", f"--prompts={questions}")
    assert result.exit_code == 1
    assert "0/2" in result.output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--target=localhost:8000"], "'localhost:8000' is not a server: give http://HOST:PORT"),
        (["--target=x=http://localhost:1/v1,key=NO_SUCH_KEY"], "no such environment variable"),
        (["--rate=1"], "one of --concurrency, --rate and --burst"),
        (["--requests=2,3"], "one whole number, or one for each"),
        (["--requests=1.5"], "one whole number, or one for each"),
        (["--requests=2", "--duration=1s"], "--requests or --duration, not both"),
        (["--duration=1h"], "give a time above zero"),
        (["--slo-ttft=0"], "give a time above zero"),
        ([""], "is not a server"),
    ],
)
def test_nonsense_is_refused_early(options: list[str], error: str, questions: Path) -> None:
    given = [option.replace("{questions}", str(questions)) for option in options]
    target = [] if options[0].startswith("--target") else ["--target=http://localhost:1/v1"]
    result = invoke(*target, "--concurrency=1", f"--spec-bench={questions}", *given)
    assert result.exit_code == 2
    assert error in " ".join(result.output.replace("│", " ").split())


def test_no_server() -> None:
    result = invoke("--concurrency=1")
    assert result.exit_code == 2
    assert "name a server" in result.output


def test_nobody_there(questions: Path) -> None:
    result = invoke("--target=http://127.0.0.1:9/v1", "--concurrency=1", f"--spec-bench={questions}")
    assert result.exit_code == 2
    assert "cannot be reached" in result.output
