"""Tries the grammars of requests in processes of their own, before the engine compiles them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from hashlib import blake2b

from soothsay.core.grammar import Grammar
from soothsay.core.tenant import Tenant, make_room
from soothsay.own_process import module_environment
from soothsay.server.http.api_errors import MAX_SHOWN, ApiError, invalid, try_later
from soothsay.server.http.json_log import log
from soothsay.tokenizer import Tokenizer

AT_ONCE = 2
"""Grammars that are tried at the same time, one for each key."""

MAX_WAITING = 128
"""Grammars of one key that wait to be tried."""

SECONDS = 30.0
"""Seconds after which a process is replaced. It limits its own CPU time to about 3 s, so it hangs, or the
machine is busy."""

START_SECONDS = 60.0
"""Limit of seconds to start a process, which prepares the vocabulary."""

KEPT = 1024
"""Number of results that are kept, 16 bytes of a digest and at most a message each."""

MAX_ANSWER = 1 << 26
"""Limit of bytes of a process's answer. It may quote the grammar."""


class GrammarChecker:
    """Tries grammars. A process that crashes or takes too long is replaced.

    The keys take turns: each has one grammar in trial, whatever salts its requests have. Results that depend
    on time are not kept, so a good grammar that met a busy machine is tried again when it comes back.

    Call all methods from the event loop. Cancelling `check` ends the process that works for it.

    Args:
        tokenizer: the model's.
        vocab_size: size of the model's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._first = pickle.dumps((tokenizer, vocab_size))
        self._idle: list[Process] = []
        self._slots = asyncio.Semaphore(AT_ONCE)  # first come, first served, with one of each key in line
        self._turns: dict[str, asyncio.Lock] = {}  # of the names whose grammars are in trial or wait for it
        self._waiting = Counter[str]()  # grammars in trial or in line, by name
        self._known: OrderedDict[tuple[str, bytes], str | None] = OrderedDict()  # by name and digest

    async def check(self, grammar: Grammar, tenant: Tenant) -> None:
        """Wait until a grammar was tried. A tenant does not see which grammars others have tried.

        Raises `ApiError`: 400 if the engine must not use the grammar, 429 if too many of the key's grammars
        wait, 503 if no process can be started, or it does not answer in time.
        """
        key = tenant.name, blake2b(grammar.source.encode(), key=tenant.digest, digest_size=16).digest()
        if key not in self._known:
            async with self._turn(tenant.name):
                if key not in self._known:
                    async with self._slots:
                        problem = await self._try(grammar)
                    self._known[key] = None if problem is None else problem[:MAX_SHOWN]
                    make_room(self._known, KEPT, lambda one: one[0])
        self._known.move_to_end(key)
        if (problem := self._known[key]) is not None:
            raise _refused(problem)

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Wait until no other grammar of a key is in trial. Raises `ApiError` 429 if too many wait."""
        if self._waiting[name] >= MAX_WAITING:
            message = f"{MAX_WAITING} new grammars wait to be compiled; try again later"
            raise try_later(message, "queue_full", status=429, seconds=5)
        self._waiting[name] += 1
        try:
            async with self._turns.setdefault(name, asyncio.Lock()):
                yield
        finally:
            self._waiting[name] -= 1
            if self._waiting[name] == 0:
                del self._waiting[name], self._turns[name]

    async def stop(self) -> None:
        """End all processes."""
        for process in self._idle:
            await _kill(process)
        self._idle.clear()

    async def _try(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar; None if the engine may use it. Raises `ApiError` if nobody knows."""
        process = self._idle.pop() if self._idle else await self._start()
        try:
            async with _killed_on_error(process), asyncio.timeout(SECONDS):
                answer = json.loads(await _ask(process, grammar.source))
        except TimeoutError as error:
            log.warning("grammar process has not answered")
            raise _no_process() from error
        except (asyncio.IncompleteReadError, OSError) as error:
            log.warning("grammar process ended", extra={"exit_code": process.returncode})
            raise _refused("the grammar takes too much time or memory to compile; make it smaller") from error
        self._idle.append(process)
        problem: str | None = answer["problem"]
        if problem is not None and not answer["lasts"]:
            raise _refused(problem)
        return problem

    async def _start(self) -> Process:
        """Start a process, and wait until it has prepared the vocabulary."""
        try:
            command = [sys.executable, "-m", "soothsay.server.engines.grammar_process"]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=module_environment(), limit=MAX_ANSWER
            )
            async with _killed_on_error(process), asyncio.timeout(START_SECONDS):
                assert process.stdin is not None
                process.stdin.write(self._first)
                await _ask(process, Grammar.choice(["a"]).source)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            log.error("grammar process not started", exc_info=error)
            raise _no_process() from None
        return process


@contextlib.asynccontextmanager
async def _killed_on_error(process: Process) -> AsyncIterator[None]:
    """Kill a process if the block fails or is cancelled: what it would answer next is unknown."""
    try:
        yield
    except BaseException:
        await _kill(process)
        raise


async def _ask(process: Process, source: str) -> bytes:
    """Send the source of a grammar, and return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(pickle.dumps(source))
    await process.stdin.drain()
    return await process.stdout.readuntil()


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await asyncio.shield(process.wait())


def _refused(problem: str) -> ApiError:
    return invalid("response_format", problem)


def _no_process() -> ApiError:
    return try_later("the server cannot try grammars now; try again later", "unavailable", seconds=5)
