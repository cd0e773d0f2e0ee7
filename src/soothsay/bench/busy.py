"""`soothsay bench busy`: how fast servers decode while other processes keep this machine's cores busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from soothsay.bench.chat_client import ChatError
from soothsay.bench.measure import Meter, Progress, rotated
from soothsay.bench.prompts import QUESTION
from soothsay.bench.serve.serve_bench import LoadTarget
from soothsay.errors import SoothsayError

SETTLE = 0.3
"""Seconds for which busy processes run before a server is asked, so that the system has placed them."""

COMPUTE = """
import os, sys, threading
threading.Thread(target=lambda: os._exit(len(sys.stdin.read()))).start()
while True: pass
"""
"""What a busy process runs, until this process ends: then its input ends too."""


@dataclass(frozen=True, slots=True)
class BusyRow:
    """What one server did beside a number of busy processes. Medians over the rounds."""

    server: str
    loops: int
    rate: float  # tokens a second, after the first piece of text
    share: float  # of the rate without busy processes in the same round
    longest: float  # longest wait between two pieces, in medians of these waits


@dataclass(frozen=True, slots=True)
class Stream:
    """How an answer came: tokens a second, and the longest wait in medians."""

    rate: float
    longest: float


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that compute all the time. The first is pinned to a core, where the system allows it."""
    running = list[subprocess.Popen[bytes]]()
    try:
        for number in range(count):
            running.append(subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE))
            if number == 0 and hasattr(os, "sched_setaffinity"):
                with contextlib.suppress(OSError):  # it may be forbidden
                    os.sched_setaffinity(running[0].pid, {min(os.sched_getaffinity(0))})
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


async def bench_busy(
    targets: Sequence[LoadTarget], loops: Sequence[int], rounds: int, tokens: int, progress: Progress
) -> list[BusyRow]:
    """Ask each server for one answer at a time, beside each number of busy processes in turn.

    Args:
        targets: servers on this machine, with names of their own. The one that starts rotates.
        loops: numbers of busy processes. A round begins with 0, and goes on in rising order.
        rounds: each round measures every server beside every number.
        tokens: tokens of an answer.
        progress: called with the answers done, their final number, and the tokens so far.

    Raises `SoothsayError` if a server cannot be reached, fails, or sends fewer than three pieces of text.
    """
    for target in targets:
        await target.client.choose_model(target.name)
        await _stream(target, tokens)
    numbers = sorted({0, *loops})
    found: dict[tuple[str, int], list[Stream]] = {(t.name, n): [] for n in numbers for t in targets}
    meter = Meter(progress, rounds * len(found))
    meter.advance()
    for first in range(rounds):
        for count in numbers:
            with busy_processes(count):
                await asyncio.sleep(SETTLE)
                for target in rotated(targets, first):
                    found[target.name, count].append(await _stream(target, tokens))
                    meter.advance(1, tokens)
    return [_row(name, count, own, found[name, 0]) for (name, count), own in found.items()]


def _row(server: str, loops: int, own: Sequence[Stream], quiet: Sequence[Stream]) -> BusyRow:
    shares = [one.rate / other.rate for one, other in zip(own, quiet, strict=True)]
    rate, longest = (statistics.median(getattr(one, name) for one in own) for name in ("rate", "longest"))
    return BusyRow(server, loops, rate, statistics.median(shares), longest)


async def _stream(target: LoadTarget, tokens: int) -> Stream:
    """Ask for one greedy answer."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": tokens}
    try:
        reply = await target.client.ask({**body, **target.body})
    except ChatError as error:
        raise SoothsayError(f"{target.name}: {error}") from None
    if len(reply.pieces) < 3:
        pieces = f"{len(reply.pieces)} pieces" if len(reply.pieces) != 1 else "1 piece"
        raise SoothsayError(f"{target.name} sent its answer in {pieces}; at least 3 are needed for a rate")
    return _rates(reply.pieces, reply.tokens)


def _rates(pieces: Sequence[float], tokens: int) -> Stream:
    """From when each piece of an answer came. Its tokens are spread evenly over the pieces."""
    waits = [after - before for before, after in pairwise(pieces)]
    rate = tokens / len(pieces) * len(waits) / sum(waits)
    return Stream(rate, longest=max(waits) / statistics.median(waits))
