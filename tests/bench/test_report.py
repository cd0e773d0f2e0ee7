"""The page and its plots: whole, of the right sizes, and without anything from outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from typer.testing import CliRunner

from soothsay.bench.spec.run_times import RunTimes
from soothsay.bench.spec.spec_charts import BAR, WORSE, bars, lines, stacks
from soothsay.bench.spec.spec_page import COLUMNS, markdown, notes, page, table
from soothsay.bench.spec.spec_results import Lap, SpecResults
from soothsay.cli.app import app
from soothsay.plotting import COLOURS, inline_svg

TASKS = ("conversation", "translation", "summarization", "qa", "math_reasoning", "rag")
CONDITIONS = {
    "model": "models/big",
    "dtype": "int8",
    "left_out": {},
    "questions": 6,
    "max_tokens": 64,
    "nodes": 16,
    "threads": 2,
    "processor": "A <processor> & more",
    "soothsay": "0.1.0",
}
EVIL = "x<script>alert(1)</script>|y"
SETTINGS = ((0.0, 1), (1.0, 1), (0.0, 4))  # temperature and batch


def results(
    drafters: tuple[str, ...] = ("eagle3", EVIL),
    settings: tuple[tuple[float, int], ...] = SETTINGS,
    path: Path | None = None,
    **conditions: object,
) -> SpecResults:
    """Each drafter is a quarter faster than the one before; plain decoding takes a second a question."""
    found = SpecResults({**CONDITIONS, **conditions}, path)
    for temperature, batch in settings:
        for number, task in enumerate(TASKS):
            runs = {
                name: RunTimes(answers=1, different=0, tokens=50, seconds=1 / (1 + i / 4), prefill=0.1,
                          ahead=1, cpu=0.2, draft=0.1 * (i > 0), verify=0.3, steps=20 if i else 50, first=1,
                          drafted=5 * i, accepted_at=[10, 5] if i else [])
                for i, name in enumerate(("none", *drafters))
            }  # fmt: skip
            found.add(Lap(temperature, batch, 1, task, [number], 0, [number], 0, runs))
    return found


class Reader(HTMLParser):
    """Checks that tags are closed in order, and notes what they are."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(("count", "settings"), [(1, SETTINGS), (2, SETTINGS[1:2])])
def test_the_page_stands_by_itself(count: int, settings: tuple[tuple[float, int], ...]) -> None:
    text, several = page([results(settings=settings)] * count), len(settings) > 1
    read = Reader(text)
    assert not {tag for tag, _ in read.tags} & {"script", "link", "img", "iframe", "object"}
    for _, attributes in read.tags:
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert not re.search(r"https?:|url\(|@import|//", text)
    assert "prefers-color-scheme:dark" in text
    styled, used = set(re.findall(r"(--\w+):", text)), set(re.findall(r"var\((--\w+)\)", text))
    assert used <= styled
    words = " ".join(read.text)
    assert EVIL in words
    assert "A <processor> & more" in words
    for heading in ("chat", "transl.", "summ.", "QA", "math", "RAG", "overall"):
        assert words.count(heading) >= count
    assert words.count("Temperature 1, batch 1") == count
    for plot in ("Overall speed-up by batch, temperature 0", "Overall speed-up by temperature, batch 1"):
        assert words.count(plot) == count * several
    assert words.count("All settings") == count * several
    assert words.count("Milliseconds a token, by phase") == len(settings) * count
    charts = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert len(charts) == (len(settings) * (7 + 2 + (count > 1)) + 4 * several) * count
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)


def test_a_large_page_is_small() -> None:
    drafters = tuple(f"drafter-number-{i}(model=some/path, depth={i})" for i in range(14))
    text = page([results(drafters, ((0.0, 1),))])
    assert len(text.encode()) < 100_000
    Reader(text)


def test_the_page_says_what_every_column_means() -> None:
    text = page([results()])
    assert [*COLUMNS] == re.findall(r"<b>([^<]*)</b>: ", text)


def test_what_is_not_there_is_not_drawn() -> None:
    text = page([results((), ((0.0, 1),))])
    Reader(text)
    for absent in ("All settings", "Steps that accept"):
        assert absent not in text


def places(figure: Any) -> list[tuple[float, float, float]]:
    """Return each bar's left end, width and row, in data coordinates."""
    (panel,) = figure.axes
    return [
        (bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2))
        for container in panel.containers
        for bar in container
    ]


def test_bars_are_as_long_as_their_values() -> None:
    figure = bars([("a", 1.0), ("a<b", 2.5), ("none", 0.0)], top=5.0, reference=1.0)
    assert places(figure) == [(0, 1.0, 0), (0, 2.5, 1), (0, 0.0, 2)]
    (panel,) = figure.axes
    assert panel.get_xlim() == (0, 5.0)
    assert panel.get_ylim() == (2.5, -0.5)  # the first row is at the top
    (across,) = panel.lines
    assert {*across.get_xdata()} == {1.0}
    colours = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert colours == [BAR, BAR, WORSE]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "a<b", "none"]
    assert [text.get_text() for text in panel.texts] == ["1.00", "2.50", "0.00"]
    drawn = inline_svg(figure, "speed-up")
    assert drawn.count("<title>a&lt;b: 2.50</title>") == 2  # the bar's and the name's
    width = figure.get_size_inches()[0] * 72
    assert panel.get_position().x1 * width < width - 30  # a number has room


def test_long_names_are_cut_and_told_in_full() -> None:
    name = "eagle3(model=a/very/long/path, width=4)"
    drawn = inline_svg(bars([(name, 1.0)], top=1.0), "speed-up")
    assert f">{name}<" not in drawn
    assert f">{name[:23]}…<" in drawn
    assert f"<title>{name}: 1.00</title>" in drawn


def test_a_dollar_sign_is_one() -> None:
    assert ">rest($A, $B)<" in inline_svg(bars([("rest($A, $B)", 1.0)], top=1.0), "speed-up")


def test_stacks_are_as_long_as_their_parts_together() -> None:
    figure = stacks([("a", {"draft": 1.0, "verify": 3.0}), ("b", {"draft": 2.0, "verify": 0.0})], "ms")
    assert places(figure) == [(0, 1.0, 0), (1.0, 3.0, 0), (0, 2.0, 1), (2.0, 0.0, 1)]
    (panel,) = figure.axes
    colours = [to_hex(bar.get_facecolor()) for bar in panel.patches]
    assert colours == [*COLOURS[:2]] * 2
    assert panel.get_xlim() == (0, 4.0)
    assert [text.get_text() for text in panel.texts] == ["4.00", "2.00"]
    assert "<title>a, verify: 3.000 ms</title>" in inline_svg(figure, "phases")


def test_lines_stand_where_their_values_are() -> None:
    points = {"a": [(1, 0.0), (4, 2.0)], "b": [(1, 1.0), (16, 1.0)]}
    figure = lines(points, "batch", "speed-up", reference=1.0)
    (panel,) = figure.axes
    drawn = [line.get_xydata().tolist() for line in panel.lines if len(line.get_xdata()) > 1]
    one, other, reference = drawn
    assert one == [[0, 0.0], [1, 2.0]]  # x by its rank
    assert other == [[0, 1.0], [2, 1.0]]
    assert [y for _, y in reference] == [1.0, 1.0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "4", "16"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("batch", "speed-up")
    assert panel.get_ylim()[0] == 0
    assert panel.get_ylim()[1] >= 2
    text = inline_svg(figure, "by batch")
    assert "<title>a, batch 4: 2.00</title>" in text
    shares = inline_svg(lines({"a": [(1, 0.5)]}, "depth", "share", percent=True), "by depth")
    assert ">40%<" in shares
    assert "<title>a, depth 1: 50.0%</title>" in shares


def test_series_beyond_the_colours_are_dashed() -> None:
    names = [str(i) for i in range(len(COLOURS) + 1)]
    (panel,) = lines({name: [(1, 1.0), (2, 1.0)] for name in names}, "x", "y").axes
    drawn = [line for line in panel.lines if len(line.get_xdata()) > 1]
    styles = [(to_hex(line.get_color()), line.get_linestyle()) for line in drawn]
    assert len({*styles}) == len(names)
    text = page([results(tuple(names), ((0.0, 1), (0.0, 4)))])
    beside = re.findall(r"border-top-style:(\w+);border-top-color:(#\w+)", text)[-len(names) :]
    assert [{"-": "solid", "--": "dashed"}[style] for _, style in styles] == [style for style, _ in beside]
    assert [colour for colour, _ in styles] == [colour for _, colour in beside]


def test_tables_have_what_was_measured() -> None:
    found = results(("eagle3",), ((0.0, 1), (0.0, 4)), left_out={"medusa": "no weights"})
    content = table(found)
    rows = [
        # a question: 50 tokens in 0.8 s, 0.1 of them with the prompt; 20 steps; 0.2 s of the processor's
        ["drafter", "T", "batch", "chat", "transl.", "summ.", "QA", "math", "RAG"],
        ["eagle3", "0", "4", "1.25", "1.25", "1.25", "1.25", "1.25", "1.25"],
        ["accepted", "overall", "median", "decode", "CPU", "tokens/s", "nodes", "equal"],
        ["2.58", "1.25", "1.25", "1.29", "1.00", "62", "0.2", "6/6"],
    ]
    assert content.headings == rows[0] + rows[2]
    assert content.rows[3] == rows[1] + rows[3]
    assert content.rows[-1] == ["medusa", *[""] * 15, "out"]
    text = markdown([found])
    assert "| eagle3 | 0 | 4 | 1.25 |" in text
    assert notes(found)[:2] == [
        "medusa was left out: no weights",
        "The machine was busy: the benchmark had as little as 20% of the time. Trust the speed-up by CPU "
        "time more.",
    ]
    assert all(note in text for note in notes(found))
    both = markdown([found, results(dtype="bfloat16")])
    assert both.index("**big, int8**") < both.index("**big, bfloat16**")


def test_what_controllers_know_is_disclosed() -> None:
    (note,) = [one for one in notes(results(("auto", "mtp", "suffix | mtp"))) if "forgotten" in one]
    assert note.startswith("auto, suffix | mtp: what drafters had learnt from other questions was forgotten")
    assert not [one for one in notes(results(("suffix", "mtp"))) if "forgotten" in one]


@pytest.mark.parametrize("width", ["80", "120"])
def test_a_terminal_has_room_for_all_tasks(width: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    drafters = ("prompt-lookup", "draft-model(model=some/path, depth=3)")
    results(drafters, ((0.0, 1),), file, left_out={"rest": "x"})
    output = CliRunner().invoke(app, ["bench", "report", str(file)], env={"COLUMNS": width}).output
    assert "…" not in output
    headings = next(line.split() for line in output.split("\n") if "drafter" in line)
    assert headings[:7] == ["drafter", "chat", "transl.", "summ.", "QA", "math", "RAG"]
    for note in ("CPU", "tokens/s", "equal"):  # what notes speak of
        assert note in output.split()
    assert len([line for line in output.split("\n") if line.rstrip().endswith("6/6")]) == 3
    assert [
        line for line in output.split("\n") if line.startswith(" rest ") and line.rstrip().endswith(" out")
    ]


def test_several_files_become_one_page(tmp_path: Path) -> None:
    files = [tmp_path / f"{dtype}.jsonl" for dtype in ("int8", "bfloat16")]
    for file in files:
        results(path=file, dtype=file.stem)
    outputs = [f"--html={tmp_path / 'out.html'}", f"--markdown={tmp_path / 'out.md'}"]
    result = CliRunner().invoke(app, ["bench", "report", *map(str, files), *outputs])
    assert (result.exit_code, result.exception) == (0, None)
    words = " ".join(Reader((tmp_path / "out.html").read_text()).text)
    assert words.index("Overall speed-up") < words.index("big, int8") < words.index("big, bfloat16")
    assert (tmp_path / "out.md").read_text().count("| drafter |") == 2
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    result = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "other.jsonl")])
    assert result.exit_code == 2
    assert "measurements of 'bench spec' are expected" in " ".join(result.output.split())
