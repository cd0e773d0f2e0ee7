"""Tries the grammars of requests in processes of their own, before the engine compiles them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict

from soothsay.core.grammar import Grammar
from soothsay.core.tenant import PerTenant, Tenant
from soothsay.safe_path import module_environment
from soothsay.server.api_errors import ApiError
from soothsay.server.grammar_process import LENGTH
from soothsay.tokenizer import Tokenizer

log = logging.getLogger("soothsay.server")

AT_ONCE = 2
"""Grammars that are tried at the same time, one for each tenant."""

SECONDS = 10.0
"""Limit of seconds to try a grammar. A process limits its own CPU time to about 3 s."""

START_SECONDS = 60.0
"""Limit of seconds to start a process, which prepares the vocabulary."""

KEPT = 1024
"""Number of results that are kept; each takes as much memory as its grammar."""

PARAM = "response_format"


class GrammarChecker:
    """Tries grammars. A process that crashes or takes too long is replaced.

    Call all methods from the event loop. Cancelling `check` ends the process that works for it.

    Args:
        tokenizer: the model's.
        vocab_size: size of the model's vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        first = pickle.dumps((tokenizer, vocab_size))
        self._first = LENGTH.pack(len(first)) + first
        self._idle: list[Process] = []
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._turns = PerTenant(lambda: asyncio.Semaphore(1))
        self._known: OrderedDict[tuple[Tenant, Grammar], str | None] = OrderedDict()

    async def check(self, grammar: Grammar, tenant: Tenant) -> None:
        """Wait until a grammar was tried. A tenant does not see which grammars others have tried.

        Raises `ApiError`: 400 if the engine must not use the grammar, 503 if no process can be started.
        """
        key = tenant, grammar
        async with self._turns[tenant]:
            if key not in self._known:
                async with self._slots:
                    self._known[key] = await self._try(grammar)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            problem = self._known[key]
        if problem is not None:
            raise ApiError(400, problem, "invalid_value", param=PARAM)

    async def stop(self) -> None:
        """End all processes."""
        for process in self._idle:
            await _kill(process)
        self._idle.clear()

    async def _try(self, grammar: Grammar) -> str | None:
        """What is wrong with a grammar; None if the engine may use it."""
        process = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(SECONDS):
                answer = await _ask(process, grammar.source.encode())
        except TimeoutError:
            await _kill(process)
            return "the grammar takes too long to compile; make it smaller"
        except (asyncio.IncompleteReadError, OSError):
            await _kill(process)
            log.warning("grammar process ended", extra={"exit_code": process.returncode})
            return "the grammar is too complex; make it smaller"
        except BaseException:
            await _kill(process)
            raise
        self._idle.append(process)
        problem: str | None = json.loads(answer)["problem"]
        return problem

    async def _start(self) -> Process:
        """Start a process, and wait until it has prepared the vocabulary."""
        try:
            command = [sys.executable, "-m", "soothsay.server.grammar_process"]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=module_environment()
            )
        except OSError as error:
            log.error("grammar process not started", exc_info=error)
            raise _no_process() from None
        try:
            async with asyncio.timeout(START_SECONDS):
                assert process.stdin is not None
                process.stdin.write(self._first)
                await _ask(process, Grammar.choice(["a"]).source.encode())
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            await _kill(process)
            log.error("grammar process not started", exc_info=error)
            raise _no_process() from None
        except BaseException:
            await _kill(process)
            raise
        return process


async def _ask(process: Process, message: bytes) -> bytes:
    """Send a message, and return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(LENGTH.pack(len(message)) + message)
    await process.stdin.drain()
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return await process.stdout.readexactly(size)


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await asyncio.shield(process.wait())


def _no_process() -> ApiError:
    message = "the server cannot try grammars now; try again later"
    return ApiError(503, message, "unavailable", headers={"Retry-After": "5"})
