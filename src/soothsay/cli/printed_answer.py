"""Prints the answer of a chat while it streams, as Markdown in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.padding import Padding
from rich.segment import Segment, SegmentLines
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from soothsay.cli.terminal import harmless

if TYPE_CHECKING:
    from soothsay.server.tools.tool_calls import ParsedPart, ToolCallParser


STYLES = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.code": "cyan",
        "markdown.block_quote": "dim",
        "markdown.item.bullet": "cyan",
        "markdown.item.number": "cyan",
    }
)
"""Styles that can be read on dark and on light terminals."""

CODE_THEME = "ansi_dark"
"""Colours of code: the terminal's own."""

REDRAW = 0.08
"""Seconds between two drawings of the unfinished block, at least. A drawing takes some milliseconds."""

Line = list[Segment]


class MarkdownStream:
    """Shows one text in Markdown while it grows.

    A block (a paragraph, a list, a table, code) that is followed by another one does not change any more: it
    is printed, once. Only the last block is drawn anew while it grows, and of that no more lines than the
    screen has. So nothing that has scrolled away is ever drawn again.

    Args:
        console: prints, and should be a terminal. The text must be free of control characters.
    """

    def __init__(self, console: Console):
        self._console = console
        self._rest = ""  # the text that is not printed yet
        self._begun = False  # whether something was printed
        self._live: Live | None = None  # shows `_rest`
        self._drawn_at = 0.0

    def push(self, text: str) -> None:
        """Show the next piece of the text."""
        self._rest += text
        if "\n" in text:
            *done, self._rest = split_blocks(self._rest)
            self._print(done)
        if time.monotonic() - self._drawn_at >= REDRAW:
            self._draw()

    def end(self) -> None:
        """Print what is left, and leave the cursor at the start of a line. More text may follow."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(split_blocks(self._rest))
        self._rest = ""

    def _print(self, blocks: Iterable[str]) -> None:
        for block in blocks:
            lines = self._lines(block)
            if lines:
                self._console.print(SegmentLines(lines, new_lines=True), end="")
                self._begun = True

    def _draw(self) -> None:
        height = self._console.height - 2
        if height < 1:
            return
        lines = self._lines(_last_lines(self._rest, height))[-height:]
        if self._live is None:
            if not lines:
                return
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(SegmentLines(lines, new_lines=True), refresh=True)
        self._drawn_at = time.monotonic()

    def _lines(self, source: str) -> list[Line]:
        """The lines that show a part of the text, after an empty line if something is above it."""
        if not source.strip():
            return []
        with self._console.use_theme(STYLES):
            options = self._console.options.update(no_wrap=False, overflow="fold")
            lines = self._console.render_lines(_Markdown(source), options, pad=False)
        stripped = [_stripped(line) for line in lines]
        while stripped and not stripped[0]:
            stripped.pop(0)
        while stripped and not stripped[-1]:
            stripped.pop()
        return [[], *stripped] if self._begun and stripped else stripped


def split_blocks(text: str) -> list[str]:
    """The blocks of a text, at least one. If the text goes on, only the last one changes."""
    lines = text.split("\n")
    starts = sorted({token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map})
    bounds = [0, *starts[1:], len(lines)]
    return ["\n".join(lines[begin:end]) for begin, end in pairwise(bounds)]


def _last_lines(source: str, count: int) -> str:
    """The last lines of an unfinished block, enough for `count` lines on the screen. Code stays code."""
    lines = source.split("\n")
    if len(lines) <= count + 1:
        return source
    fence = lines[:1] if lines[0].lstrip().startswith(("```", "~~~")) else []
    return "\n".join([*fence, *lines[-count:]])


def _stripped(line: Line) -> Line:
    """A line without trailing spaces."""
    kept = list(line)
    while kept and not kept[-1].text.strip() and not (kept[-1].style and kept[-1].style.bgcolor):
        kept.pop()
    if kept and not (kept[-1].style and kept[-1].style.bgcolor):
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


class _Heading(Heading):
    """A heading at the left, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text


class _CodeBlock(CodeBlock):
    """Code in the terminal's own colours, indented by two columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        syntax = Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")
        yield Padding(syntax, (0, 0, 0, 2))


class _Markdown(Markdown):
    """A text of a model: its line ends and its tags are kept, and links show where they lead."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, source: str):
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.markup, self.parsed = source, PARSER.parse(source)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
"""Reads Markdown. HTML is shown as text: models write tags that are not HTML."""


THOUGHTS = "dim italic"
"""The style of a model's thoughts."""


class PrintedAnswer:
    """Prints an answer: thoughts in a style of their own, then the text.

    Args:
        console: where to. If it is a terminal, control characters in the answer are made visible.
        calls: finds the tool calls in the text, to show them as such; None: the text is shown as it is, and
            not as Markdown.
    """

    def __init__(self, console: Console, calls: ToolCallParser | None = None):
        self._console, self._calls = console, calls
        self._markdown = None if calls is None else MarkdownStream(console)
        self._thinking = False
        self.content = ""  # what was said, without thoughts

    def add(self, part: ParsedPart, style: str | None = None) -> None:
        """Print the next part; its text in `style`, if it is shown as it is."""
        if part.reasoning:
            self._out(part.reasoning, THOUGHTS)
            self._thinking = True
        if part.content:
            if self._thinking:
                self._console.print("\n")
                self._thinking = False
            self.content += part.content
            if self._calls is None:
                self._out(part.content, style)
            else:
                for letter in part.content:  # what stands before a call is shown before it
                    self._show(self._calls.push(letter))

    def end(self) -> None:
        """Print what was held back, and end the line."""
        if self._markdown is None or self._calls is None:
            self._console.print()
            return
        self._show(self._calls.end())
        self._markdown.end()
        if self._thinking:
            self._console.print()

    def _show(self, part: ParsedPart) -> None:
        """Show text as Markdown, and calls on lines of their own."""
        if self._markdown is None:
            return
        self._markdown.push(harmless(part.content))
        for call in part.calls:
            self._markdown.end()
            line = Text.assemble(("→ ", "magenta"), (harmless(call.name), "bold"), " ")
            self._console.print(line.append(harmless(call.arguments), "dim"))

    def _out(self, text: str, style: str | None) -> None:
        shown = harmless(text) if self._console.is_terminal else text
        self._console.out(shown, style=style, end="", highlight=False)
