"""`soothsay bench ...`: speed, measured side by side. One file a command."""

from __future__ import annotations

import typer

from soothsay.cli.bench import agentic, decode, peers, report, serve, spec, step

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True, help="Measure speed, contenders taking turns in one run, and how good guesses are."
)
for command in (
    decode.decode,
    step.step,
    peers.peers,
    spec.spec,
    agentic.agentic,
    serve.serve,
    report.report,
):
    bench.command()(command)
