"""The list of commands below `soothsay bench`."""

from __future__ import annotations

import typer

from soothsay.cli.bench.agentic_command import Agentic
from soothsay.cli.bench.decode_command import Decode
from soothsay.cli.bench.learn_command import Learn
from soothsay.cli.bench.load_commands import BusyMachine, ServersUnderLoad
from soothsay.cli.bench.pass_commands import Experts, Step
from soothsay.cli.bench.peers_command import Peers
from soothsay.cli.bench.quality_command import Quality
from soothsay.cli.bench.spec_commands import Report, Spec
from soothsay.cli.bench.stack_command import Stack
from soothsay.cli.command_classes import add_commands

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and acceptance. What is compared takes turns within one run.",
)
COMMANDS = {
    **{
        "decode": Decode,
        "stack": Stack,
        "step": Step,
        "experts": Experts,
        "quality": Quality,
        "peers": Peers,
    },
    **{
        "spec": Spec,
        "agentic": Agentic,
        "learn": Learn,
        "serve": ServersUnderLoad,
        "busy": BusyMachine,
        "report": Report,
    },
}
add_commands(bench, COMMANDS)
