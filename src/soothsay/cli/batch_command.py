"""`soothsay batch`: answers a file of requests, without a server."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from soothsay.cli.engine_options import EngineOptions, PlacementOptions
from soothsay.cli.progress import progress_bar
from soothsay.cli.serve_command import Serve
from soothsay.cli.terminal import notice
from soothsay.options import REQUIRED, CommonOptions, argument, option, shared

if TYPE_CHECKING:
    from soothsay.server.batch.batch_run import BatchSummary

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Answer a file of requests as the server would. The same command goes on after an interruption.

    The exit code is 1 if lines failed. Their answers say why.
    """

    model: str = shared(CommonOptions, "model")
    source: Path = argument(
        REQUIRED, "The requests: a file in the format of OpenAI's batches.", metavar="INPUT"
    )
    output: Path = argument(REQUIRED, "Gets one line for each request, in the order in which answers end.")
    name: str | None = shared(Serve, "name")
    seed: int = option(0, "Another seed gives other answers to sampled requests without a seed.")
    engine: EngineOptions
    replicas: int = option(1, "Number of engines. Another one goes on if one dies.", min=1)
    ray_address: str | None = shared(PlacementOptions, "ray_address")

    def run(self) -> None:
        """Answer the lines that have no answer yet."""
        out = Console(highlight=False, markup=False, soft_wrap=True)
        begin = time.perf_counter()
        reached: tuple[int, int] | None = None
        with ExitStack() as loading, progress_bar("answering", "lines", paced=True) as show:

            def progress(done: int, total: int, tokens: int) -> None:
                nonlocal reached
                loading.close()
                reached = done, total
                show(done, total, tokens)

            loading.enter_context(notice(f"reading {self.source}, loading {self.model} ..."))
            from soothsay.server.batch.batch_run import run_batch

            try:
                summary = run_batch(
                    *(self.model, self.source, self.output),
                    name=self.name,
                    seed=self.seed,
                    replicas=self.replicas,
                    ray_address=self.ray_address,
                    progress=progress,
                    **asdict(self.engine),
                )
            except KeyboardInterrupt:
                where = (
                    "before the first answer" if reached is None else "{:,} of {:,} lines".format(*reached)
                )
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
