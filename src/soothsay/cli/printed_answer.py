"""Prints the answer of a chat while it streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from soothsay.cli.terminal import harmless

if TYPE_CHECKING:
    from soothsay.cli.markdown import MarkdownStream
    from soothsay.server.tools.tool_calls import ParsedPart, ToolCallParser

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
        self._markdown = None if calls is None else _markdown(console)
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


def _markdown(console: Console) -> MarkdownStream:
    from soothsay.cli.markdown import MarkdownStream  # its libraries take as long to import as the rest

    return MarkdownStream(console)
