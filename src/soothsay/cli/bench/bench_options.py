"""What benchmarks are asked: options that several share, and how results are saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.text import Text

from soothsay.bench.tables import ResultTable
from soothsay.cli.terminal import say
from soothsay.config import DType
from soothsay.files import write_json, write_text
from soothsay.plotting import save_png


def show(*parts: ResultTable | Text | str, markdown: Path | None = None) -> None:
    """Print tables and notes.

    Args:
        parts: tables, texts, and notes as plain strings, which are dim.
        markdown: gets the tables as Markdown. "-": they are printed so, in place of all else.
    """
    if markdown is not None:
        tables = (part.markdown() for part in parts if isinstance(part, ResultTable))
        write_markdown("\n\n".join(tables), markdown)
    if markdown != Path("-"):
        for part in parts:
            say(Text(part, "dim") if isinstance(part, str) else part)


def save_chart(path: Path | None, chart: Callable[[], Any], dpi: int = 150) -> None:
    """Draw a chart to a file, if there is one."""
    if path is not None:
        save_png(chart(), path, dpi=dpi)


def save_numbers(path: Path | None, numbers: Any) -> None:
    """Write numbers to a file, if there is one."""
    if path is not None:
        write_json(path, numbers, indent=1)


def write_markdown(text: str, path: Path) -> None:
    """Write text to a file, or print it if the path is "-"."""
    if path == Path("-"):
        print(text)
    else:
        write_text(path, text + "\n")


def known_dtypes(names: Sequence[str] | None, default: Sequence[DType]) -> list[DType]:
    """Check the names, or return the default. Raises `typer.BadParameter`; typer itself checks no lists."""
    check_dtypes(names or (), get_args(DType))
    return [cast(DType, name) for name in names or default]


def check_dtypes(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `typer.BadParameter` if a name is not known."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--dtype {name}: choose from {', '.join(known)}")


def row_counts(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]."""
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"--rows {text}: numbers with commas between them are needed, as in 1,2,4")
    return [int(part) for part in text.split(",")]
