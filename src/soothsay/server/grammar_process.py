"""A process that tries grammars, so that one that crashes or never ends harms nobody.

It reads messages from stdin and writes answers to stdout: four bytes of the length, and then as many bytes.
The first message is a pickled tokenizer and the size of the vocabulary. Each later one is a grammar's source;
its answer is JSON: `{"problem": null}`, or what is wrong with the grammar.

A grammar is compiled here on a smaller stack than the engine's, and in bounded time and memory. Then a few
tokens of an answer are chosen at random. What passes is safe and fast enough for the engine's process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import struct
import sys
import threading
import time
from typing import BinaryIO

import numpy as np

from soothsay.core.grammar import Grammar, Grammars
from soothsay.errors import RequestError

with contextlib.suppress(ImportError):  # not on Windows
    import resource

COMPILE_SECONDS = 1.0
"""Limit of CPU time to compile a grammar. The engine compiles it again, beside the steps of other answers."""

TOKEN_SECONDS = 0.02
"""Limit of CPU time for the mask of one token. A step waits for the masks of all its rows."""

WALK = 48
"""Number of tokens that are tried."""

STACK = 2 << 20
"""Bytes of the stack for compiling. The engine's threads have 8 MiB, so what fits here fits there."""

MEMORY = 1 << 30
"""Limit of bytes beyond those of the vocabulary."""

LENGTH = struct.Struct("<I")


def read_message(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def main() -> None:
    """Serve until stdin ends."""
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(OSError):
        os.nice(10)  # steps of the engine go first
    first = read_message(incoming)
    if first is None:
        return
    tokenizer, vocab_size = pickle.loads(first)
    grammars = Grammars(tokenizer, vocab_size)
    with contextlib.suppress(RequestError):
        _try(grammars, Grammar.choice(["a"]))  # prepares the vocabulary
    _limit_memory()
    while (source := read_message(incoming)) is not None:
        _limit_time()
        answer = json.dumps({"problem": _on_small_stack(grammars, source.decode())}).encode()
        outgoing.write(LENGTH.pack(len(answer)) + answer)
        outgoing.flush()


def _on_small_stack(grammars: Grammars, source: str) -> str | None:
    problems: list[str | None] = ["the grammar is too complex; make it smaller"]

    def run() -> None:
        with contextlib.suppress(MemoryError):
            problems[0] = problem_of(grammars, Grammar(source))

    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return problems[0]


def problem_of(grammars: Grammars, grammar: Grammar) -> str | None:
    """What is wrong with a grammar; None if the engine may use it."""
    try:
        return _try(grammars, grammar)
    except RequestError as error:
        return str(error)


def _try(grammars: Grammars, grammar: Grammar) -> str | None:
    begin = time.thread_time()
    matcher = grammars.fresh(grammar)
    if matcher.is_error():
        return f"the grammar cannot be compiled: {matcher.get_error().strip()}"
    if time.thread_time() - begin > COMPILE_SECONDS:
        return f"the grammar takes more than {COMPILE_SECONDS:g} s to compile; make it smaller"
    chance, size = random.Random(0), grammars.vocab_size
    for token in range(WALK):
        begin = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            # at the first token, the engine finds it too, and says more
            return f"the grammar is too complex: {matcher.get_error().strip()}" if token else None
        if time.thread_time() - begin > TOKEN_SECONDS:
            return f"the grammar takes more than {TOKEN_SECONDS:g} s for a token; make it simpler"
        choices = np.flatnonzero(np.unpackbits(mask, count=size, bitorder="little"))
        if len(choices) == 0:  # the answer can only end
            break
        matcher.consume_token(int(chance.choice(choices)))
    return None


def _limit_memory() -> None:
    """Limit the memory from now on."""
    with contextlib.suppress(NameError, OSError, ValueError):
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time() -> None:
    """Let the system end this process if the next grammar takes far too long."""
    with contextlib.suppress(NameError, OSError, ValueError):
        most = math.ceil(time.process_time() + 2 * COMPILE_SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
