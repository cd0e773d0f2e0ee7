"""Whole passes of a model, recorded once and repeated with other rows: CUDA graphs.

A pass of a small model is hundreds of kernels, and to start them one by one takes longer than to run them. A
recorded pass has fixed sizes and fixed memory. So its rows are filled up with copies of the last one, which
writes the same keys and values to the same slot, and the plan of attention goes to a place that has room for
more. Rows do not see how many there are, so their bits are those of a pass that was not recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.cache import KVPool
from soothsay.model.gpu.gpu_plan import ROOMS, AttentionPlan, padded_rows, plan_of
from soothsay.model.ops.kernels import Outputs, PassModel

USES = 3
"""The use of a size at which it is recorded. Rarer sizes are not worth it."""

MOST = 24
"""Recorded passes of a KV pool, at most. The least recently used one makes room."""

Recorder = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
"""Records what a function does on a device: returns what repeats it, and the outputs, which it overwrites."""


class GraphRecorder:
    """Records kernels as CUDA graphs; see `Recorder`. They share the memory of what is not kept.

    A pass runs once before it is recorded: filled up with rows, it may need kernels that no pass needed yet,
    and a kernel cannot be loaded while others are recorded. Other threads may use the device meanwhile.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Record what a function does."""
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = function()
        return graph.replay, outputs


class GpuPasses:
    """Runs passes, and repeats recorded ones where it can.

    Args:
        record: how passes are recorded.
    """

    def __init__(self, record: Recorder):
        self._record = record
        self._known: WeakKeyDictionary[KVPool, _Passes] = WeakKeyDictionary()

    def __call__(
        self,
        model: PassModel,
        batch: Batch,
        cache: KVPool | None,
        layers: Sequence[int] | None,
        taps: Sequence[int],
    ) -> Outputs:
        """One pass; see `Transformer.run`. Outputs are the caller's own."""
        plan, numbers = batch.form(plan_of)
        count = len(batch.tokens)
        if cache is None or plan.folds or not plan.items or not 0 < count <= ROOMS[-1]:
            return model.compute(batch, cache, layers, taps)
        known = self._known.setdefault(cache, {})
        room = padded_rows(count), _room(len(numbers)), _room(plan.places)
        key = id(model), room, plan.tile, plan.rows, None if layers is None else tuple(layers), tuple(taps)
        found = known.pop(key, 0)
        if isinstance(found, int) and found + 1 < USES:
            known[key] = found + 1
            return model.compute(batch, cache, layers, taps)
        if isinstance(found, int):
            if len(known) >= MOST:
                known.pop(next(iter(known)))
            found = _Recorded(batch, plan, room)
            found.fill(batch, numbers)
            static = found.batch
            # each time without the forms of the time before, which would not be recorded
            found.repeat, found.outputs = self._record(
                lambda: model.compute(replace(static), cache, layers, taps)
            )
        known[key] = found  # the most recently used one is last
        found.fill(batch, numbers)
        found.repeat()
        hidden, tapped, logits = found.outputs
        own = logits.index_select(0, batch.logit_rows)
        return hidden[:count].clone(), tuple(tap[:count].clone() for tap in tapped), own


class _Recorded:
    """A recorded pass, and the memory that it reads."""

    repeat: Callable[[], None]
    outputs: Outputs

    def __init__(self, batch: Batch, plan: AttentionPlan, room: tuple[int, int, int]):
        rows, numbers, places = room
        device = batch.tokens.device
        self._ends = torch.arange(rows, device=device)
        self._rows = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._plan = torch.zeros(numbers, dtype=torch.int32, device=device)
        tokens, positions, slots = self._rows
        self._inputs = None if batch.inputs is None else batch.inputs.new_zeros(rows, batch.inputs.shape[1])
        self.batch = replace(
            batch,
            inputs=self._inputs,
            tokens=tokens,
            positions=positions,
            slots=slots,
            logit_rows=self._ends,
            paths=replace(plan, places=places, requests=()),
            requests=(),
            stacked=(self._plan,),
        )

    def fill(self, batch: Batch, numbers: Tensor) -> None:
        """Take in the rows of a pass, with copies of the last one behind them."""
        rows = self._ends.clamp(max=len(batch.tokens) - 1)
        for own, read in zip(self._rows, (batch.tokens, batch.positions, batch.slots), strict=True):
            torch.index_select(read, 0, rows, out=own)
        if self._inputs is not None and batch.inputs is not None:
            torch.index_select(batch.inputs, 0, rows, out=self._inputs)
        self._plan[: len(numbers)].copy_(numbers)


_Passes = dict[tuple[object, ...], int | _Recorded]
"""By size: recorded passes, and how often others were run."""


def _room(count: int) -> int:
    """The smallest power of two that holds `count`, and 512 at least."""
    return max(512, 1 << (count - 1).bit_length())
