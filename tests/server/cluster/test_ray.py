"""Engines on a real Ray cluster of this machine, one of which is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import engines
import httpx
import pytest
from serving import Running, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: soothsay[ray] is not installed"),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(engines.sibyl, replicas=2, ray=True) as one:
        yield one


def ask(running: Running, seed: int, **fields: Any) -> list[tuple[str, str]]:
    """The texts and finish reasons of two answers."""
    body = {"model": "sibyl", "prompt": "A man", "seed": seed, "n": 2, "max_tokens": 300, "ignore_eos": True}
    reply = httpx.post(f"{running.url}/v1/completions", json={**body, **fields}, timeout=120)
    assert reply.status_code == 200, reply.text
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]]


def test_answers_outlive_a_replica_that_is_killed(running: Running) -> None:
    plain = [ask(running, seed, speculation=False) for seed in range(8)]
    jobs = running.server.loop._jobs
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, running, seed) for seed in range(8)]
        running.wait_until(lambda: len(jobs) >= 8 and all(job.num_output for job in [*jobs.values()]))
        pids = [replica.pid for replica in running.server.fleet.replicas]
        assert len({*pids, os.getpid()}) == 3
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        assert [one.result() for one in asked] == plain
    assert running.server.fleet.jobs.moved > 0
    running.wait_until(lambda: len(running.server.fleet.jobs.serving) == 2, 120)
    assert running.server.fleet.restarts == 1
    running.wait_until(lambda: running.free)
