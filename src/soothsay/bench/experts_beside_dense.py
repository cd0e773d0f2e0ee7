"""`soothsay bench experts`: what a mixture of experts costs beside dense layers, and beside reading it.

Two models with random weights take turns: one with experts, and one whose dense layers have as many weights
as a row's experts. A pass of more rows chooses more experts. It takes at least as long as reading these
experts and all other weights of the blocks once. Passes run all blocks, without the output head.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from soothsay.bench.measure import Rates, Workload, interleave
from soothsay.bench.random_models import LlamaShape, RandomCheckpoint
from soothsay.bench.step import reading
from soothsay.bench.tables import records_table
from soothsay.config import DType
from soothsay.model.decoder.blocks import record, unrecord
from soothsay.model.decoder.feed_forward import Experts, FeedForward
from soothsay.model.timing.pass_measuring import VerifyPass, filled_cache
from soothsay.model.timing.pass_predicting import held_bytes
from soothsay.model.transformer import Transformer
from soothsay.model.weights.load import load_model


@dataclass(frozen=True, slots=True)
class ExpertsTime:
    """The times of passes with one number of rows."""

    dtype: str
    rows: int
    touched: float
    """Mean number of experts that a layer runs."""

    ms: float
    dense_ms: float
    ratio: float
    """Median over rounds of the time over that of the dense model in the same round."""

    bytes: int
    """Bytes of the experts that run, and of all other weights of the blocks."""

    of_reading: float
    """Time over the time that reading `bytes` takes at the rate of the same round; median over rounds."""


@dataclass(frozen=True, slots=True)
class ExpertsReport:
    """The measurements of one run."""

    shape: LlamaShape
    kernels: str
    threads: int
    rounds: int
    bandwidth: float  # bytes a second, read; the median
    times: list[ExpertsTime]


def bench_experts(
    shape: LlamaShape,
    *,
    dtypes: Sequence[DType] = ("int8", "bfloat16"),
    rows: Sequence[int] = (1, 4, 8, 16),
    context: int = 128,
    rounds: int = 15,
    read_bytes: int = 2**29,
) -> ExpertsReport:
    """Measure passes of a mixture of experts beside those of a dense model, all in turns.

    Args:
        shape: has experts.
        dtypes: element types of linear layers.
        rows: numbers of rows of a pass, which are a chain of tokens.
        context: tokens before the rows.
        rounds: number of times that each pass is timed.
        read_bytes: size of the buffer that measures the memory rate, much larger than the CPU's caches.
    """
    contenders: dict[str, Workload] = {"read": reading(read_bytes)}
    models = {}
    for dtype in dtypes:
        models[dtype] = load_model(RandomCheckpoint(shape), dtype)
        dense = load_model(RandomCheckpoint(shape.dense), dtype)
        for count in rows:
            contenders[f"{dtype} {count}"] = passing(models[dtype], count, context)
            contenders[f"{dtype} {count} dense"] = passing(dense, count, context)
    rates = interleave(contenders, rounds)
    return ExpertsReport(
        shape=shape,
        kernels=next(iter(models.values())).kernels.name,
        threads=torch.get_num_threads(),
        rounds=rounds,
        bandwidth=rates.median("read"),
        times=[
            _time(rates, models[dtype], dtype, count, contenders[f"{dtype} {count}"])
            for dtype, count in product(dtypes, rows)
        ],
    )


def _time(rates: Rates, model: Transformer, dtype: DType, rows: int, run: Workload) -> ExpertsTime:
    name = f"{dtype} {rows}"
    touched = touched_experts(model, run)
    size = _bytes(model, touched)
    return ExpertsTime(
        dtype=dtype,
        rows=rows,
        touched=statistics.mean(touched),
        ms=1e3 / rates.median(name),
        dense_ms=1e3 / rates.median(f"{name} dense"),
        ratio=rates.ratio(f"{name} dense", name),
        bytes=size,
        of_reading=rates.ratio("read", name) / size,
    )


def passing(model: Transformer, rows: int, context: int) -> Workload:
    """Return a workload that runs all blocks for a chain of tokens."""
    cache = filled_cache(model, context, rows)
    step = VerifyPass(model, cache, rows, context)

    @torch.inference_mode()
    def run() -> int:
        model(model.pack([step.rows], cache.block_size), cache)
        return 1

    return run


def touched_experts(model: Transformer, run: Workload) -> list[int]:
    """Return the number of experts that each layer of `model` runs in a pass of its own."""
    found: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        assert isinstance(layer, Experts)
        _, chosen = layer.kernels.route(layer.router(inputs[1]), layer.spec.routing, None)
        found.append(len(set(chosen.flatten().tolist())))

    hooks = [part.register_forward_hook(count) for part in model.modules() if isinstance(part, Experts)]
    unrecord(model)  # which calls no hooks
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
        record(model)
    return found


def _bytes(model: Transformer, touched: Sequence[int]) -> int:
    """Return the bytes of all weights of the blocks that a pass reads."""
    total = 0
    for block, count in zip(model.blocks, touched, strict=True):
        mixture = cast(Experts, block.mlp)
        expert = cast(FeedForward, mixture.experts[0])
        attention = cast(nn.Module, block.attention)
        always = cast(nn.Module, attention.qkv), cast(nn.Module, attention.o), mixture.router
        total += sum(held_bytes(layer) for layer in always)
        total += count * (held_bytes(expert.gate_up) + held_bytes(expert.down))
    return total


def experts_table(report: ExpertsReport) -> Table:
    """A row for each dtype and number of rows."""
    s = report.shape
    return records_table(
        report.times,
        {"dtype": "{.dtype}"},
        {
            "rows": "{.rows}",
            "ms": "{.ms:.2f}",
            "dense, ms": "{.dense_ms:.2f}",
            "of dense": "{.ratio:.2f}x",
            "experts": "{.touched:.1f}",
            "GB": lambda time: f"{time.bytes / 1e9:.3f}",
            "of reading": "{.of_reading:.2f}x",
        },
        title=f"{s.chosen} of {s.experts} experts of {s.ffn}, in {s.layers} layers of {s.hidden}; "
        f"{report.kernels}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read",
    )
