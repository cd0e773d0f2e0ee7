"""`soothsay bench report`: shows results of `bench spec` as tables and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soothsay.cli.bench.bench_options import HtmlOption, MarkdownOption, check_charts
from soothsay.cli.bench.spec import finish


def report(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="What 'bench spec --json' wrote.")
    ],
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
) -> None:
    """Show results of 'bench spec' again, several runs together. Nothing is measured.

    The exit code is 1 if an answer differed from plain decoding's.
    """
    from soothsay.bench.spec.spec_results import SpecResults

    check_charts(html)
    finish([SpecResults.read(file) for file in files], markdown, html)
