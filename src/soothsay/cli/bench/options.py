"""Options of more than one benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from soothsay.config import DType

DTypesOption = Annotated[
    list[str] | None,
    typer.Option("--dtype", help="Of linear layers' weights; may be repeated.", show_default="bfloat16"),
]

MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        "--markdown", dir_okay=False, allow_dash=True, help="Write the table as Markdown; '-': print it."
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", dir_okay=False, help="Write a page with tables and plots, which needs no other file."
    ),
]


def write_markdown(text: str, path: Path) -> None:
    """To a file, or to stdout if it is called "-"."""
    if path == Path("-"):
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def known_dtypes(names: Sequence[str] | None) -> list[DType]:
    """The names, or the default. Raises `typer.BadParameter` (typer checks single choices only)."""
    names = names or ["bfloat16"]
    for name in names:
        if name not in get_args(DType):
            raise typer.BadParameter(f"--dtype {name}: choose of {', '.join(get_args(DType))}")
    return [cast(DType, name) for name in names]
