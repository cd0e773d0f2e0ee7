"""Options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from soothsay.config import DType
from soothsay.files import write_text
from soothsay.plotting import require_matplotlib

AnswerTemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0: always the most likely token.")
]
NodesOption = Annotated[
    int, typer.Option("--nodes", min=1, help="Largest number of nodes of a draft tree, with the root.")
]
RowsOption = Annotated[str, typer.Option("--rows", help="Numbers of rows of a pass.")]
PassesOption = Annotated[
    int, typer.Option("--rounds", min=1, help="Number of passes of each kind; times are medians.")
]


def dtypes_option(shown: str) -> Any:
    """The option `--dtype` of a command that takes several. `shown` is its default in `--help`."""
    text = "Element type of linear layers' weights; may be repeated."
    return typer.Option("--dtype", help=text, show_default=shown)


DTypesOption = Annotated[list[str] | None, dtypes_option("bfloat16")]

JsonOption = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write all numbers to this file.")
]
JournalOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        help="Append each measurement to this file; an existing file is continued.",
    ),
]
PngOption = Annotated[
    Path | None,
    typer.Option("--png", dir_okay=False, help="Draw a chart to this file (needs matplotlib)."),
]
MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        dir_okay=False,
        allow_dash=True,
        help="Write the table as Markdown to this file; '-': print it.",
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        dir_okay=False,
        help="Write one self-contained page with tables and charts (needs matplotlib).",
    ),
]


def check_charts(*files: Path | None) -> None:
    """Raise an error before a long run if a chart is asked for and matplotlib is missing."""
    if any(file is not None for file in files):
        require_matplotlib()


def write_markdown(text: str, path: Path) -> None:
    """Write text to a file, or print it if the path is "-"."""
    if path == Path("-"):
        print(text)
    else:
        write_text(path, text + "\n")


def known_dtypes(names: Sequence[str] | None) -> list[DType]:
    """Check the names, or return the default. Raises `typer.BadParameter`; typer itself checks no lists."""
    names = names or ["bfloat16"]
    for name in names:
        if name not in get_args(DType):
            raise typer.BadParameter(f"--dtype {name}: choose from {', '.join(get_args(DType))}")
    return [cast(DType, name) for name in names]


def row_counts(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]."""
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"--rows {text}: numbers with commas between them are needed, as in 1,2,4")
    return [int(part) for part in text.split(",")]
