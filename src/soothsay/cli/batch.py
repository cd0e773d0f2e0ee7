"""`soothsay batch`: answers a file of requests, without a server."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from soothsay.cli.engine_options import EngineOptions, RayAddressOption
from soothsay.cli.option_groups import grouped
from soothsay.cli.options import ModelArgument, NameOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from soothsay.server.batch.batch_run import BatchSummary

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@grouped
def batch(
    model: ModelArgument,
    source: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="The requests: a file in the format of OpenAI's batches."),
    ],
    output: Annotated[
        Path,
        typer.Argument(help="Gets one line for each request, in the order in which answers end."),
    ],
    *,
    name: NameOption = None,
    seed: Annotated[
        int,
        typer.Option("--seed", help="Another seed gives other answers to sampled requests without a seed."),
    ] = 0,
    engine: EngineOptions,
    replicas: Annotated[
        int,
        typer.Option("--replicas", min=1, help="Number of engines. Another one goes on if one dies."),
    ] = 1,
    ray_address: RayAddressOption = None,
) -> None:
    """Answer a file of requests as the server would. The same command goes on after an interruption.

    The exit code is 1 if lines failed. Their answers say why.
    """
    out = Console(highlight=False, markup=False, soft_wrap=True)
    begin = time.perf_counter()
    reached: tuple[int, int] | None = None
    with ExitStack() as loading, progress_bar("answering", "lines", paced=True) as show:

        def progress(done: int, total: int, tokens: int) -> None:
            nonlocal reached
            loading.close()
            reached = done, total
            show(done, total, tokens)

        loading.enter_context(notice(f"reading {source}, loading {model} ..."))
        from soothsay.server.batch.batch_run import run_batch

        try:
            summary = run_batch(
                *(model, source, output),
                name=name,
                seed=seed,
                replicas=replicas,
                ray_address=ray_address,
                progress=progress,
                **asdict(engine),
            )
        except KeyboardInterrupt:
            where = "before the first answer" if reached is None else "{:,} of {:,} lines".format(*reached)
            out.print(f"stopped ({where}); the same command goes on")
            raise typer.Exit(INTERRUPTED) from None
    out.print(_text(summary, time.perf_counter() - begin))
    if summary.failed:
        raise typer.Exit(1)


def _text(summary: BatchSummary, seconds: float) -> str:
    """The summary in one line."""
    earlier = f"; {summary.earlier:,} lines had their answer before" if summary.earlier else ""
    return (
        f"{summary.lines:,} lines: {summary.lines - summary.failed:,} answered, {summary.failed:,} failed; "
        f"{summary.tokens:,} tokens in {seconds:.1f} s{earlier}"
    )
