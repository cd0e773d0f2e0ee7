"""What one pass of the target costs by its number of rows: t(rows, context), measured where it runs.

Speculation lives on sixteen rows costing little more than one; how much more is a matter of model, number
format and machine, so it is measured, once, and remembered on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from soothsay.config import EngineConfig
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import KVPool
from soothsay.engine.tree import DraftTree
from soothsay.machine import cache_directory, processor_name
from soothsay.model.transformer import Transformer

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

Layout = Literal["chain", "binary"]
"""How drafted tokens hang together: one below the other, or two below each."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Where the curve is measured; in between it is a straight line, and so it goes on behind."""

CONTEXTS = (64, 1024)
"""Tokens before the tree where the curve is measured, likewise."""

PATIENCE = 3.0
"""Seconds after which no pass is repeated: a large model's are long enough to be told from noise at once."""

PACE = 0.15
"""Weight of a pass that was run, for passes of all sizes: machines are faster at one time than at another."""

BEND = 0.04
"""Its further weight for passes of about as many rows. It is smaller, or else sizes that were not run of late
would be compared with others by the speed that the machine had then."""

BRIEF = 1.0
"""Seconds of all passes together that a start may take to time them again."""

REMEMBERED = 5
"""Starts whose times are kept: what is in the middle is neither a busy moment's nor a lucky one's."""


class Step:
    """One pass that verifies a tree of `rows` nodes behind a context: packing, all blocks, the head for all.

    It is what the engine does in a step, less drafting, sampling and moving what was accepted. It can be run
    again and again: the tree's keys and values overwrite themselves.

    Args:
        model: any.
        cache: a pool of its own that holds `context + rows` slots; see `filled_cache`.
        rows: nodes of the tree, the root among them.
        context: tokens before the root.
        layout: of the tree.
    """

    def __init__(self, model: Transformer, cache: KVPool, rows: int, context: int, layout: Layout = "chain"):
        self.model, self.cache = model, cache
        tree = DraftTree(0)
        for node in range(1, rows):
            parent = node - 1 if layout == "chain" else (node - 1) // 2
            tree.add(parent, node % model.config.vocab_size)
        self.rows = Rows(
            tokens=np.array(tree.tokens[:1], dtype=np.int64),
            start=context,
            table=np.arange(cache.num_slots // cache.block_size),
            tree=tree,
        )

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """`[rows, V]` logits."""
        config = self.model.config
        batch = Batch.pack(
            [self.rows],
            block_size=self.cache.block_size,
            group=config.group,
            windows=config.windows,
            device=self.model.device,
        )
        hidden, _ = self.model(batch, self.cache)
        return self.model.logits(hidden.index_select(0, batch.logit_rows))


def filled_cache(model: Transformer, tokens: int) -> KVPool:
    """A pool for so many tokens, filled: an untouched one is a single page of zeros that costs nothing to
    read."""
    size = EngineConfig.block_size
    cache = model.new_cache(-(-tokens // size), size)
    cache.data.normal_()
    return cache


class StepTimes:
    """t(rows, context) of a model, in seconds; it follows what passes take as they are run.

    Args:
        rows: where it is known, rising.
        contexts: likewise; one or more.
        seconds: `[context][row]`.
    """

    def __init__(self, rows: Sequence[int], contexts: Sequence[int], seconds: Sequence[Sequence[float]]):
        self.rows, self.contexts = list(rows), list(contexts)
        self.seconds = [_rising(times) for times in seconds]
        self._rows, self._known = np.array(self.rows), np.array(self.seconds)
        self._scales: FloatArray | None = None  # [rows] of passes as they run, to what was measured

    def __call__(self, rows: int, context: float = 0.0) -> float:
        """Seconds of a pass of so many rows, each with so many tokens before it on average."""
        return float(self.span(rows, 0, context)[0])

    def span(self, rows: int, more: int, context: float) -> FloatArray:
        """Seconds of passes of `rows`, `rows + 1`, ..., `rows + more` rows."""
        asked = np.arange(rows, rows + more + 1)
        seconds, longest = self._known[0], self._known[-1]
        if len(self.contexts) > 1:
            share = (context - self.contexts[0]) / (self.contexts[-1] - self.contexts[0])
            seconds = seconds + (longest - seconds) * share
        if self._scales is not None:
            seconds = seconds * self._scales
        return np.maximum(_line(self._rows, seconds, asked), 1e-9)

    def follow(self, rows: int, context: float, seconds: float) -> None:
        """Learn from a pass that was run, with all that goes with it: sampling, moving what was accepted.

        A moment that the machine has stolen counts for no more than a doubling.
        """
        ratio = seconds / self(rows, context)
        if self._scales is None:
            self._scales = np.full(len(self.rows), ratio)
            return
        places = np.arange(len(self.rows))
        away = np.abs(places - np.interp(rows, self.rows, places))
        weights = PACE + BEND * np.clip(1 - away, 0, 1)
        self._scales *= 1 + weights * (min(max(ratio, 0.5), 2.0) - 1)

    @classmethod
    def of(cls, model: Transformer, context: int) -> StepTimes:
        """Those known for this model, dtype, machine and number of threads; measured, if there are none.

        Where passes are short, each start times them again. What counts is how they compare with each other,
        in the middle of the last few starts, and how long they take now.

        Args:
            model: on the device where it will run.
            context: the longest that there will be.
        """
        file = cache_directory() / "step-times" / f"{_identity(model, context)}.json"
        known = _read(file)
        if known and sum(map(sum, known[-1].seconds)) >= BRIEF:
            return cls.agreed(known)
        new = cls.measure(model, context, repeats=2 if known else 4)
        alike = [times for times in known if (times.rows, times.contexts) == (new.rows, new.contexts)]
        known = [*alike, new][-REMEMBERED:]
        _write(file, known)
        return cls.agreed(known)

    @classmethod
    def agreed(cls, several: Sequence[StepTimes]) -> StepTimes:
        """What several measurements of the same passes, the newest last, say together."""
        seconds = np.stack([times._known for times in several])  # [measurement, context, rows]
        wholes = seconds.sum((1, 2), keepdims=True)
        middle = np.median(seconds / wholes, axis=0) * wholes[-1]
        return cls(several[-1].rows, several[-1].contexts, middle.tolist())

    @classmethod
    def measure(cls, model: Transformer, context: int, repeats: int = 4) -> StepTimes:
        """Time passes: the fastest of a few for each number of rows, taken in turn."""
        contexts = [c for c in CONTEXTS if c + ROWS[-1] <= context] or [1]
        rows = [r for r in ROWS if r + contexts[-1] <= context] or [1]
        cache = filled_cache(model, contexts[-1] + rows[-1])
        steps = [[Step(model, cache, r, c) for r in rows] for c in contexts]
        best = [[float("inf")] * len(rows) for _ in contexts]
        steps[0][0]()  # what is made at the first pass is not part of any
        begin = time.perf_counter()
        for _ in range(repeats):
            for i, own in enumerate(steps):
                for j, step in enumerate(own):
                    start = time.perf_counter()
                    step()
                    _wait(model.device)
                    best[i][j] = min(best[i][j], time.perf_counter() - start)
            if time.perf_counter() - begin > PATIENCE:
                break
        return cls(rows, contexts, best)


def _rising(times: Sequence[float]) -> list[float]:
    """More rows never cost less: where they seem to, it is noise."""
    rising: list[float] = []
    for seconds in times:
        rising.append(max(seconds, rising[-1]) if rising else seconds)
    return rising


def _line(xs: IntArray, ys: FloatArray, x: IntArray) -> FloatArray:
    """Straight lines between what is known; behind the last two points, they go on. `x` rises."""
    if len(xs) == 1:
        line: FloatArray = ys[0] * np.maximum(x, xs[0]) / xs[0]
        return line
    line = np.interp(x, xs, ys)
    if x[-1] > xs[-1]:
        line += (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]) * np.maximum(x - xs[-1], 0)
    return line


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _identity(model: Transformer, context: int) -> str:
    """What t depends on, as a name for a file."""
    kinds = sorted({f"{type(module).__name__} {_kind(module)}" for module in model.modules()})
    facts = [
        model.config,
        model.dtype,
        model.device,
        kinds,
        model.kernels.name,
        min(context, CONTEXTS[-1] + ROWS[-1]),
        platform.node(),
        processor_name(),
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
    ]
    return hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=12).hexdigest()


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "name", ""))


def _read(file: Path) -> list[StepTimes]:
    """What was measured before, the newest last; nothing if it cannot be read."""
    try:
        raw = json.loads(file.read_text())
        measured = [StepTimes(raw["rows"], raw["contexts"], seconds) for seconds in raw["measured"]]
        whole = all(times._known.shape == (len(times.contexts), len(times.rows)) for times in measured)
        return measured if whole else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write(file: Path, measured: Sequence[StepTimes]) -> None:
    """Keep it for the next time, where that is possible."""
    rows, contexts = measured[-1].rows, measured[-1].contexts
    content = {"rows": rows, "contexts": contexts, "measured": [times.seconds for times in measured]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(content))
        unfinished.replace(file)
    except OSError:
        pass
