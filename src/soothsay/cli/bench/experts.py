"""`soothsay bench experts`: measures a mixture of experts beside dense layers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import BenchOptions, known_dtypes, row_counts, save_numbers
from soothsay.cli.tables import records_table
from soothsay.cli.terminal import notice
from soothsay.options import option, shared

if TYPE_CHECKING:
    from soothsay.bench.experts import ExpertsReport

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
            from soothsay.bench.experts import bench_experts
            from soothsay.bench.shapes import LlamaShape

            sizes = LlamaShape.parse(self.shape)
            if not sizes.experts:
                raise typer.BadParameter(f"--shape {self.shape}: it has no experts; write {SHAPE}")
            report = bench_experts(sizes, dtypes=dtypes, rows=counts, rounds=self.rounds)
        Console(highlight=False).print(_table(report))
        save_numbers(self.to_json, asdict(report))


def _table(report: ExpertsReport) -> Table:
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
