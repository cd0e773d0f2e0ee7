"""Engines that are forks: they share weights, give equal answers, and come back at once."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from serving import Running, serving

from soothsay.errors import SoothsayError
from soothsay.server.engines.nursery import Fork, Nursery
from soothsay.server.fleet.engine_fleet import Fleet

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/PID/smaps_rollup")


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(engines.sibyl, replicas=2, forked=True, drain=0) as one:
        yield one


def ask(running: Running, seed: int, **fields: Any) -> str:
    body = {"model": "sibyl", "prompt": "A man", "seed": seed, "max_tokens": 60, "ignore_eos": True, **fields}
    reply = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def memory(pid: int) -> tuple[int, int]:
    """KB of a process in memory, and the part that nobody shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text()
    values = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", lines, re.MULTILINE)}
    return values["Rss"], values["Private_Dirty"] + values["Private_Clean"]


def parent(pid: int) -> int:
    """The nursery of an engine."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def files(pid: int) -> list[str]:
    """What a process has open besides the standard streams."""
    numbers = (link for link in Path(f"/proc/{pid}/fd").iterdir() if int(link.name) > 2)
    return [os.readlink(link) for link in numbers]


def test_forks_share_the_weights_and_give_equal_answers(running: Running) -> None:
    answers = {ask(running, 1, speculation=False), *(ask(running, 1) for _ in range(4))}
    assert len(answers) == 1
    pids = [replica.pid for replica in running.server.fleet.replicas]
    assert len({*pids, os.getpid()}) == 3
    for pid in pids:
        assert pid is not None
        whole, own = memory(pid)
        assert own < 0.6 * whole, (own, whole)
        shared = {*files(pid)} & {*files(parent(pid))}
        assert not [one for one in shared if one.startswith("socket")], "or its end would not be heard"


def test_an_engine_that_was_killed_is_back_without_loading(running: Running) -> None:
    fleet = running.server.fleet
    first, (replica, _) = fleet.restarts, fleet.replicas
    before = replica.pid
    assert before is not None
    nursery = parent(before)
    opened = len(files(nursery))
    os.kill(before, signal.SIGKILL)
    running.wait_until(lambda: fleet.restarts == first + 1)
    begin = time.monotonic()
    running.wait_until(lambda: len(fleet.jobs.serving) == 2)
    assert time.monotonic() - begin < 10
    assert replica.pid not in (None, before)
    assert replica.engine.exit_code is None
    running.wait_until(lambda: len(files(nursery)) == opened)
    assert ask(running, 2) == ask(running, 2, speculation=False)


def test_answers_of_an_engine_that_is_drained_go_on(running: Running) -> None:
    fleet, jobs = running.server.fleet, running.server.loop._jobs
    with ThreadPoolExecutor(4) as pool:
        texts = [*pool.map(partial(ask, running, max_tokens=900), range(4))]
        asked = [pool.submit(ask, running, seed, max_tokens=900, speculation=False) for seed in range(4)]
        running.wait_until(lambda: len(jobs) == 4 and all(job.num_output > 2 for job in [*jobs.values()]))
        drained = fleet.replicas[0]
        httpx.post(f"{running.url}/replicas", json={"drain": drained.number})
        assert [one.result() for one in asked] == texts
    assert fleet.jobs.moved > 0
    running.wait_until(lambda: drained not in fleet.replicas and len(fleet.jobs.serving) == 2, 60)


def test_engines_outlive_the_nursery_and_the_next_one_has_a_new_nursery(running: Running) -> None:
    fleet = running.server.fleet
    first = [replica.pid for replica in fleet.replicas]
    (nursery,) = {parent(pid) for pid in first}
    os.kill(nursery, signal.SIGKILL)
    assert ask(running, 3) == ask(running, 3, speculation=False)
    for replica, pid in zip(fleet.replicas, first, strict=True):
        replica.kill()
        running.wait_until(lambda replica=replica, pid=pid: replica.pid not in (None, pid), 60)
    running.wait_until(lambda: len(fleet.jobs.serving) == 2, 60)
    assert ask(running, 3) == ask(running, 3, speculation=False)
    (other,) = {parent(replica.pid) for replica in fleet.replicas}
    assert other != nursery


def test_a_process_that_has_ended_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have its number by now."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    fork = Fork(12)
    fork.pid = 34
    fork.kill()
    fork.end(-signal.SIGKILL)
    fork.kill()
    assert killed == [34]


def test_a_model_that_cannot_be_loaded_is_named() -> None:
    with (
        Nursery(partial(engines.sibyl, dtype="float12"), 1) as nursery,
        pytest.raises(SoothsayError, match="float12"),
        Fleet(nursery.engine, 2),
    ):
        pass


def test_warnings_before_an_engine_runs_are_lines_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0)) + 1
    with Nursery(engines.sibyl, cores) as nursery, Fleet(nursery.engine, 1):
        pass
    (warning,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert warning["event"] == "no core of its own is free for an engine"
    assert (warning["level"], warning["cores"]) == ("warning", cores)


def test_a_nursery_that_dies_while_it_loads_ends_its_engines() -> None:
    with (
        Nursery(engines.killed, 1) as nursery,
        pytest.raises(SoothsayError, match="ended while it was loading"),
        Fleet(nursery.engine, 2),
    ):
        pass
