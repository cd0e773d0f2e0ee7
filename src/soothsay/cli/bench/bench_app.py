"""The list of commands below `soothsay bench`."""

from __future__ import annotations

import typer

from soothsay.cli.bench.gain_commands import Equality, Learn, Peers, Stack
from soothsay.cli.bench.load_commands import BusyMachine, ServersUnderLoad
from soothsay.cli.bench.pass_commands import Experts, Host, Quality, Step
from soothsay.cli.bench.spec_commands import Length, Report, Spec
from soothsay.cli.command_classes import add_commands

bench = typer.Typer(
    no_args_is_help=True, help="Measure speed and acceptance. What is compared takes turns within one run."
)
COMMANDS = {
    "stack": Stack,
    "step": Step,
    "host": Host,
    "experts": Experts,
    "quality": Quality,
    "peers": Peers,
    "equality": Equality,
    "spec": Spec,
    "length": Length,
    "learn": Learn,
    "serve": ServersUnderLoad,
    "busy": BusyMachine,
    "report": Report,
}
add_commands(bench, COMMANDS)
