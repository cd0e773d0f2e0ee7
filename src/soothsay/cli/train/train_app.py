"""The list of commands below `soothsay train`."""

from __future__ import annotations

import typer

from soothsay.cli.command_classes import add_commands
from soothsay.cli.text_stores import KeepAnswers
from soothsay.cli.train.data_command import AnswerConversations
from soothsay.cli.train.layer_skip_command import FindSkippedLayers
from soothsay.cli.train.training_commands import COMMANDS

train = typer.Typer(
    no_args_is_help=True,
    help="Train drafters for a model, train a model, or make the data to train them on.",
)
add_commands(
    train, {"data": AnswerConversations, **COMMANDS, "layer-skip": FindSkippedLayers, "suffix": KeepAnswers}
)
