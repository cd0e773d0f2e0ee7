"""The command line: `soothsay generate | chat | serve | demo | inspect | quantize | verify | grow | train |
datastore | keys | bench`.

One file a command. Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from soothsay.cli import (
    bench,
    chat,
    datastore,
    demo,
    generate,
    grow,
    inspect,
    keys,
    quantize,
    serve,
    train,
    verify,
)
from soothsay.cli.terminal import report
from soothsay.errors import SoothsayError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Prints what soothsay raises on purpose as one line. Ctrl-C (130) and closed pipes are typer's care."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SoothsayError as error:
            report(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="soothsay",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    demo.demo,
    inspect.inspect,
    quantize.quantize,
    grow.grow,
    verify.verify,
):
    app.command()(command)
app.add_typer(train.train, name="train")
app.add_typer(datastore.datastore, name="datastore")
app.add_typer(keys.keys, name="keys")
app.add_typer(bench.bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        from soothsay import __version__

        print(f"soothsay {__version__}")
        raise typer.Exit


@app.callback()
def _soothsay(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Speculative decoding that never changes a word."""


def main() -> None:
    """Run the command line. Exit codes: 0, 1 (demo, verify: answers differ), 2 (bad input), 130 (Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal has not must not end it all
            stream.reconfigure(errors="replace")
    app()
