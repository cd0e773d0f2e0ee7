"""`soothsay bench step`: the time of a forward pass by its number of rows, and a lower bound of it.

Speculation pays because t(M), the time to verify M rows, is little more than t(1). The lower bound ("floor")
is the time to read the weights once or the time of the arithmetic, whichever is longer. Of experts, those
count that the rows choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from soothsay.bench.measure import Rates, Workload, interleave
from soothsay.bench.random_models import LlamaShape, RandomCheckpoint
from soothsay.bench.tables import Column, ResultTable, records_table
from soothsay.config import DType
from soothsay.model.decoder.feed_forward import Experts
from soothsay.model.timing.pass_measuring import Layout, VerifyPass, filled_cache
from soothsay.model.timing.pass_predicting import Work, held_bytes, linear_layers
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

PRODUCT_ROWS = 256
"""Rows of the product that measures the arithmetic rate. With as many, reading the weights hardly counts."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of passes with one number of rows."""

    dtype: str
    context: int
    rows: int
    ms: float
    ratio: float  # to one row at the same dtype and context
    floor_ms: float
    bytes: int
    operations: int
    experts: float | None  # mean number that a layer runs; None: no layer has experts
    of_dense: float | None  # ratio to the dense model; None: it was not measured


@dataclass(frozen=True, slots=True)
class StepReport:
    """The measurements of one run."""

    model: str
    layout: Layout
    kernels: str  # of the operations between linear layers
    threads: int
    rounds: int
    bandwidth: float  # bytes a second, read
    rates: dict[str, float]  # operations a second, by dtype
    times: list[StepTime]


def bench_step(
    model: str | LlamaShape,
    dtypes: Sequence[DType] = ("auto",),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    contexts: Sequence[int] = (128,),
    rounds: int = 15,
    layout: Layout = "chain",
    dense: LlamaShape | None = None,
    read_bytes: int = 2**30,
    kernels: str = "auto",
) -> StepReport:
    """Measure t(M) in every dtype at every context, all in turns.

    Args:
        model: what `LLM` takes, or a shape, which gets random weights.
        dtypes: element types of linear layers; the model is loaded once for each.
        rows: numbers of rows M; 1 is always measured too.
        contexts: numbers of tokens before the rows.
        rounds: number of times that each pass is timed; times are medians. The rates of memory and arithmetic
            are the best of these rounds.
        layout: shape of the trees.
        dense: a second model, in every dtype too, that the first one is compared with.
        read_bytes: size of the buffer that measures the memory rate, much larger than the CPU's caches.
        kernels: see `chosen_kernels`.
    """
    checkpoint = RandomCheckpoint(model) if isinstance(model, LlamaShape) else open_checkpoint(model)
    rows = sorted({1, *rows})
    load = partial(load_model, kernels=kernels)
    models = {_shown(dtype, model): model for dtype in dtypes for model in [load(checkpoint, dtype)]}
    if dense is not None:
        models |= {f"{dtype}, dense": load(RandomCheckpoint(dense), dtype) for dtype in dtypes}
    contenders: dict[str, Workload] = {"read": reading(read_bytes)}
    kinds = [*product(contexts, rows)]
    for dtype, loaded in models.items():
        contenders[f"{dtype} product"] = multiplying(loaded)
        cache = filled_cache(loaded, max(contexts), max(rows))
        for context, count in kinds:
            step = VerifyPass(loaded, cache, count, context, layout)
            contenders[_name(dtype, context, count)] = _passes(step)
    rates = interleave(contenders, rounds)
    arithmetic = {dtype: max(rates.rounds[f"{dtype} product"]) for dtype in models}
    return StepReport(
        model=str(checkpoint.path),
        layout=layout,
        kernels=next(iter(models.values())).kernels.name,
        threads=torch.get_num_threads(),
        rounds=rounds,
        bandwidth=max(rates.rounds["read"]),
        rates=arithmetic,
        times=[
            _step_time(rates, loaded, contenders[_name(dtype, *kind)], dtype, *kind)
            for dtype, loaded in models.items()
            for kind in kinds
        ],
    )


def _shown(dtype: DType, model: Transformer) -> str:
    """The type by its name. "auto" also says what it is for this model: "auto (int4)"."""
    own = str(model.dtype).removeprefix("torch.") if model.bits is None else f"int{model.bits}"
    return f"auto ({own})" if dtype == "auto" else dtype


def _name(dtype: str, context: int, rows: int) -> str:
    return f"{dtype} {context} {rows}"


def _step_time(
    rates: Rates, model: Transformer, run: Workload, dtype: str, context: int, rows: int
) -> StepTime:
    """Sum up the rounds of one kind of pass. Its lower bound is at the best rates of the whole run."""
    name, dense = _name(dtype, context, rows), _name(f"{dtype}, dense", context, rows)
    run()  # so that the model knows which experts it runs
    work = least_work(model, rows, context)
    bandwidth, arithmetic = max(rates.rounds["read"]), max(rates.rounds[f"{dtype} product"])
    return StepTime(
        dtype=dtype,
        context=context,
        rows=rows,
        ms=1e3 / rates.median(name),
        ratio=rates.ratio(_name(dtype, context, 1), name),
        floor_ms=1e3 * work.floor(bandwidth, arithmetic),
        bytes=work.bytes,
        operations=work.operations,
        experts=model.experts_run,
        of_dense=rates.ratio(dense, name) if dense in rates.rounds else None,
    )


def least_work(model: Transformer, rows: int, context: int) -> Work:
    """The work of a pass, with the experts that the model has run in its last pass and no others."""
    work, layers = Work.of(model, rows, context), linear_layers(model)
    for mixture in (part for part in model.modules() if isinstance(part, Experts)):
        experts, routing = {*mixture.experts.modules()}, mixture.spec.routing
        own = [(held_bytes(layer), shape.numel()) for layer, shape in layers if layer in experts]
        size, weights = (sum(column) // routing.count for column in zip(*own, strict=True))  # of one expert
        work = Work(
            bytes=work.bytes - size * (routing.count - int(mixture.ran)),
            operations=work.operations - 2 * rows * weights * (routing.count - routing.chosen),
        )
    return work


def _passes(step: VerifyPass) -> Workload:
    def run() -> int:
        step()
        return 1

    return run


def reading(size: int) -> Workload:
    """Return a workload that reads `size` bytes of float32 on all threads."""
    data = torch.ones(size // 4)

    def run() -> int:
        data.sum()
        return data.nbytes

    return run


def multiplying(model: Transformer) -> Workload:
    """Return a workload that multiplies many rows by the largest linear layer of the first block."""
    block = model.get_submodule("blocks.0")
    layer, shape = max(
        (pair for pair in linear_layers(model) if pair[0] in set(block.modules())),
        key=lambda pair: pair[1].numel(),
    )
    x = torch.randn(PRODUCT_ROWS, shape[1]).to(model.dtype)

    @torch.inference_mode()
    def run() -> int:
        layer(x)
        return 2 * PRODUCT_ROWS * shape.numel()

    return run


def step_table(report: StepReport) -> ResultTable:
    """A row for each kind of pass. Columns of experts are there if the model has some."""
    experts: dict[str, Column] = {
        "of dense": lambda time: "" if time.of_dense is None else f"{time.of_dense:.2f}x",
        "experts": lambda time: "" if time.experts is None else f"{time.experts:.1f}",
    }
    rates = ", ".join(f"{rate / 1e9:.0f} Gop/s in {dtype}" for dtype, rate in report.rates.items())
    return records_table(
        report.times,
        {"dtype": "{.dtype}", "context": "{.context:,}"},
        {
            "rows": "{.rows}",
            "ms": "{.ms:.2f}",
            "of one row": "{.ratio:.2f}x",
            "floor, ms": "{.floor_ms:.2f}",
            "of the floor": lambda time: f"{time.ms / time.floor_ms:.2f}x",
            "GB read": lambda time: f"{time.bytes / 1e9:.3f}",
            **(experts if any(time.experts is not None for time in report.times) else {}),
        },
        title=f"{Path(report.model).name}, {report.layout}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read, {rates}",
    )
