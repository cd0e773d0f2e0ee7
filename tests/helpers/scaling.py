"""A model of a pass with more threads, its check with one and two, and what it says of others.

    python tests/helpers/scaling.py MODEL [MODEL ...]

Run it on a quiet machine. A pass is some work of the host, which one thread does; loops, each of which ends
when its threads meet; and reading and computing, which overlap. With p threads it takes

    host + loops * meeting(p) + hypot(bytes / bandwidth(p), compute * uneven(p) / p)

Host, bandwidths and a meeting of two threads are measured, and `compute` follows from the pass with one
thread. `uneven` is what is lost where pieces do not divide evenly. A meeting is taken to be longer with more
threads. So a pass with one thread is right by construction, and passes with two are the check.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch

from soothsay.model.timing.pass_measuring import VerifyPass, filled_cache
from soothsay.model.timing.pass_predicting import Work, linear_layers
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

CONTEXT, ROWS, ROUNDS = 128, (1, 4, 8, 16), 15
READ = 1 << 29  # bytes
NORM = 1 << 15  # numbers of a row that is worth a thread
MEMORIES = 50e9, 100e9, 300e9  # bytes a second
PANEL, WEIGHT_PIECE = 64, 1 << 18  # of csrc/panels.h and csrc/product_of.h
MEETING_MORE = 0.05e-6
"""Seconds that each further thread adds to a meeting: one more write to a shared counter. Assumed."""


class Machine(NamedTuple):
    """What limits passes."""

    one: float  # bytes a second that one core reads
    all: float  # and all of them
    meeting: float  # seconds of an empty loop of two threads


class Pass(NamedTuple):
    """What a pass with some rows consists of."""

    host: float  # seconds beside the native loops
    loops: int
    bytes: int
    compute: float  # seconds of one core
    panels: tuple[tuple[int, int], ...]  # of each product: panels, and inputs

    def seconds(self, threads: int, machine: Machine) -> float:
        """How long it takes with some threads."""
        meeting = machine.meeting + MEETING_MORE * (threads - 2) if threads > 1 else 0.0
        reading = self.bytes / min(threads * machine.one, machine.all)
        return (
            self.host
            + self.loops * meeting
            + math.hypot(reading, self.compute * self.uneven(threads) / threads)
        )

    def uneven(self, threads: int) -> float:
        """How much longer the last thread works than it would with its share."""
        shares = sum(panels * inputs for panels, inputs in self.panels)
        longest = 0
        for panels, inputs in self.panels:
            each = max(1, min(panels // (4 * threads), WEIGHT_PIECE // (inputs * PANEL)))
            pieces = math.ceil(panels / each)
            longest += min(math.ceil(pieces / threads) * each, panels) * inputs
        return longest * threads / shares


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Counted:
    """A native library that adds up the seconds in its functions."""

    def __init__(self, library: Any):
        self._library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*values: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*values)
            finally:
                self.seconds += time.perf_counter() - begin

        return call


def meeting_of_two(library: Any) -> float:
    """The seconds that it takes two threads to meet, by norms of few rows."""
    x, out, weight = torch.randn(4, NORM), torch.empty(4, NORM), torch.ones(NORM)

    def norms(rows: int, threads: int) -> float:
        library.soothsay_set_threads(threads)
        given = x.data_ptr(), None, 0, None, weight.data_ptr(), 1e-5, rows, NORM, None, out.data_ptr(), 0
        return median(seconds_of(lambda: library.soothsay_add_norm(*given)) for _ in range(2000))

    alone = norms(2, 1)
    return norms(2, 2) - alone + (norms(4, 1) - alone) / 2


Kind = tuple[int, int]
"""Rows of a pass, or 0 where memory is read, and threads."""


def measured(model: Transformer, counted: Counted) -> dict[Kind, tuple[float, float]]:
    """Median seconds, whole and outside of the library, in turns."""
    cache, data = filled_cache(model, CONTEXT, ROWS[-1]), torch.ones(READ // 4)
    runs: dict[int, Callable[[], Any]] = {0: data.sum}
    runs |= {rows: VerifyPass(model, cache, rows, CONTEXT) for rows in ROWS}
    found: dict[Kind, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for rows, threads in product(runs, (1, 2)):
            torch.set_num_threads(threads)
            for _ in range(3):
                runs[rows]()
            counted.seconds = 0.0
            whole = seconds_of(runs[rows])
            found.setdefault((rows, threads), []).append((whole, whole - counted.seconds))
    return {kind: (median(a for a, _ in own), median(b for _, b in own)) for kind, own in found.items()}


def main() -> None:
    """Print the check and the predictions, as rows of Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    for path in parser.parse_args().models:
        torch.set_num_threads(2)
        model = load_model(open_checkpoint(path), "auto")
        kernels: Any = model.kernels
        meeting = meeting_of_two(kernels._loaded)
        counted = kernels._loaded = Counted(kernels._loaded)
        found = measured(model, counted)
        machine = Machine(READ / found[0, 1][0], READ / found[0, 2][0], meeting)
        layers = [shape for _, shape in linear_layers(model)]
        panels = tuple((-(-outputs // PANEL), inputs) for outputs, inputs in layers)
        loops = len(layers) + len(model.spec.layers)  # products, and attention
        size = Work.of(model, 1, CONTEXT).bytes
        print(f"{path}: {size / 1e6:.0f} MB and {loops} loops a pass; {machine.one / 1e9:.1f} GB/s with one")
        print(f"thread, {machine.all / 1e9:.1f} with two; a meeting takes {1e6 * machine.meeting:.2f} us\n")
        print("| rows | one thread | two | predicted | 8 threads | 16 | 64 |\n| ---: " + "| ---: " * 6 + "|")
        for rows in ROWS:
            whole, host = found[rows, 1]
            compute = math.sqrt(max((whole - host) ** 2 - (size / machine.one) ** 2, 0.0))
            known = Pass(host, loops, size, compute, panels)
            real, guess = found[rows, 2][0], known.seconds(2, machine)
            cells = [f"{rows}", f"{1e3 * whole:.1f}", f"{1e3 * real:.1f}"]
            cells.append(f"{1e3 * guess:.1f} ({guess / real - 1:+.0%})")
            for threads in (8, 16, 64):
                faster = [known.seconds(threads, machine._replace(all=speed)) for speed in MEMORIES]
                cells.append(", ".join(f"{1e3 * seconds:.1f}" for seconds in faster))
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
