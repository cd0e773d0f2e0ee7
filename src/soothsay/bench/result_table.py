"""A table of results, before it is drawn in a terminal, on a page or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Headings and rows of cells."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1  # the first columns, which say what a row is about; numbers follow
    title: str = ""

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        ruler = [*["---"] * self.names, *["---:"] * (len(self.headings) - self.names)]
        rows = [[escaped(cell) for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.headings, ruler, *rows))


def escaped(text: str) -> str:
    """A text for Markdown, within a table or outside."""
    return text.replace("|", r"\|")
