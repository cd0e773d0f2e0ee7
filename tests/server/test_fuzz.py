"""Hostile bodies: none of them causes an error of the server, ends the engine or changes another's answer."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import engines
import httpx
import pytest
from all_routes import ROUTES
from hostile_bodies import bodies
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from serving import command, serving

from soothsay.server.http.api_route import describe

TIMEOUT = 504
"""The status of an answer that takes longer than the server allows. Some bodies ask for very long ones."""

AT_ONCE = 20
"""Bodies that are sent together."""

IN_CI, ONCE = 400, int(os.environ.get("SOOTHSAY_FUZZ", 200_000))
"""Bodies that are sent by the test suite, and by `make test-slow`."""

PARTS = 10
"""Tests that share the many bodies."""

CONTEXT = 64
"""Tokens that a prompt and its answer may have. Some bodies ask for as many as there can be."""

ALONE = 50
"""Answers of the bystander that are timed before many bodies are sent."""

GROUPS = st.lists(
    bodies(describe(route for route in ROUTES if route.body)), min_size=AT_ONCE, max_size=AT_ONCE
)


QUESTION = {
    **{"model": "sibyl", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 1.0, "seed": 7},
    "ignore_eos": True,
}


class Bystander(threading.Thread):
    """Asks the same question again and again. Keeps what differed, and how long each answer took."""

    def __init__(self, url: str, alone: int):
        super().__init__(daemon=True)
        self._url, self._stopped = f"{url}/v1/completions", threading.Event()
        self.seconds: list[float] = []
        self.different: list[str] = []
        self.expected = self._ask()
        self.alone = median([self._timed()[1] for _ in range(alone)])

    def _ask(self) -> str:
        text: str = httpx.post(self._url, json=QUESTION, timeout=120).json()["choices"][0]["text"]
        return text

    def _timed(self) -> tuple[str, float]:
        begin = perf_counter()
        return self._ask(), perf_counter() - begin

    def run(self) -> None:
        while not self._stopped.wait(0.25):
            try:
                text, seconds = self._timed()
                self.seconds.append(seconds)
            except (httpx.HTTPError, KeyError) as error:
                text = repr(error)
            if text != self.expected:
                self.different.append(text)

    def late(self) -> str:
        """How long answers took, in times of one alone."""
        ratios = sorted(seconds / self.alone for seconds in self.seconds)
        shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
        told = ", ".join(
            f"{name} {ratios[min(int(share * len(ratios)), len(ratios) - 1)]:.2f}"
            for name, share in shares.items()
        )
        return f"bystander: {self.alone:.3f} s alone; {len(ratios)} answers, in times of that: {told}"

    def stop(self) -> None:
        self._stopped.set()
        self.join(120)


async def send(client: httpx.AsyncClient, group: Sequence[tuple[str, Any]]) -> list[tuple[int, str]]:
    """Send bodies together. Returns the status of each answer, and its text."""

    async def one(path: str, body: Any) -> tuple[int, str]:
        content = json.dumps(body)
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        return answer.status_code, answer.text

    return await asyncio.gather(*(one(path, body) for path, body in group))


def attack(url: str, count: int, part: int, alone: int = 1) -> tuple[Counter[int], Bystander]:
    """Send `count` bodies, others for each part. Returns the statuses of the answers, and the bystander.

    `alone`: number of the bystander's answers that are timed before.
    """
    statuses: Counter[int] = Counter()

    @seed(part)
    @settings(
        max_examples=count // AT_ONCE,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(GROUPS)
    def run(group: list[tuple[str, Any]]) -> None:
        answers = runner.run(send(client, group))
        for (path, body), (status, text) in zip(group, answers, strict=True):
            statuses[status] += 1
            assert status < 500 or status == TIMEOUT, (path, body, text)

    bystander = Bystander(url, alone)
    bystander.start()
    try:
        with asyncio.Runner() as runner:
            client = httpx.AsyncClient(base_url=url, timeout=60)
            run()
            runner.run(client.aclose())
    finally:
        bystander.stop()
    assert bystander.different == []
    assert httpx.get(f"{url}/health").json()["engine_restarts"] == 0
    return statuses, bystander


def test_no_body_harms_the_server_or_others() -> None:
    with serving(partial(engines.sibyl, max_requests=32, max_context=CONTEXT), timeout=20) as running:
        statuses, _ = attack(running.url, IN_CI, part=0)
        running.wait_until(lambda: running.free)
    assert statuses.total() >= IN_CI
    assert statuses[200] > IN_CI / 20, "many are served"
    assert statuses[400] > IN_CI / 5, "many are refused"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 1 + PARTS))
def test_many_bodies_harm_nobody(tmp_path: Path, part: int) -> None:
    count = ONCE // PARTS
    limits = ("--max-running", "32", "--max-context", str(CONTEXT), "--timeout", "20")
    with command(tmp_path / "log", *limits) as url:
        begin = perf_counter()
        statuses, bystander = attack(url, count, part, ALONE)
    print(f"{statuses}, {statuses.total() / (perf_counter() - begin):.0f} bodies a second;", bystander.late())
    assert statuses.total() >= count
