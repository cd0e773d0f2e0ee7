"""`soothsay bench decode`: compares this engine with itself and with transformers."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.config import DType
from soothsay.options import ModelOptions, argument, option, shared


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Compare with transformers, prompt lookup with plain decoding, and a batch with one request."""

    model: str = argument("sibyl", "A model with a chat template; see 'generate'.")
    tokens: int = option(128, "Tokens of each run.", min=1)
    rounds: int = option(7, "Number of runs of each contender; ratios are medians.", min=1)
    batch: int = option(16, "Number of requests in the batch.", min=2, max=32)
    dtype: DType = shared(ModelOptions, "dtype")

    def run(self) -> None:
        """Measure, and print a table."""
        with notice(f"measuring {self.model} ..."):
            from soothsay.bench.decode import bench_decode

            comparisons = bench_decode(
                self.model, dtype=self.dtype, tokens=self.tokens, rounds=self.rounds, batch=self.batch
            )
        caption = f"median of {self.rounds} rounds"
        table = numbers_table(("greedy decoding", ""), ("tokens/s", "ratio"), caption=caption)
        for comparison in comparisons:
            table.add_section()
            for name in comparison.rates.rounds:
                first = name == comparison.base
                ratio = "" if first else f"{comparison.rates.ratio(name, comparison.base):.2f}x"
                rate = f"{comparison.rates.median(name):.0f}"
                table.add_row(comparison.title if first else "", name, rate, ratio)
        Console(highlight=False).print(table)
