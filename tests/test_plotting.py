"""What all charts share: SVG for pages, files, and a message where matplotlib is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.errors import SoothsayError
from soothsay.plotting import inline_svg, new_figure, require_matplotlib, save_png, set_tooltip


def test_an_svg_keeps_to_itself() -> None:
    figure = new_figure(figsize=(2, 1))
    panel = figure.subplots()
    panel.plot([0, 1], [0, 1], "o-")
    (bar,) = panel.bar([0.5], [1.0])
    set_tooltip(bar, "half & <half>")
    panel.set_title("a < b")
    text = inline_svg(figure, 'what "it" shows')
    root = ElementTree.fromstring(text.replace("xlink:href", "ref"))
    assert (root.tag, root.attrib["viewBox"]) == ("svg", "0 0 144 72")
    assert (root.attrib["role"], root.attrib["aria-label"]) == ("img", 'what "it" shows')
    assert not any(part in text for part in ("http", "url(", "font-family", "<style", "<metadata", "\n"))
    assert "a < b" in [element.text for element in root.iter("text")]
    titled = [element for element in root.iter("g") if element.find("title") is not None]
    assert [element[0].text for element in titled] == ["half & <half>"]
    assert titled[0].find("path") is not None
    named = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
    uses = [element.attrib["ref"] for element in root.iter("use")]
    assert {use.removeprefix("#") for use in uses} == named
    dots = [element for element in root.iter("use") if "fill: #1f77b4" in element.attrib["style"]]
    assert len(dots) == 2


def test_a_file_is_a_png(tmp_path: Path) -> None:
    save_png(new_figure(), tmp_path / "a.png", dpi=50)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.iterdir()] == [tmp_path / "a.png"]


def test_settings_of_the_current_folder_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: true\n")
    monkeypatch.chdir(tmp_path)
    matplotlib = import_module("matplotlib")
    matplotlib.rc_file(matplotlib.matplotlib_fname())
    assert matplotlib.rcParams["text.usetex"]
    new_figure()
    assert not matplotlib.rcParams["text.usetex"]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.mark.usefixtures("missing")
def test_it_is_said_how_to_install_matplotlib() -> None:
    for call in (require_matplotlib, new_figure):
        with pytest.raises(SoothsayError, match=r"pip install matplotlib, or install soothsay\[plot\]"):
            call()


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    "command",
    [
        ["spec", "no-such-model", "-dsuffix", "--html={out}", "--spec-bench={file}"],
        ["serve", "--target=http://127.0.0.1:9/v1", "--burst=1", "--html={out}", "--prompts={file}"],
        ["serve", "--target=http://127.0.0.1:9/v1", "--burst=1", "--png={out}", "--prompts={file}"],
        ["report", "{file}", "--html={out}"],
    ],
    ids=["spec", "serve-html", "serve-png", "report"],
)
def test_commands_say_so_before_they_do_anything(command: list[str], tmp_path: Path) -> None:
    """Each would fail for another reason a moment later."""
    file = tmp_path / "file.jsonl"
    file.write_text("{}\n")
    given = [part.format(out=tmp_path / "out", file=file) for part in command]
    result = CliRunner().invoke(app, ["bench", *given], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "drawing needs matplotlib" in result.stderr
