"""Many streaming clients for a while, some of which hang up or attack, and an engine that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from attacks import ATTACKS
from serving import command

from soothsay import LLM, SamplingParams

TOPICS = ["river", "clock", "garden", "letter", "bridge", "winter", "market", "violin", "island", "engine"]
PROMPTS = [f"Once upon a time there was a {topic}, and" for topic in TOPICS]
TOKENS = 48

HANGING_UP, MALICIOUS = 0.10, 0.05
"""Shares of the requests."""

SETTLED = 20.0
"""Seconds after a kill in which requests may fail, while the engine starts again."""


@dataclass
class Outcome:
    """What has happened to the requests, and the memory that was in use."""

    counts: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)  # failures around the kill
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # seconds, bytes


@dataclass
class Soak:
    """A load on a server.

    Args:
        url: of the server.
        clients: that ask at the same time.
        seconds: how long.
        kill_at: seconds after which the engine is killed.
    """

    url: str
    clients: int
    seconds: float
    kill_at: float
    outcome: Outcome = field(default_factory=Outcome)
    killed_at: float = float("inf")

    def run(self) -> Outcome:
        """Run the load to its end."""
        asyncio.run(self._run())
        return self.outcome

    async def _run(self) -> None:
        begin = time.monotonic()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as http:
            self.http = http
            load = [asyncio.create_task(self._client(i, begin)) for i in range(self.clients)]
            watch = asyncio.create_task(self._watch(begin))
            await asyncio.gather(*load)
            watch.cancel()

    async def _client(self, number: int, begin: float) -> None:
        chance = random.Random(number)
        while time.monotonic() - begin < self.seconds:
            kind = chance.random()
            if kind < MALICIOUS:
                await self._attack(chance)
            else:
                await self._ask(chance, hang_up=kind < MALICIOUS + HANGING_UP)

    async def _attack(self, chance: random.Random) -> None:
        path, body = ATTACKS[chance.choice(list(ATTACKS))]
        began = time.monotonic()
        try:
            answer = await self.http.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            self._failed(f"attack: {error!r}", began)
            return
        self.outcome.counts[f"attack {answer.status_code}"] += 1
        if answer.status_code >= 500:
            self._failed(f"attack: {answer.status_code} {answer.text[:200]}", began)

    async def _ask(self, chance: random.Random, *, hang_up: bool) -> None:
        which, began, text = chance.randrange(len(PROMPTS)), time.monotonic(), ""
        body = {"model": "sibyl", "prompt": PROMPTS[which], "max_tokens": TOKENS, "stream": True}
        body |= {"temperature": 1.0, "seed": which, "ignore_eos": True}
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    self._failed(f"{answer.status_code} {(await answer.aread())[:200]!r}", began)
                    return
                finished = False
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._failed(f"in a stream: {line[:200]}", began)
                        return
                    for choice in event["choices"]:
                        text += choice["text"]
                        finished = finished or choice["finish_reason"] is not None
                    if hang_up and len(text) > 20:
                        self.outcome.counts["hung up"] += 1
                        return
        except httpx.HTTPError as error:
            self._failed(repr(error), began)
            return
        if finished and text == expected()[which]:
            self.outcome.counts["right"] += 1
        else:
            self._failed(f"wrong: {text!r}", began)

    def _failed(self, what: str, began: float) -> None:
        """Count a request that failed: rightly, if the kill cut it or came shortly before."""
        if began < self.killed_at + SETTLED and time.monotonic() > self.killed_at:
            self.outcome.cut[what] += 1
        else:
            self.outcome.wrong.append(what)

    async def _watch(self, begin: float) -> None:
        """Note the memory of both processes, and kill the engine once."""
        while True:
            await asyncio.sleep(min(5.0, self.seconds / 20))
            now = time.monotonic() - begin
            with contextlib.suppress(httpx.HTTPError, FileNotFoundError, ProcessLookupError):
                health = (await self.http.get("/health")).json()
                engine = health["engine_pid"]
                for name, pid in (("engine", engine), ("server", parent_of(engine))):
                    self.outcome.memory.setdefault(name, []).append((now, resident_bytes(pid)))
                if now > self.kill_at and self.killed_at == float("inf"):
                    self.killed_at = time.monotonic()
                    os.kill(engine, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """The process that has started another one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def resident_bytes(pid: int) -> int:
    """Memory that a process holds by itself, without shared pages."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(facts["RssAnon"].split()[0]) * 1024


_expected: list[str] = []


def expected() -> list[str]:
    """The text of plain decoding for each prompt."""
    if not _expected:
        llm = LLM("sibyl", drafter="none", dtype="int8")
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)
            _expected.append(llm.generate(prompt, params).text)
    return _expected


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/PID/status")
@pytest.mark.parametrize(
    ("clients", "seconds", "kill_at"),
    [
        pytest.param(20, 6, 2, id="short"),
        pytest.param(200, 600, 150, id="long", marks=pytest.mark.slow),
    ],
)
def test_everybody_gets_their_answer(clients: int, seconds: float, kill_at: float, tmp_path: Path) -> None:
    expected()
    with command(tmp_path / "log", "--kv-tokens", "16384") as url:
        outcome = Soak(url, clients, seconds, kill_at).run()
    print(outcome.counts, outcome.cut)
    assert outcome.wrong == []
    assert outcome.counts["right"] >= clients // 2
    assert outcome.cut.total() < clients // 2, outcome.cut  # answers go on at the new engine
    if seconds < 60:
        return
    for name, points in outcome.memory.items():
        first, second = (
            [size for at, size in points if low <= at < high]
            for low, high in ((seconds / 2, 3 * seconds / 4), (3 * seconds / 4, seconds))
        )
        growth = sum(second) / len(second) / (sum(first) / len(first)) - 1
        print(f"{name}: {second[-1] / 2**20:.0f} MiB, {growth:+.2%} from one quarter to the next")
        assert growth < 0.02
