"""The list of commands below `soothsay bench`."""

from __future__ import annotations

import typer

from soothsay.cli.bench.agentic import agentic
from soothsay.cli.bench.busy import busy
from soothsay.cli.bench.decode import decode
from soothsay.cli.bench.experts import experts
from soothsay.cli.bench.learn import learn
from soothsay.cli.bench.peers import peers
from soothsay.cli.bench.quality import quality
from soothsay.cli.bench.report import report
from soothsay.cli.bench.serve import serve
from soothsay.cli.bench.spec import spec
from soothsay.cli.bench.stack import stack
from soothsay.cli.bench.step import step

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and acceptance. What is compared takes turns within one run.",
)
COMMANDS = decode, stack, step, experts, quality, peers, spec, agentic, learn, serve, busy, report
for command in COMMANDS:
    bench.command()(command)
