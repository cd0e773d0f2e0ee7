"""A process that tries grammars, so that one that crashes or never ends harms nobody.

It reads pickles from stdin: a tokenizer with the size of the vocabulary, and then the sources of grammars. It
answers each on stdout with an `Answer`, as a line of JSON.

A grammar is compiled here on a smaller stack than the engine's, and in bounded time and memory. Then a few
tokens of an answer are chosen at random, so that most grammars which reach a limit do so here. The engine
watches over the rest of an answer, see `Constraint`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import resource
import sys
import threading
import time
from typing import TypedDict

import numpy as np
from llguidance import LLMatcher

from soothsay.core.constraint import Grammars, limit_problem
from soothsay.core.grammar import Grammar
from soothsay.errors import RequestError

COMPILE_SECONDS = 1.0
"""Limit of CPU time to compile a grammar. The engine compiles it again, beside the steps of other answers."""

WALK = 48
"""Number of tokens that are tried, at most."""

WALK_SECONDS = 0.5
"""CPU time after which no more tokens are tried."""

STACK = 2 << 20
"""Bytes of the stack for compiling. The engine's threads have 8 MiB, so what fits here fits there."""

MEMORY = 1 << 30
"""Limit of bytes beyond those of the vocabulary."""


class Answer(TypedDict):
    """The result of a trial."""

    problem: str | None  # what is wrong with the grammar; None: the engine may use it
    lasts: bool  # whether the result is the same each time; it is not if a busy machine may be the reason


def main() -> None:
    """Serve until stdin ends."""
    with contextlib.suppress(OSError):
        os.nice(10)  # steps of the engine go first
    with contextlib.suppress(EOFError):
        grammars = Grammars(*pickle.load(sys.stdin.buffer))
        try_grammar(grammars, Grammar.choice(["a"]))  # prepares the vocabulary
        _limit_memory()
        while True:
            source = pickle.load(sys.stdin.buffer)
            _limit_time()
            print(json.dumps(_on_small_stack(grammars, source)), flush=True)


def _on_small_stack(grammars: Grammars, source: str) -> Answer:
    answers: list[Answer] = [{"problem": "the grammar is too complex; make it smaller", "lasts": False}]

    def run() -> None:
        with contextlib.suppress(MemoryError):
            answers[0] = try_grammar(grammars, Grammar(source))

    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


def try_grammar(grammars: Grammars, grammar: Grammar) -> Answer:
    """Compile a grammar, and choose a few tokens."""
    begin = time.thread_time()
    try:
        matcher = grammars.fresh(grammar)
    except RequestError as error:
        return {"problem": str(error), "lasts": True}
    if matcher.is_error():
        return {"problem": f"the grammar cannot be compiled: {matcher.get_error().strip()}", "lasts": True}
    if time.thread_time() - begin > COMPILE_SECONDS:
        problem = f"the grammar takes more than {COMPILE_SECONDS:g} s to compile; make it smaller"
        return {"problem": problem, "lasts": False}
    problems = (_problem(grammars, part) for part in grammar.parts)
    return {"problem": next(filter(None, problems), None), "lasts": True}


def _problem(grammars: Grammars, part: Grammar) -> str | None:
    """Why a grammar cannot begin, or which limit it reached in a few tokens; None: nothing is wrong."""
    matcher = grammars.fresh(part)
    return grammars.problem_at_start(matcher) or _walk(matcher, grammars.vocab_size)


def _walk(matcher: LLMatcher, size: int) -> str | None:
    """Choose tokens until a limit is reached, and return which. None: no limit was in the way."""
    chance, begin = random.Random(0), time.thread_time()
    for _ in range(WALK):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        choices = np.flatnonzero(np.unpackbits(mask, count=size, bitorder="little"))
        if matcher.is_error() or len(choices) == 0 or time.thread_time() - begin > WALK_SECONDS:
            break
        matcher.consume_token(int(chance.choice(choices)))
    return limit_problem(matcher)


def _limit_memory() -> None:
    """Limit the memory from now on."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time() -> None:
    """Let the system end this process if the next grammar takes far too long."""
    with contextlib.suppress(OSError, ValueError):
        most = math.ceil(time.process_time() + 2 * COMPILE_SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
