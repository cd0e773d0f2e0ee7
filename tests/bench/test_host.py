"""The parts of a step are told apart, and scripted passes lead to the model's own answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from soothsay.bench import host
from soothsay.bench.bench_plans import GIVEN, HostPlan
from soothsay.bench.host import PARTS, HostBench, PartClock, bench_host, host_table
from soothsay.cli.app import app


@pytest.fixture(autouse=True)
def _short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PASS_SECONDS", 1e-5)
    monkeypatch.setattr(host, "ROW_SECONDS", 0.0)


def test_time_of_calls_within_calls_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    def outer() -> None:
        work(1.0)
        parts.inner()
        parts.inner()
        work(2.0)

    parts, clock = SimpleNamespace(inner=lambda: work(10.0), outer=outer), PartClock()
    monkeypatch.setattr(host.time, "perf_counter", lambda: now)
    clock.watch(parts, "inner", "inner")
    clock.watch(parts, "outer", "outer")
    parts.outer()
    assert clock.take() == {"inner": 20.0, "outer": 3.0}
    assert clock.take() == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["none", "suffix", GIVEN])
def test_answers_follow_the_script(drafter: str, temperature: float) -> None:
    bench = HostBench("sibyl", tokens=12, batch=2, flush_bytes=4096)
    answers: list[list[int]] = []
    add = bench.engine.add
    bench.engine.add = lambda request: (answers.append(request), add(request))[1]  # type: ignore
    found = bench.run(bench.drafter(drafter), 2, temperature, is_cold=True)
    assert [request.tokens.tolist() for request in answers] == [bench.script] * 2  # type: ignore
    assert found.tokens == (1.0 if drafter == "none" else found.tokens)
    assert found.tokens > 2 or drafter != GIVEN
    assert found.caches == "cold"


def test_every_kind_is_measured() -> None:
    plan = HostPlan(drafters=["none", GIVEN], batches=[1], temperatures=[0.0], tokens=8, rounds=1)
    times = bench_host(plan, flush_bytes=4096)
    assert [(time.drafter, time.caches) for time in times] == [
        ("none", "warm"),
        ("none", "cold"),
        (GIVEN, "warm"),
        (GIVEN, "cold"),
    ]
    assert all(tuple(time.us) == PARTS and time.total == sum(time.us.values()) for time in times)
    assert len(host_table(times, 1).rows) == 4


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    given = ["-d", "none", "--batch", "1", "-t", "0", "--tokens", "8", "--rounds", "1", "--json"]
    result = CliRunner().invoke(app, ["bench", "host", "sibyl", *given, str(out)])
    assert result.exit_code == 0, result.output
    assert "beside the pass" in result.output
    assert {one["caches"] for one in json.loads(out.read_text())} == {"warm", "cold"}
