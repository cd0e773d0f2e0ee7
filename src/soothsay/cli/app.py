"""The list of all commands, and the entry point of the command `soothsay`.

Commands import torch when they run, not before, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from soothsay.cli.batch_command import Batch
from soothsay.cli.bench.bench_app import bench
from soothsay.cli.chat_command import Chat
from soothsay.cli.command_classes import add_commands, write_options
from soothsay.cli.demo_command import Demo
from soothsay.cli.generate_command import Generate
from soothsay.cli.inspect_command import Inspect
from soothsay.cli.keys_command import keys
from soothsay.cli.model_commands import Grow, Models, Pull, Quantize, Stage
from soothsay.cli.serve_command import Serve
from soothsay.cli.settings_file import misspelt_variables, read_settings
from soothsay.cli.terminal import report, warn
from soothsay.cli.text_stores import datastore
from soothsay.cli.train.train_app import train
from soothsay.cli.verify_command import Verify
from soothsay.errors import SoothsayError
from soothsay.own_process import SAFE_PATH

DISK = {
    *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.EROFS, errno.ENOSPC, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG),
}
"""Errors that a user can mend: of folders, permissions and disks."""


COMPLETION = ("--install-completion", "--show-completion")
"""Options of typer, which it adds to the first command."""


class _Commands(TyperGroup):
    """Reports a `SoothsayError`, or an error of a disk, as one line, with exit code 2.

    Typer handles Ctrl-C and closed pipes.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except SoothsayError as error:
            report(error)
        except OSError as error:
            if error.errno not in DISK:
                raise
            file = error.filename or "the output"
            report(SoothsayError(f"{file} cannot be read or written ({error.strerror})"))
        raise SystemExit(2) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before a command. Those for shells have no value: they detect the shell."""
        for shown in COMPLETION:
            if args[:1] == [shown] and len(args) > 1:
                raise typer.BadParameter(f"leave {args[1]!r} out: {shown} is for the shell that runs it")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options and the commands."""
        write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


app = typer.Typer(
    name="soothsay",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SOOTHSAY"},
)
COMMANDS = {
    **{"generate": Generate, "chat": Chat, "serve": Serve, "stage": Stage, "batch": Batch, "demo": Demo},
    **{
        "models": Models,
        "pull": Pull,
        "inspect": Inspect,
        "quantize": Quantize,
        "grow": Grow,
        "verify": Verify,
    },
}
add_commands(app, COMMANDS)
for name, group in {"train": train, "datastore": datastore, "keys": keys, "bench": bench}.items():
    app.add_typer(group, name=name)


def _version(asked: bool) -> None:
    if asked:
        from soothsay import __version__

        print(f"soothsay {__version__}")
        raise typer.Exit


@app.callback()
def _soothsay(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with options: a table for each command, such as [serve]. "
            "What is given here, or in a variable such as SOOTHSAY_SERVE_PORT, goes first.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding that never changes a word."""
    assert isinstance(context.command, TyperGroup)
    for problem in misspelt_variables(os.environ, context.command, context.invoked_subcommand):
        warn(problem)
    if config:
        context.default_map = read_settings(config, context.command)


def main() -> None:
    """Run the command line.

    Exit codes: 0; 1 if answers differ (demo, verify) or lines failed (batch, chat); 2 for bad input; 130 for
    Ctrl-C and for SIGTERM, which ends work in the same way.
    """
    os.environ |= SAFE_PATH
    warnings.showwarning = warn  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in ("stdin", "stdout", "stderr"):  # those that are closed, before other files take their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print "?" for a character that the terminal does not have
            stream.reconfigure(errors="replace")
    app()
