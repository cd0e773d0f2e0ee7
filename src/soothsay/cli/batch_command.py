"""`soothsay batch` answers a file of requests without a server."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from soothsay.cli.serve_command import EngineOptions, PlacementOptions
from soothsay.cli.terminal import progress_bar, say
from soothsay.errors import SoothsayError
from soothsay.options import ModelChoice, argument, common, option, shared

if TYPE_CHECKING:
    from soothsay.server.batch.batch_run import BatchSummary


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Answer a file of requests as the server would. The same command goes on after an interruption.

    The exit code is 1 if lines failed. Their answers say why.
    """

    choice: ModelChoice
    source: str | None = argument(default=None, metavar="INPUT")
    """The requests: a file in the format of OpenAI's batches."""

    output: str | None = argument(default=None)
    """Gets one line for each request, in the order in which answers end."""

    name: str | None = common("served_name")
    seed: int = option(0)
    """Another seed gives other answers to sampled requests without a seed."""

    engine: EngineOptions
    replicas: int = option(1, min=1)
    """Number of engines. Another one goes on if one dies."""

    ray_address: str | None = shared(PlacementOptions, "ray_address")

    def run(self) -> None:
        """Answer the lines that have no answer yet."""
        named, given = self.choice.model, [self.choice.place, self.source, self.output]
        if given[2] is None and named is not None:  # the others are one place further left
            given = [named, *given[:2]]
        if None in given:
            raise SoothsayError("give three names: MODEL INPUT OUTPUT, or --model MODEL INPUT OUTPUT")
        model, source, output = ModelChoice(given[0], named).name, str(given[1]), str(given[2])
        self.engine.check(self.replicas, self.ray_address)
        begin = time.perf_counter()
        loading = f"reading {source}, loading {model} ..."
        with progress_bar("answering", "lines", paced=True, loading=loading, resumes=True) as progress:
            from soothsay.server.batch.batch_run import run_batch

            summary = run_batch(
                *(model, source, output),
                name=self.name,
                seed=self.seed,
                replicas=self.replicas,
                ray_address=self.ray_address,
                progress=progress,
                **asdict(self.engine),
            )
        say(_text(summary, output, time.perf_counter() - begin))
        if summary.failed:
            raise typer.Exit(1)


def _text(summary: BatchSummary, output: str, seconds: float) -> str:
    """The summary in one line."""
    first = summary.first_failed
    reasons = f" (the first is line {first}; {output} has the reasons)" if first else ""
    earlier = f"; {summary.earlier:,} lines had their answer before" if summary.earlier else ""
    return (
        f"{summary.lines:,} lines: {summary.lines - summary.failed:,} answered, {summary.failed:,} failed"
        f"{reasons}; "
        f"{summary.tokens:,} tokens in {seconds:.1f} s{earlier}"
    )
