"""Groups of options become options of the commands that take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from soothsay.cli.option_groups import grouped


@dataclass(frozen=True)
class Size:
    """Two options."""

    width: Annotated[int, typer.Option(min=1, help="How wide.")] = 2
    height: int = 3


@grouped
def draw(name: str, *, size: Size, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Draw something."""
    print(name, size, loud)


app = typer.Typer()
app.command()(draw)


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("box", "box Size(width=2, height=3) False"),
        ("box --height 5 --loud --width 4", "box Size(width=4, height=5) True"),
    ],
)
def test_a_command_gets_its_group(given: str, printed: str) -> None:
    assert CliRunner().invoke(app, given.split()).output.strip() == printed


def test_options_of_a_group_stand_where_the_group_stands() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert shown.index("--width") < shown.index("--height") < shown.index("--loud")
    assert "How wide." in shown


def test_bounds_hold_within_groups() -> None:
    assert CliRunner().invoke(app, ["box", "--width", "0"]).exit_code == 2


def test_an_option_has_one_place() -> None:
    def twice(size: Size, *, width: int = 1) -> None:
        """Width is declared here too."""

    with pytest.raises(ValueError, match="width"):
        grouped(twice)
