"""`soothsay bench experts`: measures a mixture of experts beside dense layers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import (
    JsonOption,
    PassesOption,
    RowsOption,
    dtypes_option,
    known_dtypes,
    row_counts,
)
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.files import write_json

if TYPE_CHECKING:
    from soothsay.bench.experts import ExpertsReport

SHAPE = "layers=8,hidden=1024,heads=16,kv_heads=4,ffn=768,vocab=8192,experts=32,chosen=4"


def experts(
    shape: Annotated[str, typer.Option(help="Its ffn is that of one expert; see 'bench step'.")] = SHAPE,
    dtype: Annotated[list[str] | None, dtypes_option("int8, bfloat16")] = None,
    rows: RowsOption = "1,4,8,16",
    rounds: PassesOption = 25,
    to_json: JsonOption = None,
) -> None:
    """Measure the cost of a mixture of experts beside a dense model with the weights of one row's experts.

    The floor is the time to read the experts that the rows choose, and the other weights of the blocks.

    Weights are random. Passes run all blocks, without the output head.
    """
    counts, dtypes = row_counts(rows), known_dtypes(dtype or ["int8", "bfloat16"])
    with notice("measuring ..."):
        from soothsay.bench.experts import bench_experts
        from soothsay.bench.shapes import LlamaShape

        sizes = LlamaShape.parse(shape)
        if not sizes.experts:
            raise typer.BadParameter(f"--shape {shape}: it has no experts; write {SHAPE}")
        report = bench_experts(sizes, dtypes=dtypes, rows=counts, rounds=rounds)
    Console(highlight=False).print(_table(report))
    if to_json is not None:
        write_json(to_json, asdict(report), indent=1)


def _table(report: ExpertsReport) -> Table:
    s = report.shape
    table = numbers_table(
        ("dtype",),
        ("rows", "ms", "dense, ms", "of dense", "experts", "GB", "of reading"),
        title=f"{s.chosen} of {s.experts} experts of {s.ffn}, in {s.layers} layers of {s.hidden}; "
        f"{report.kernels}, {report.threads} threads",
        caption=f"median of {report.rounds} rounds; {report.bandwidth / 1e9:.1f} GB/s read",
    )
    for time in report.times:
        table.add_row(
            time.dtype,
            str(time.rows),
            f"{time.ms:.2f}",
            f"{time.dense_ms:.2f}",
            f"{time.ratio:.2f}x",
            f"{time.touched:.1f}",
            f"{time.bytes / 1e9:.3f}",
            f"{time.of_reading:.2f}x",
        )
    return table
