"""`soothsay bench busy`: servers on a machine that does other things."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.console import Console

from soothsay.cli.bench.bench_options import BenchOptions, save_numbers
from soothsay.cli.bench.load_options import parse_target
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import records_table
from soothsay.options import REQUIRED, argument, option, shared

SILENCE = 600.0
"""Seconds without a byte after which a request fails."""


@dataclass(frozen=True, kw_only=True)
class Busy:
    """Measure how fast servers decode while other processes keep the cores of this machine busy.

    Each server answers one request at a time, alone and beside processes that compute all the time. The first
    process is pinned to a core. Share is the part that is left of the speed without them. The longest wait
    between two pieces of text is given in medians of these waits.
    """

    server: list[str] = argument(
        REQUIRED,
        "Servers on this machine, such as http://127.0.0.1:8000. Fields may follow as in "
        "'bench serve', such as ,speculation=false.",
        metavar="[NAME=]URL...",
    )
    loops: list[int] | None = option(
        None, "Number of busy processes; may be repeated.", min=1, show_default="1 and 2"
    )
    rounds: int = option(3, "Number of rounds; figures are medians.", min=1)
    max_tokens: int = shared(BenchOptions, "max_tokens")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Ask the servers, and print a table."""
        targets = [parse_target(text, SILENCE, ignore_eos=True) for text in self.server]
        if len({target.name for target in targets}) < len(targets):
            raise typer.BadParameter("give servers names of their own, as in NAME=http://127.0.0.1:8000")
        with progress_bar("asking", "answers") as progress:
            from soothsay.bench.busy import bench_busy

            asked = {"rounds": self.rounds, "tokens": self.max_tokens}
            found = asyncio.run(bench_busy(targets, self.loops or [1, 2], **asked, progress=progress))
        numbers = {"tokens/s": "{.rate:.1f}", "share": "{.share:.2f}", "longest wait": "{.longest:.1f}"}
        table = records_table(found, {"busy processes": "{.loops}", "server": "{.server}"}, numbers)
        Console(highlight=False).print(table)
        save_numbers(self.to_json, [asdict(one) for one in found])
