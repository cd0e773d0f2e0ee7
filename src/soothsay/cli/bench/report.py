"""`soothsay bench report`: results of `bench spec` as tables and as a page, several of them in one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soothsay.cli.bench.options import HtmlOption, MarkdownOption
from soothsay.cli.bench.spec import finish


def report(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="What 'bench spec --json' wrote.")
    ],
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
) -> None:
    """Show results of 'bench spec' again, of several models or dtypes together. Measures nothing.

    Ends with 1 if any answer was not plain decoding's.
    """
    from soothsay.bench.spec.results import Results

    finish([Results.read(file) for file in files], markdown, html)
