"""`soothsay bench decode`: compares this engine with itself and with transformers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from soothsay.cli.options import DTypeOption
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice


def decode(
    model: Annotated[str, typer.Argument(help="A model with a chat template; see 'generate'.")] = "sibyl",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each run.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of runs of each contender; ratios are medians.")
    ] = 7,
    batch: Annotated[int, typer.Option(min=2, max=32, help="Number of requests in the batch.")] = 16,
    dtype: DTypeOption = "auto",
) -> None:
    """Compare with transformers, prompt lookup with plain decoding, and a batch with one request."""
    with notice(f"measuring {model} ..."):
        from soothsay.bench.decode import bench_decode

        comparisons = bench_decode(model, dtype=dtype, tokens=tokens, rounds=rounds, batch=batch)
    table = numbers_table(
        ("greedy decoding", ""), ("tokens/s", "ratio"), caption=f"median of {rounds} rounds"
    )
    for comparison in comparisons:
        table.add_section()
        for name in comparison.rates.rounds:
            first = name == comparison.base
            table.add_row(
                comparison.title if first else "",
                name,
                f"{comparison.rates.median(name):.0f}",
                "" if first else f"{comparison.rates.ratio(name, comparison.base):.2f}x",
            )
    Console(highlight=False).print(table)
