"""`soothsay train ...`: models and drafters."""

from __future__ import annotations

import typer

from soothsay.cli.train import commands
from soothsay.cli.train.data import data
from soothsay.cli.train.layer_skip import layer_skip

train = typer.Typer(
    help="Train drafters for a model, a model itself, or make the data to train them on.",
    no_args_is_help=True,
)
train.command()(data)
for command in commands.COMMANDS:
    train.command(name=command.__name__)(command)
train.command()(layer_skip)
