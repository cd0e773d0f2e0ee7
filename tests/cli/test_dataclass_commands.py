"""Dataclasses become commands: their fields, and those of their groups, are options."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from soothsay.cli.command_classes import add_commands, as_function
from soothsay.options import argument, flag, option, required, shared


@dataclass(frozen=True)
class Size:
    """Two options."""

    PANEL = "Sizes"

    width: int = option(2, min=1)
    """How wide.

    The help does not say this."""

    height: int = option(3)
    """How high."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw something."""

    name: str = argument(help="What to draw.")
    size: Size
    loud: bool = flag("-l", help="Say it.")
    frame: bool = option(True, "--frame/--no-frame")
    """Draw a frame."""

    copies: int = required("--times", help="How many.")

    def run(self) -> None:
        """Draw."""
        print(self.name, self.size, self.loud, self.frame, self.copies)


app = typer.Typer()
add_commands(app, {"draw": Draw})


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("box --times 1", "box Size(width=2, height=3) False True 1"),
        ("box --height 5 --loud --width 4 --times 2", "box Size(width=4, height=5) True True 2"),
        ("box -l --no-frame --times 2", "box Size(width=2, height=3) True False 2"),
    ],
)
def test_a_command_gets_its_options_and_groups(given: str, printed: str) -> None:
    assert CliRunner().invoke(app, given.split()).output.strip() == printed


def test_options_of_a_group_stand_where_the_group_stands() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert "Draw something." in shown
    assert shown.index("--loud") < shown.index("Sizes") < shown.index("--width") < shown.index("--height")
    for told in ("What to draw.", "How wide.", "How high.", "Say it.", "Draw a frame.", "How many."):
        assert told in shown
    assert "does not say this" not in shown
    assert "--no-loud" not in shown


@pytest.mark.parametrize("given", ["box --times 1 --width 0", "box", "--times 1", "box --times 1 --copies 1"])
def test_bounds_hold_and_required_options_are_required(given: str) -> None:
    assert CliRunner().invoke(app, given.split()).exit_code == 2


def test_a_mistyped_option_gets_a_suggestion() -> None:
    assert "--height" in CliRunner().invoke(app, ["box", "--times", "1", "--heigth", "2"]).output


def test_an_option_has_one_place() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice(Draw):
        """Width is declared here too."""

        width: int = option(1)

    with pytest.raises(ValueError, match="width"):
        as_function(Twice)


def test_an_option_is_shared_with_another_default() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Line:
        """Draw a line."""

        width: int = shared(Size, "width", default=7)
        height: int = shared(Size, "height")
        """How long."""

        def run(self) -> None:
            """Print the width."""
            print(self.width)

    lines = typer.Typer()
    add_commands(lines, {"line": Line})
    assert CliRunner().invoke(lines, []).output == "7\n"
    assert CliRunner().invoke(lines, ["--width", "0"]).exit_code == 2
    shown = CliRunner().invoke(lines, ["--help"]).output
    assert "How wide." in shown
    assert "How long." in shown
    assert "How high." not in shown
    assert "Sizes" in shown


def test_the_dataclasses_are_plain_values() -> None:
    assert Size() == Size(2, 3)
    with pytest.raises(TypeError, match="copies"):
        Draw(name="box", size=Size())
