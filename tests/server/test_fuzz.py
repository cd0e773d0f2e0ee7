"""Hostile bodies: none of them causes an error of the server, ends the engine or changes another's answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import engines
import httpx
import pytest
from hostile_bodies import bodies
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import Running, serving

from soothsay.server.app import BODIES
from soothsay.server.openapi import describe

TIMEOUT = 504
"""The status of an answer that takes longer than the server allows. Some bodies ask for very long ones."""

AT_ONCE = 20
"""Bodies that are sent together."""

IN_CI, ONCE = 5_000, 200_000
"""Bodies that are sent by the test suite, and by `make test-slow`."""

GROUPS = st.lists(bodies(describe(BODIES, ())), min_size=AT_ONCE, max_size=AT_ONCE)


QUESTION = {
    **{"model": "sibyl", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0, "seed": 7},
    "ignore_eos": True,
}


class Bystander(threading.Thread):
    """Asks the same question again and again. Keeps what differed, and how long each answer took."""

    def __init__(self, url: str):
        super().__init__(daemon=True)
        self._url, self._stopped = f"{url}/v1/completions", threading.Event()
        self.seconds: list[float] = []
        self.different: list[str] = []
        self.expected = self._ask()

    def _ask(self) -> str:
        begin = perf_counter()
        text: str = httpx.post(self._url, json=QUESTION, timeout=120).json()["choices"][0]["text"]
        self.seconds.append(perf_counter() - begin)
        return text

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            try:
                text = self._ask()
            except (httpx.HTTPError, KeyError) as error:
                text = repr(error)
            if text != self.expected:
                self.different.append(text)

    def stop(self) -> None:
        self._stopped.set()
        self.join(120)


@contextmanager
def attacked() -> Iterator[tuple[Running, Counter[int], Bystander]]:
    """A server with a bystander, and a count of the statuses of answers."""
    statuses: Counter[int] = Counter()
    with serving(partial(engines.sibyl, max_requests=32, max_context=512), timeout=20) as running:
        bystander = Bystander(running.url)
        bystander.start()
        yield running, statuses, bystander
        bystander.stop()
        health = httpx.get(f"{running.url}/health").json()
        assert health["engine_restarts"] == 0
        assert bystander.different == []
        running.wait_until(lambda: running.free)


async def send(url: str, group: Sequence[tuple[str, Any]]) -> list[tuple[int, str]]:
    """Send bodies together. Returns the status of each answer, and its text."""

    async def one(client: httpx.AsyncClient, path: str, body: Any) -> tuple[int, str]:
        content = json.dumps(body)
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        return answer.status_code, answer.text

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await asyncio.gather(*(one(client, path, body) for path, body in group))


def attack(count: int) -> tuple[Counter[int], Bystander]:
    """Send `count` bodies. Returns the statuses of the answers, and the bystander."""
    with attacked() as (running, statuses, bystander):

        @settings(
            max_examples=count // AT_ONCE,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(GROUPS)
        def run(group: list[tuple[str, Any]]) -> None:
            for (path, body), (status, text) in zip(
                group, asyncio.run(send(running.url, group)), strict=True
            ):
                statuses[status] += 1
                assert status < 500 or status == TIMEOUT, (path, body, text)

        run()
    return statuses, bystander


@pytest.mark.slow  # a minute or two; moves into the suite once it has passed there
def test_no_body_harms_the_server_or_others() -> None:
    statuses, _ = attack(IN_CI)
    assert statuses.total() >= IN_CI
    assert statuses[200] > IN_CI / 20, "many are served"
    assert statuses[400] > IN_CI / 5, "many are refused"


@pytest.mark.slow
def test_many_bodies_harm_nobody() -> None:
    statuses, bystander = attack(ONCE)
    alone, worst = sorted(bystander.seconds)[len(bystander.seconds) // 2], max(bystander.seconds)
    print(statuses, f"bystander: {len(bystander.seconds)} answers, median {alone:.3f} s, worst {worst:.3f} s")
    assert statuses.total() >= ONCE
