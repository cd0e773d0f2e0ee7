"""Markdown in the terminal: whatever the pieces, the screen shows the same, and nothing of it twice."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console
from screen import Screen

from soothsay.cli import printed_answer as markdown
from soothsay.cli.printed_answer import MarkdownStream, PrintedAnswer, split_blocks
from soothsay.cli.terminal import harmless
from soothsay.server.tools.tool_calls import ParsedPart, PlainParser
from soothsay.server.tools.tool_readers import HermesParser

TEXT = """# Foxes

A **fox** says `a <b>` and List<int>
on a [page](http://fox.es/x).

- one
- two

  still two
  - inner

3. third
4. fourth

| animal | sound |
|---|---|
| fox | *ring* |

```python
def f(x):
    return "a \\*b\\* **c**"

# the end
```
> quoted

Setext
------
2 < 3 & 4 <think> the end"""

SHOWN = """Foxes

A fox says a <b> and List<int>
on a page (http://fox.es/x).

 • one
 • two
   still two
    • inner

 3 third
 4 fourth

 animal  sound
 ─────────────
 fox     ring

  def f(x):
      return "a \\*b\\* **c**"

  # the end

▌ quoted

Setext

2 < 3 & 4 <think> the end"""


def terminal(height: int = 40) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, color_system="standard", width=60, height=height, soft_wrap=True
    )
    return console, written


def shown(pieces: list[str], height: int = 40) -> str:
    console, written = terminal(height)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.push(piece)
    stream.end()
    console.print("next")
    screen = Screen(height)
    screen.feed(written.getvalue())
    *lines, last = screen.text.split("\n")
    assert last == "next"
    return "\n".join(lines)


def pieces_of(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(1, len(text) // 2)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.fixture(autouse=True)
def always_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "REDRAW", 0.0)


def test_what_is_shown() -> None:
    assert shown([TEXT]) == SHOWN


@pytest.mark.parametrize("height", [40, 6, 3, 1])
def test_pieces_do_not_matter(height: int) -> None:
    for seed in range(8):
        assert shown(pieces_of(TEXT, seed), height) == SHOWN
    assert shown(list(TEXT), height) == SHOWN


def test_it_is_drawn_while_it_grows() -> None:
    console, written = terminal()
    stream, screen = MarkdownStream(console), Screen(40)
    stream.push("A **fox** sa")
    screen.feed(written.getvalue())
    assert screen.text == "A fox sa"
    assert "\x1b[1mfox" in written.getvalue()
    stream.push("ys\n\nMore")
    stream.end()


def test_long_code_is_never_redrawn_above_the_screen() -> None:
    lines = [f"line {number}" for number in range(100)]
    text = "\n".join(["```python", *lines, "```"])
    assert shown(pieces_of(text, 1), 10) == "\n".join(f"  {line}" for line in lines)
    assert shown([text[:-4]], 10) == shown([text], 10)  # an answer that was cut


def test_the_end_of_a_long_line_is_in_view() -> None:
    console, written = terminal(10)
    stream, screen = MarkdownStream(console), Screen(10)
    stream.push(" ".join(f"word{number:03}" for number in range(100)))
    screen.feed(written.getvalue())
    lines = screen.text.split("\n")
    assert (len(lines), lines[-1].split()[-1]) == (8, "word099")
    stream.end()


@pytest.mark.parametrize(
    ("begin", "line"), [("```python\n", "  line {}"), ("", "line {}"), ("- ", "line {}")], ids=repr
)
def test_the_end_of_a_long_block_is_in_view(begin: str, line: str) -> None:
    console, written = terminal(10)
    stream, screen = MarkdownStream(console), Screen(10)
    stream.push(begin + "\n".join(f"line {number}" for number in range(50)))
    screen.feed(written.getvalue())
    assert screen.text.split("\n") == [line.format(number) for number in range(42, 50)]
    stream.end()


@pytest.mark.parametrize(
    "blocks",
    [
        [""],
        ["one"],
        ["one\n\n"],
        ["\n\none"],
        ["one\n", "two"],
        ["- a\n\n- b\n", "c"],
        ["- a\n\n- b\n\n"],
        ["```\na\n\nb\n"],
        ["```\na\n```", "b"],
        ["# a", "b\n\n", "> c", "1. d\n   - e\n\n     f", "***\n"],
    ],
)
def test_blocks(blocks: list[str]) -> None:
    assert split_blocks("\n".join(blocks)) == blocks


@pytest.mark.parametrize(
    "text",
    [
        *("> " * 500, "- " * 500, "[" * 3000, "*a " * 2000, "`" * 3001, "|" * 500 + "\n" + "|-" * 500),
        *(
            "|a|b|\n|-|-|\n|1|2|3|4|\n||\n",
            "![x](y)",
            "\\",
            "&#27;[31m",
            "&#x9b;",
            "<!-- a -->",
            "~~~\n" * 99,
        ),
        *("[a]: b\n", "\t\ta\n\u202eb", "# \n\n#\n-\n", "1" * 3000, "\u6f22" * 500),
    ],
    ids=lambda text: text[:8],
)
def test_hostile_texts(text: str) -> None:
    console, written = terminal(10)
    stream = MarkdownStream(console)
    for piece in (text[: len(text) // 2], text[len(text) // 2 :], "\n\nlast"):
        stream.push(harmless(piece))
    stream.end()
    Screen(10).feed(written.getvalue())


def test_no_escape_sequence_passes() -> None:
    evil = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x08e\rf\x7fg\th\n"
    assert harmless(evil) == "a\u241b]0;title\u2407b\u241b[2Jc\ufffd31md\u2408ef\u2421g\th\n"
    calls = '<tool_call>{"name": "f\\u001b[2J", "arguments": {"a": "\x1b[2J"}}</tool_call>'
    for parser in (None, PlainParser(), HermesParser(())):
        console, written = terminal()
        answer = PrintedAnswer(console, parser)
        answer.add(ParsedPart(reasoning=f"hm {evil}"))
        for text in (evil, f"&#27;[2J&#x9b;2J {calls}", evil):
            answer.add(ParsedPart(text))
        answer.end()
        Screen(40).feed(written.getvalue())  # knows no other sequences than rich's own
        assert "[2J" in written.getvalue()
        assert "\x1b[2J" not in written.getvalue()
        assert "\x9b" not in written.getvalue()


def test_a_pipe_gets_the_text_itself() -> None:
    written = io.StringIO()
    answer = PrintedAnswer(Console(file=written))
    answer.add(ParsedPart("**a**\x1b[31m"))
    answer.end()
    assert written.getvalue() == "**a**\x1b[31m\n"


def test_thoughts_and_calls() -> None:
    console, written = terminal()
    answer = PrintedAnswer(console, HermesParser(()))
    answer.add(ParsedPart(reasoning="Let me *think*."))
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "a **fox**"}}\n</tool_call>'
    for piece in pieces_of(f"I **look**.\n{call}\nThen.", 3):
        answer.add(ParsedPart(piece))
    answer.end()
    screen = Screen(40)
    screen.feed(written.getvalue())
    expected = ["Let me *think*.", "", "I look.", '→ look {"at": "a **fox**"}', "", "Then."]
    assert screen.text.split("\n") == expected
    assert "\x1b[2;3mLet me *think*." in written.getvalue()
    assert answer.content == f"I **look**.\n{call}\nThen."


def test_thoughts_alone() -> None:
    console, written = terminal()
    answer = PrintedAnswer(console, PlainParser())
    answer.add(ParsedPart(reasoning="hm"))
    answer.end()
    assert written.getvalue().endswith("\n")
