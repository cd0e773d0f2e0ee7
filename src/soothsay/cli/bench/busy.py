"""`soothsay bench busy`: servers on a machine that does other things."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from soothsay.cli.bench.bench_options import JsonOption
from soothsay.cli.bench.load_options import parse_target
from soothsay.cli.options import AnswerTokensOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import numbers_table
from soothsay.files import write_json

SILENCE = 600.0
"""Seconds without a byte after which a request fails."""


def busy(
    server: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]URL...",
            help="Servers on this machine, such as http://127.0.0.1:8000. Fields may follow as in "
            "'bench serve', such as ,speculation=false.",
        ),
    ],
    loops: Annotated[
        list[int] | None,
        typer.Option(
            "--loops", min=1, help="Number of busy processes; may be repeated.", show_default="1 and 2"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; figures are medians.")] = 3,
    max_tokens: AnswerTokensOption = 128,
    to_json: JsonOption = None,
) -> None:
    """Measure how fast servers decode while other processes keep the cores of this machine busy.

    Each server answers one request at a time, alone and beside processes that compute all the time. The first
    process is pinned to a core. Share is the part that is left of the speed without them. The longest wait
    between two pieces of text is given in medians of these waits.
    """
    targets = [parse_target(text, SILENCE, ignore_eos=True) for text in server]
    if len({target.name for target in targets}) < len(targets):
        raise typer.BadParameter("give servers names of their own, as in NAME=http://127.0.0.1:8000")
    with progress_bar("asking", "answers") as progress:
        from soothsay.bench.busy import bench_busy

        found = asyncio.run(
            bench_busy(targets, loops or [1, 2], rounds=rounds, tokens=max_tokens, progress=progress)
        )
    table = numbers_table(("busy processes", "server"), ("tokens/s", "share", "longest wait"))
    for one in found:
        table.add_row(str(one.loops), one.server, f"{one.rate:.1f}", f"{one.share:.2f}", f"{one.longest:.1f}")
    Console(highlight=False).print(table)
    if to_json is not None:
        write_json(to_json, [asdict(one) for one in found], indent=1)
