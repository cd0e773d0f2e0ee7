"""The page and its plots: whole, of the right sizes, and without anything from outside."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay.bench.journal import Journal
from soothsay.bench.report.charts import COLOURS, bars, legend, lines, stacks
from soothsay.bench.report.page import page
from soothsay.bench.report.tables import markdown, notes, table
from soothsay.bench.spec.contenders import Run
from soothsay.bench.spec.results import Lap, Results
from soothsay.cli import app

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


def results(
    drafters: tuple[str, ...] = ("eagle3", EVIL),
    settings: tuple[tuple[float, int], ...] = ((0.0, 1), (1.0, 1), (0.0, 4)),
    path: Path | None = None,
    **conditions: object,
) -> Results:
    """Each drafter is a quarter faster than the one before; plain decoding takes a second a question."""
    found = Results(Journal({**CONDITIONS, **conditions}, path))
    for temperature, batch in settings:
        for number, task in enumerate(TASKS):
            runs = {
                name: Run(answers=1, different=0, tokens=50, seconds=1 / (1 + i / 4), prefill=0.1, ahead=1,
                          cpu=0.2, draft=0.1 * (i > 0), verify=0.3, steps=20 if i else 50, first=1,
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


def shapes(svg: str, tag: str) -> list[dict[str, str]]:
    return [element.attrib for element in ElementTree.fromstring(svg).iter(tag)]


@pytest.mark.parametrize("count", [1, 3])
def test_the_page_stands_by_itself(count: int) -> None:
    text = page([results()] * count)
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
        assert words.count(plot) == count
    assert words.count("All settings") == count
    assert words.count("Milliseconds a token, by phase") == 3 * count


def test_a_large_page_is_small() -> None:
    drafters = tuple(f"drafter-number-{i}(model=some/path, depth={i})" for i in range(14))
    text = page([results(drafters, ((0.0, 1), (1.0, 1)), dtype=dtype) for dtype in ("bfloat16", "int8")])
    assert len(text.encode()) < 400_000
    Reader(text)


def test_what_is_not_there_is_not_drawn() -> None:
    text = page([results((), ((0.0, 1),))])
    Reader(text)
    for absent in ("All settings", "Steps that accept"):
        assert absent not in text


def test_bars_are_as_long_as_their_values() -> None:
    svg = bars([("a", 1.0), ("a<b", 2.5), ("none", 0.0)], top=5.0, reference=1.0)
    widths = [float(bar["width"]) for bar in shapes(svg, "rect")]
    assert widths[1] == pytest.approx(2.5 * widths[0], abs=0.2)
    assert widths[2] == 0
    (across,) = shapes(svg, "line")
    first = shapes(svg, "rect")[0]
    assert float(across["x1"]) == pytest.approx(float(first["x"]) + widths[0], abs=0.1)
    assert [bar["class"] for bar in shapes(svg, "rect")] == ["bar", "bar", "bar worse"]
    width = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[2])
    full = shapes(bars([("a", 5.0)], top=5.0), "rect")[0]
    assert float(full["x"]) + float(full["width"]) < width - 30  # its number has room


def test_stacks_are_as_long_as_their_parts_together() -> None:
    svg = stacks([("a", {"draft": 1.0, "verify": 3.0}), ("b", {"draft": 2.0, "verify": 0.0})], "ms")
    a1, a2, b1, b2 = shapes(svg, "rect")
    assert float(a2["x"]) == pytest.approx(float(a1["x"]) + float(a1["width"]), abs=0.2)
    assert float(a2["width"]) == pytest.approx(3 * float(a1["width"]), abs=0.4)
    assert float(b1["width"]) == pytest.approx(2 * float(a1["width"]), abs=0.3)
    assert (a1["style"], a2["style"]) == ("fill:var(--c0)", "fill:var(--c1)")
    assert (float(b2["width"]), float(b1["y"]) > float(a1["y"])) == (0.0, True)


def test_lines_stand_where_their_values_are() -> None:
    svg = lines({"a": [(1, 0.0), (4, 2.0)], "b": [(1, 1.0), (16, 1.0)]}, "batch", "speed-up", reference=1.0)
    dots = [(float(dot["cx"]), float(dot["cy"])) for dot in shapes(svg, "circle")]
    (x1, y0), (x4, y2), (x1_, y1), (x16, y1_) = dots
    assert x1 == x1_ < x4 < x16
    assert x4 - x1 == pytest.approx(x16 - x4, abs=0.2)
    assert y0 > y1 == y1_ > y2
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    reference = next(line for line in shapes(svg, "line") if line["class"] == "reference")
    assert float(reference["y1"]) == y1
    ticks = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert ticks == ["0", "0.5", "1", "1.5", "2", "1", "4", "16", "batch"]
    shares = lines({"a": [(1, 0.5)]}, "depth", "share", percent=True)
    assert "25%" in shares
    assert "depth 1: 50.0%" in shares


def test_series_beyond_the_colours_are_dashed() -> None:
    svg = lines({str(i): [(1, 1.0)] for i in range(COLOURS + 1)}, "x", "y")
    styles = [line["style"] for line in shapes(svg, "polyline")]
    assert len({*styles}) == COLOURS + 1
    assert all(style in legend([str(i) for i in range(COLOURS + 1)]) for style in styles)


def test_tables_have_what_was_measured() -> None:
    found = results(("eagle3",), ((0.0, 1), (0.0, 4)), left_out={"medusa": "no weights"}, carry=True)
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
    assert notes(found) == [
        "medusa was left out: no weights",
        "Drafters kept what they had learnt from the questions before.",
        "The machine was busy: the benchmark had as little as 20% of the time. Trust the speed-up by the "
        "processor's time more.",
    ]
    assert all(note in text for note in notes(found))
    both = markdown([found, results(dtype="bfloat16")])
    assert both.index("**big, int8**") < both.index("**big, bfloat16**")


def test_what_controllers_know_is_disclosed() -> None:
    (note,) = [one for one in notes(results(("auto", "mtp", "suffix | mtp"))) if "forgotten" in one]
    assert note.startswith("auto, suffix | mtp: what drafters had learnt from other questions was forgotten")
    assert not [one for one in notes(results(("suffix", "mtp"))) if "forgotten" in one]
    assert not [one for one in notes(results(("auto",), carry=True)) if "forgotten" in one]


@pytest.mark.parametrize("width", ["80", "120"])
def test_a_terminal_has_room_for_all_tasks(width: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    drafters = ("prompt-lookup", "draft-model(model=some/path, depth=3)")
    results(drafters, ((0.0, 1),), file, left_out={"rest": "x"})
    output = CliRunner().invoke(app, ["bench", "report", str(file)], env={"COLUMNS": width}).output
    assert "…" not in output
    headings = next(line.split() for line in output.split("\n") if "drafter" in line)
    tasks = ["chat", "transl.", "summ.", "QA", "math", "RAG", "accepted", "overall"]
    assert headings[:9] == ["drafter", *tasks]
    assert headings[-1] == "equal"
    assert ("tokens/s" in headings) is (width == "120")
    rows = [line for line in output.split("\n") if line.rstrip().endswith("6/6")]
    assert [len(line.split()) - len(headings) >= 0 for line in rows] == [True] * 3
    assert next(line for line in output.split("\n") if line.startswith(" rest ")).rstrip().endswith(" out")


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
