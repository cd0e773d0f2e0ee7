"""Measurements of passes that verify a draft tree: all sizes, or a few while a model is loaded."""

import time
from collections.abc import Generator, Sequence
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.core.cache import KVPool
from soothsay.core.tree import DraftTree
from soothsay.model.timing.pass_times import PassTimes
from soothsay.model.transformer import Transformer
from soothsay.progress import tell_progress

Layout = Literal["chain", "binary"]
"""The shape of a draft tree: a chain, or two children for each node."""


class VerifyPass:
    """One pass that verifies a tree of `rows` nodes after a context, as the engine runs it.

    It packs the batch and computes all layers and the logits of all rows. It does not draft, sample or move
    KV. It can be run again and again: the tree's keys and values overwrite themselves.

    Args:
        model: the model to run.
        cache: a pool of its own with at least `context + rows` slots; see `filled_cache`.
        rows: nodes of the tree, the root included.
        context: tokens before the root.
        layout: the shape of the tree.
    """

    def __init__(self, model: Transformer, cache: KVPool, rows: int, context: int, layout: Layout = "chain"):
        self.model, self.cache = model, cache
        tree = DraftTree(0)
        for node in range(1, rows):
            parent = node - 1 if layout == "chain" else (node - 1) // 2
            tree.add(parent, node % model.spec.vocab_size)
        self.rows = Rows(
            tokens=np.array(tree.tokens[:1], dtype=np.int64),
            start=context,
            table=np.arange(cache.num_slots // cache.block_size),
            tree=tree,
            state=0,
            source=max(context // 2, 1),
        )

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """`[rows, V]` logits."""
        return self.model.run(self.model.pack([self.rows], self.cache.block_size), self.cache)[2]


def filled_cache(model: Transformer, context: int, rows: int) -> KVPool:
    """A pool for `context` tokens and `rows` after them, filled with noise.

    Memory that was never written is one page of zeros, and reading it costs nothing: times would be wrong.
    """
    size = EngineConfig.block_size
    return model.new_cache(-(-(context + rows) // size), size, nodes=rows, is_filled=True)


ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows at which T is measured. Between and beyond them it is a straight line."""

CONTEXTS = (64, 1024)
"""Numbers of context tokens at which T is measured. Between and beyond them it is a straight line."""

BRIEF_ROWS = (1, 4, 8, 16)
"""Numbers of rows that are measured while a model is loaded, after the first of `CONTEXTS`."""

LONGEST_BRIEF = 0.25
"""Seconds of a pass of one row, above which nothing is measured while a model is loaded: it would take 6 to 8
times as long."""

MEASURING_TIME = 3.0
"""Seconds of measuring after which nothing is repeated. Passes of a large model are long, so one run measures
them well."""

WARMING = 0.5
"""Seconds after which the first pass counts as warm. That of Qwen 1.5B takes 57 ms after loading, and 39
soon afterwards. If the slow one counts, 8 rows seem to cost as much as one."""

SHORT, SETTLING, COUNTED = 0.02, 4, 3
"""Seconds below which a pass is run several times in a row, as steps are; the first runs then, which do not
count; and the runs that count. Caches and threads need some passes of one size: with SmolLM2, one row takes
4.5 ms right after 128 rows, 3.6 ms then, and 3.2 ms from the fourth pass on."""

Measuring = Generator[None, None, PassTimes]
"""A measurement that goes on at each `next`, with one number of rows in one context."""


def measure_passes(model: Transformer, context: int, repeats: int = 2) -> PassTimes:
    """Measure passes now. The sizes are run in turns; a size's median counts. See `measuring`."""
    return finished(measuring(model, context, repeats))


def measure_briefly(model: Transformer, context: int) -> PassTimes | None:
    """Measure `BRIEF_ROWS` in as long as some tens of passes. None: one pass takes long already."""
    contexts, rows = _sizes(context, BRIEF_ROWS, CONTEXTS[:1])
    cache = filled_cache(model, contexts[-1], rows[-1])
    first = VerifyPass(model, cache, 1, contexts[-1])
    first()  # it sets up memory and kernels, which is not part of a pass's time
    if _seconds_of(first, model.device) > LONGEST_BRIEF:
        return None
    return finished(_turns(model, cache, rows, contexts, 1))


def measuring(model: Transformer, context: int, repeats: int = 1) -> Measuring:
    """A measurement of all sizes, piece by piece.

    Args:
        model: the model, on the device where it will run.
        context: the longest context that a request may have. Longer passes are not measured.
        repeats: number of turns.
    """
    contexts, rows = all_sizes(context)
    cache = filled_cache(model, contexts[-1], rows[-1])
    _warm(VerifyPass(model, cache, 1, contexts[0]))
    yield
    return (yield from _turns(model, cache, rows, contexts, repeats))


def finished(pieces: Measuring) -> PassTimes:
    """Run all pieces of a measurement. Returns its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: PassTimes = end.value
            return result


def all_sizes(context: int) -> tuple[list[int], list[int]]:
    """The contexts and numbers of rows of `measuring`."""
    return _sizes(context, ROWS, CONTEXTS)


def _sizes(context: int, rows: Sequence[int], contexts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those contexts and numbers of rows that a request's longest context has room for."""
    contexts = [c for c in contexts if c + rows[-1] <= context] or [1]
    return contexts, [r for r in rows if r + contexts[-1] <= context] or [1]


def _turns(
    model: Transformer, cache: KVPool, rows: Sequence[int], contexts: Sequence[int], repeats: int
) -> Measuring:
    """Run all sizes in turns."""
    passes = [[VerifyPass(model, cache, r, c) for r in rows] for c in contexts]
    seconds: list[list[list[float]]] = [[[] for _ in rows] for _ in contexts]
    experts: list[float] = []
    taken = 0.0
    for turn in range(repeats):
        if taken > MEASURING_TIME:
            break
        for own, known in zip(passes, seconds, strict=True):
            for done, (run, times) in enumerate(zip(own, known, strict=True)):
                tell_progress("measuring passes", done, len(rows))
                begin = time.perf_counter()
                times += _measured(run, model.device)
                taken += time.perf_counter() - begin
                if turn == 0 and own is passes[0] and model.experts_run is not None:
                    experts.append(model.experts_run)
                yield
    return PassTimes(rows, contexts, [[median(times) for times in own] for own in seconds], experts or None)


def _warm(run: VerifyPass) -> None:
    """Run a pass several times, less often if it is long."""
    begin = time.perf_counter()
    for _ in range(2 * SETTLING):
        run()
        if time.perf_counter() - begin > WARMING:
            break


def _measured(run: VerifyPass, device: torch.device) -> list[float]:
    """Seconds of a pass: of one run, or of some of several in a row."""
    first = _seconds_of(run, device)
    if first >= SHORT:
        return [first]
    return [_seconds_of(run, device) for _ in range(SETTLING - 1 + COUNTED)][-COUNTED:]


def _seconds_of(run: VerifyPass, device: torch.device) -> float:
    """Run a pass, and return the seconds that it takes."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
