"""`soothsay bench step` and `soothsay bench experts`: what a forward pass costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import (
    BenchOptions,
    check_charts,
    known_dtypes,
    row_counts,
    save_chart,
    save_numbers,
)
from soothsay.cli.tables import records_table
from soothsay.cli.terminal import notice
from soothsay.options import argument, option, shared

if TYPE_CHECKING:
    from soothsay.bench.experts_beside_dense import ExpertsReport
    from soothsay.bench.step import StepReport


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measure a forward pass that verifies M rows, and the least time that it can take (the floor).

    A pass packs the rows and runs all blocks, and the head for every row. The floor is the longer of two
    times, at the rates measured in this run: reading all weights and the context's keys and values once, and
    the arithmetic.
    """

    model: str | None = argument(None, "A model; see 'generate'.", show_default="a shape with random weights")
    shape: str | None = option(
        None,
        "A Llama with random weights: 0.5B, 1.1B, 3B, hybrid (a Qwen3.5), or "
        "layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000, of which what is left out is as "
        "in 1.1B. With experts=32,chosen=4, ffn is that of one expert.",
        show_default="1.1B",
    )
    dtype: list[str] | None = shared(BenchOptions, "dtype", show_default="bfloat16")
    rows: str = shared(BenchOptions, "rows", default="1,2,4,8,16,32,64")
    contexts: list[int] | None = option(
        None, "Number of tokens before the rows; may be repeated.", "--context", min=1, show_default="128"
    )
    tree: Literal["chain", "binary"] = option(
        "chain", "Shape of the rows' tree: a path, or two children a node."
    )
    rounds: int = shared(BenchOptions, "rounds")
    png: Path | None = shared(BenchOptions, "png")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Measure, and print a table."""
        if self.model is not None and self.shape is not None:
            raise typer.BadParameter("give a model or --shape, not both")
        check_charts(self.png)
        counts, dtypes = row_counts(self.rows), known_dtypes(self.dtype)
        with notice("measuring ..."):
            from soothsay.bench.random_models import LlamaShape
            from soothsay.bench.step import bench_step
            from soothsay.bench.step_chart import step_chart

            report = bench_step(
                LlamaShape.parse(self.shape or "1.1B") if self.model is None else self.model,
                dtypes=dtypes,
                rows=counts,
                contexts=self.contexts or [128],
                rounds=self.rounds,
                layout=self.tree,
            )
        Console(highlight=False).print(_step_table(report))
        save_chart(self.png, lambda: step_chart(report))
        save_numbers(self.to_json, asdict(report))


def _step_table(report: StepReport) -> Table:
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
        },
        grouped=True,
        title=f"{Path(report.model).name}, {report.layout}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read, {rates}",
    )


SHAPE = "layers=8,hidden=1024,heads=16,kv_heads=4,ffn=768,vocab=8192,experts=32,chosen=4"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Measure the cost of a mixture of experts beside a dense model with the weights of one row's experts.

    The floor is the time to read the experts that the rows choose, and the other weights of the blocks.

    Weights are random. Passes run all blocks, without the output head.
    """

    shape: str = option(SHAPE, "Its ffn is that of one expert; see 'bench step'.")
    dtype: list[str] | None = shared(BenchOptions, "dtype", show_default="int8, bfloat16")
    rows: str = shared(BenchOptions, "rows", default="1,4,8,16")
    rounds: int = shared(BenchOptions, "rounds", default=25)
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Measure, and print a table."""
        counts, dtypes = row_counts(self.rows), known_dtypes(self.dtype, ("int8", "bfloat16"))
        with notice("measuring ..."):
            from soothsay.bench.experts_beside_dense import bench_experts
            from soothsay.bench.random_models import LlamaShape

            sizes = LlamaShape.parse(self.shape)
            if not sizes.experts:
                raise typer.BadParameter(f"--shape {self.shape}: it has no experts; write {SHAPE}")
            report = bench_experts(sizes, dtypes=dtypes, rows=counts, rounds=self.rounds)
        Console(highlight=False).print(_experts_table(report))
        save_numbers(self.to_json, asdict(report))


def _experts_table(report: ExpertsReport) -> Table:
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
