"""Answers a file of requests without a network: each line goes through the server's own application.

The file is in the format of OpenAI's batches. A batch that was killed goes on where it was. The output has
the same bytes however often that happened, and whichever drafter was used: replies are functions of their
requests, without times, random ids, and how the answer was computed.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from soothsay import __version__
from soothsay.errors import RequestError, SoothsayError
from soothsay.files import user_path
from soothsay.server.batch.batch_files import DIGEST, OK, BatchInput, BatchLine, BatchOutput, State
from soothsay.server.engines.engine_process import load
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.replica import EngineState
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import to_line
from soothsay.server.http_server import Server
from soothsay.server.placement import engines
from soothsay.server.server_config import ServerConfig, served_name

TIMES = ("created", "created_at", "completed_at")
"""Fields with times. OpenAI's schema requires them, so they are 0."""

OF_THE_RUN = ("metrics", "timings")
"""Fields of a reply that depend on the drafter and on time."""

USAGE_OF_THE_RUN = ("speculation", "prompt_tokens_details", "completion_tokens_details")
"""Fields of the usage that depend on the drafter and on the prefix cache."""

PREFIX = re.compile(r"[a-z]+[-_]|")
"""What an id begins with. The rest is random."""


def settle(reply: Json, key: str) -> Json:
    """Replace what depends on the run in a whole reply. `key` takes the place of chance. Changes `reply`."""
    for name in OF_THE_RUN:
        reply.pop(name, None)
    usage = reply.get("usage") or {}
    for name in USAGE_OF_THE_RUN:
        usage.pop(name, None)
    if "input_tokens_details" in usage:  # required by OpenAI's schema
        usage["input_tokens_details"] = {"cached_tokens": 0}
    reply |= {name: 0 for name in TIMES if name in reply}
    for number, part in enumerate(_parts(reply)):
        for name in ("id", "call_id"):
            if name in part:
                part[name] = _id(part[name], f"{key}/{number}/{name}")
    return reply


def answer_tokens(reply: Json) -> int:
    """Number of tokens of all answers in a reply."""
    usage = reply.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def _parts(reply: Json) -> Iterator[Json]:
    """The objects of a reply that may have ids, in order."""
    yield reply
    for choice in reply.get("choices", ()):
        yield from choice.get("message", {}).get("tool_calls", ())
    yield from reply.get("output", ())


def _id(random: str, key: str) -> str:
    """An id of the form of a random one, made of a key."""
    found = PREFIX.match(random)
    prefix = found[0] if found else ""
    digest = hashlib.shake_256(key.encode()).hexdigest(len(random))
    return prefix + digest[: len(random) - len(prefix)]


NO_ENGINE = 503
"""Status of a request that got no answer because the engine died."""

LINES_PER_ANSWER = 2
"""Lines that are read for each answer that the engine can run at once. Half of them wait, as token ids."""

Progress = Callable[[int, int, int], None]
"""Is told the lines done, all lines, and the tokens of this run's answers."""


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What came out of a batch."""

    lines: int
    failed: int  # lines whose answer is an error, those of earlier runs included
    earlier: int  # lines that earlier runs had answered
    tokens: int  # of the answers of this run
    first_failed: int | None = None  # number of the first line whose answer is an error


def run_batch(
    model: str,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    max_context: int | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    max_running: int = 64,
    replicas: int = 1,
    ray_address: str | None = None,
    progress: Progress = lambda done, total, tokens: None,
    **options: Any,
) -> BatchSummary:
    """Answer all lines of a file. If `output` has some of the answers already, compute only the others.

    The engine runs in a new process. So a script must call this below `if __name__ == "__main__":`.

    Args:
        model: as for `LLM`.
        source: the requests, one a line, in the format of OpenAI's batches.
        output: gets one line for each request, in the order in which answers end.
        name: the model's name in requests; by default `model` without its folder.
        seed: other seeds give other answers to requests that are sampled and have no seed of their own.
        dtype, max_context, chat_template: as for `LLM`.
        max_running: limit of answers in one step.
        replicas: number of engines. Another one goes on with the lines of one that dies.
        ray_address: of a Ray cluster where the engines run; None: they run here.
        progress: called at the begin and after each line.
        options: further options of `LLM`, such as `drafter`. They must not change answers.

    Raises:
        SoothsayError: the model cannot be loaded.
        RequestError: a file cannot be read or written, two lines have the same `custom_id`, or `output` was
            begun with something else that answers depend on.
    """
    requests, name = BatchInput(user_path(source)), name or served_name(model)
    target = user_path(output)
    if target.exists() and target.samefile(requests.path):
        raise RequestError(f"{target} is the input; write to another file")
    state = {
        "version of soothsay": __version__,
        f"input{DIGEST}": requests.sha256,
        "model": _place(model),
        "model's name in requests": name,
        "dtype": dtype,
        "context": max_context,
        f"chat template{DIGEST}": None if chat_template is None else _digest(user_path(chat_template)),
        "seed": seed,
    }
    with BatchOutput(target) as answers:
        answers.check(state)
        tokens = 0
        if requests.unanswered(answers.keys).any():
            options |= {"chat_template": chat_template, "max_requests": max_running}
            factory = partial(load, model, dtype=dtype, max_context=max_context, **options)
            elsewhere = ray_address not in (None, "local")  # where nobody knows how many cores there are
            place = replicas, 1 if elsewhere else None, ray_address
            with engines(factory, *place) as make, Fleet(make, replicas) as fleet:
                batch = BatchRun(fleet, requests, answers, name, seed, progress)
                asyncio.run(batch.run(state))
            answers.sync()
            tokens = batch.tokens
        failures, first = answers.failures, None
        if failures:
            first = next(requests.lines(np.isin(requests.keys, np.asarray(failures)))).number
        return BatchSummary(len(requests.keys), len(failures), len(answers.keys), tokens, first)


def _place(model: str) -> str:
    """The path of a model; its name if it has none."""
    path = user_path(model)
    return str(path.resolve()) if path.exists() else model


class BatchRun:
    """One run over the lines that have no answer yet.

    Args:
        fleet: the engines, with the model loaded. They end with the run.
        requests: all lines.
        answers: where to write; it may have some of the answers.
        name: the model's name in requests.
        seed, progress: see `run_batch`.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: BatchInput,
        answers: BatchOutput,
        name: str,
        seed: int = 0,
        progress: Progress = lambda done, total, tokens: None,
    ):
        self._answers, self._seed, self._progress = answers, seed, progress
        self._lines = requests.lines(requests.unanswered(answers.keys))
        self._done, self._total = len(answers.keys), len(requests.keys)
        self.tokens = 0  # of the answers so far
        self._num_workers = LINES_PER_ANSWER * fleet.model.max_requests * fleet.scaler.bounds.most
        self._server = Server(fleet, _config(name, fleet, self._num_workers))
        transport = httpx.ASGITransport(self._server.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://batch")
        self._unlucky: list[BatchLine] = []  # those that ran when the engine died

    async def run(self, state: State) -> None:
        """Answer all lines. `state` is what the answers depend on, as far as the files and options show it.

        Raises `RequestError`.
        """
        async with self._server.lifespan(), self._client:
            self._answers.begin({**state, **self._numbers()})
            self._progress(self._done, self._total, self.tokens)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._num_workers):
                        group.create_task(self._work())
            except BaseExceptionGroup as group_of_errors:
                raise group_of_errors.exceptions[0] from None
            for line in self._unlucky:  # one by one, so that only the line that is to blame fails
                self._write(line, *await self._answer(line))

    async def _work(self) -> None:
        """Answer one line after the other, until none is left."""
        for line in self._lines:  # shared by all workers
            status, body = await self._answer(line)
            if status == NO_ENGINE:
                self._unlucky.append(line)
            else:
                self._write(line, status, body)

    def _write(self, line: BatchLine, status: int, body: Any) -> None:
        self._answers.write(line, status, body)
        self._done += 1
        self.tokens += answer_tokens(body)
        self._progress(self._done, self._total, self.tokens)

    async def _answer(self, line: BatchLine) -> tuple[int, Any]:
        """The status and the body of the answer to a line."""
        if line.error is not None:
            return line.error.status, line.error.body
        body = line.body
        if isinstance(body, dict) and body.get("seed") in (None, -1):
            body = {**body, "seed": _seed(self._seed, line.custom_id or "")}
        while self._server.fleet.state is not EngineState.OK:
            await asyncio.sleep(0.1)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(line.url, content=to_line(body), headers=headers)
        status, reply = response.status_code, response.json()
        return status, settle(reply, f"{line.key:016x}") if status == OK else reply

    def _numbers(self) -> dict[str, str | int]:
        """What answers depend on, as far as only the loaded model shows it.

        The log-probabilities of a probe have other bits with other weights, another dtype, or on a processor
        for which other kernels are chosen.
        """
        numerics = self._server.fleet.replicas[0].numerics
        if not numerics.probe:
            raise SoothsayError("the model cannot answer a first request; see what its engine printed")
        return {
            "sampling defaults (generation-config)": to_line(dict(self._server.model.sampling_defaults)),
            "room for a request, in tokens (kv-tokens)": numerics.room,
            "numeric mode (weights, dtype or processor)": numerics.probe,
        }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _config(name: str, fleet: Fleet, num_lines: int) -> ServerConfig:
    """The server's limits, without those that depend on load: nobody waits for a single answer."""
    default = ServerConfig(name)
    return ServerConfig(
        name,
        drafters=fleet.model.drafters,
        max_queue=num_lines * default.max_n * default.max_prompts,
        max_bodies=num_lines * default.max_body,
        timeout=math.inf,
    )


def _seed(seed: int, custom_id: str) -> int:
    """A seed that follows from the seed of the batch and the line's id, of 48 bits."""
    digest = hashlib.blake2b(f"{seed}/{custom_id}".encode(), digest_size=6, person=b"seed").digest()
    return int.from_bytes(digest, "big")
