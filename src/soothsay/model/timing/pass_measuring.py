"""A pass that verifies a draft tree, for measurements of what passes cost."""

from __future__ import annotations

import hashlib
import os
import platform
import time
import warnings
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from soothsay import __version__
from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.core.cache import KVPool
from soothsay.core.tree import DraftTree
from soothsay.machine import cache_directory, processor_name, processor_seconds_of_others
from soothsay.model.timing.pass_times import (
    KEPT_MEASUREMENTS,
    PassTimes,
    read_measurements,
    write_measurements,
)
from soothsay.model.transformer import Transformer
from soothsay.processors import granted_processors

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


ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows at which T is measured. Between and beyond them it is a straight line."""

CONTEXTS = (64, 1024)
"""Numbers of context tokens at which T is measured. Between and beyond them it is a straight line."""

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

REMEASURE_BELOW = 1.0
"""Seconds of all passes together below which the first few starts of the engine measure them again."""

DISTURBANCE = 0.25
"""Processors that other processes may use while passes are measured, beyond those that this process leaves
free. If they use more, the measurement is not kept: while other servers started, 8 rows of a model of 1.5B
parameters seemed to cost as much as 1.1 rows, and cost as much as 2."""

TRIES = 3
"""Measurements at one start, at most, until one is not disturbed. None begins after `MEASURING_TIME`."""

CLOCK_ERROR = 0.05
"""Seconds by which the system's account of processor time may be wrong."""


def known_or_measured(model: Transformer, context: int) -> PassTimes:
    """The times for this model, dtype, machine and number of threads, from disk or measured now.

    Short passes are measured at the first few starts. The result then has the proportions of the median
    of these starts, and the total of the newest one. A measurement that other processes disturbed is not
    kept. If there is no other one, passes are measured again, and if that is disturbed too, the fastest
    measurement serves this time.

    If the file is damaged, or cannot be read or written, there is a warning, and passes are measured.

    Args:
        model: the model, on the device where it will run.
        context: the longest context that a request may have.
    """
    directory = cache_directory()
    if directory is None:
        _warn("there is no home directory to keep them in")
        return measure_passes(model, context)
    file, problem = directory / "step-times" / f"{_identity(model, context)}.json", None
    known: list[PassTimes] = []
    try:
        known = read_measurements(file)
    except (OSError, ValueError, RecursionError) as error:
        problem = error
    if known and (len(known) == KEPT_MEASUREMENTS or known[-1].total >= REMEASURE_BELOW):
        return PassTimes.agreed(known)
    new, is_quiet = _measured_now(model, context, *((1, 1) if known else (2, TRIES)))
    same_points = [old for old in known if (old.rows, old.contexts) == (new.rows, new.contexts)]
    if not is_quiet:
        return PassTimes.agreed(same_points or [new])
    known = [*same_points, new]
    try:
        write_measurements(file, known)
    except OSError as error:
        problem = error
    if problem is not None:
        _warn(f"{file}: {problem}")
    return PassTimes.agreed(known)


def measure_passes(model: Transformer, context: int, repeats: int = 2) -> PassTimes:
    """Measure passes. The sizes are run in turns; a size's median counts.

    Args:
        model: the model, on the device where it will run.
        context: the longest context that a request may have. Longer passes are not measured.
        repeats: number of turns.
    """
    contexts = [c for c in CONTEXTS if c + ROWS[-1] <= context] or [1]
    rows = [r for r in ROWS if r + contexts[-1] <= context] or [1]
    cache = filled_cache(model, contexts[-1], rows[-1])
    passes = [[VerifyPass(model, cache, r, c) for r in rows] for c in contexts]
    seconds: list[list[list[float]]] = [[[] for _ in rows] for _ in contexts]
    experts: list[float] = []
    _warm(passes[0][0])  # it sets up memory and kernels, which is not part of a pass's time
    for run in passes[0]:
        if model.experts_run is None:
            break
        run()
        experts.append(model.experts_run)
    begin = time.perf_counter()
    for _ in range(repeats):
        for own, known in zip(passes, seconds, strict=True):
            for run, times in zip(own, known, strict=True):
                times += _measured(run, model.device)
        if time.perf_counter() - begin > MEASURING_TIME:
            break
    return PassTimes(rows, contexts, [[median(times) for times in own] for own in seconds], experts or None)


def _measured_now(model: Transformer, context: int, repeats: int, tries: int) -> tuple[PassTimes, bool]:
    """A measurement that nothing disturbed, and True; or the fastest of several others, and False."""
    start = time.perf_counter()
    disturbed: list[PassTimes] = []
    while True:
        begin, others = time.perf_counter(), processor_seconds_of_others()
        new = measure_passes(model, context, repeats)
        if not _was_disturbed(others, time.perf_counter() - begin):
            return new, True
        disturbed.append(new)
        if len(disturbed) == tries or time.perf_counter() - start > MEASURING_TIME:
            return min(disturbed, key=lambda times: times.total), False


def _was_disturbed(others: float | None, seconds: float) -> bool:
    """Whether other processes used much of the processors in the last `seconds`.

    `others` is what `processor_seconds_of_others` said before.
    """
    now = processor_seconds_of_others()
    if others is None or now is None:
        return False
    free = (os.cpu_count() or 1) - granted_processors()
    return now - others > (free + DISTURBANCE) * seconds + CLOCK_ERROR


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


def _identity(model: Transformer, context: int) -> str:
    """A file name that is a digest of everything that T depends on."""
    kinds = sorted({f"{type(module).__name__} {_kind(module)}" for module in model.modules()})
    facts = [
        model.spec,
        model.dtype,
        model.kv_dtype,
        model.device,
        kinds,
        model.kernels.name,
        min(context, CONTEXTS[-1] + ROWS[-1]),
        platform.node(),
        processor_name(),
        granted_processors(),
        torch.get_num_threads(),
        __version__,
        torch.__version__,
    ]
    return hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=12).hexdigest()


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "name", ""))


def _warn(reason: str) -> None:
    warnings.warn(f"the times of passes are measured anew ({reason})", stacklevel=3)
