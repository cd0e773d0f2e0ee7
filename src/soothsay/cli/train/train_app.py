"""The list of commands below `soothsay train`."""

from __future__ import annotations

import typer

from soothsay.cli.train.commands import COMMANDS
from soothsay.cli.train.data import data
from soothsay.cli.train.layer_skip import layer_skip
from soothsay.cli.train.suffix import suffix

train = typer.Typer(
    no_args_is_help=True,
    help="Train drafters for a model, train a model, or make the data to train them on.",
)
train.command()(data)
for command in COMMANDS:
    train.command(name=command.__name__)(command)
train.command()(layer_skip)
train.command()(suffix)
