"""Tables of results, in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Headings and rows of cells.

    In a terminal, columns that have no room follow in further tables with the same names. With several names,
    a line separates rows that differ in the first one. Names that equal those of the row above are left out
    there, and names after them.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1  # the first columns, which say what a row is about; numbers follow
    title: str = ""
    caption: str = ""
    styles: Sequence[str] = ()  # of rows, in a terminal

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        ruler = [*["---"] * self.names, *["---:"] * (len(self.headings) - self.names)]
        rows = [[escaped(cell) for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.headings, ruler, *rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Draw it as one table, or as several if one would be too wide."""
        if self.title:
            yield Text(self.title, "italic")
        names = self._widths(options.max_width // 2)
        room = options.max_width - 1 - sum(width + GAP for width in names)
        parts = self._parts(room, [[heading] for heading in self.headings])
        if len(parts) > 1:  # break headings
            parts = self._parts(room, [heading.split() for heading in self.headings])
        for part in parts:
            yield self._part(names, part)
        if self.caption:
            yield Text(self.caption, "dim")

    def _parts(self, room: int, headings: Sequence[Sequence[str]]) -> list[dict[int, int]]:
        """The columns of numbers of each table, and their widths. `headings` are given by line."""
        parts, left = list[dict[int, int]](), -1
        for column in range(self.names, len(self.headings)):
            width = max(map(len, (*headings[column], *(row[column] for row in self.rows))))
            left -= width + GAP
            if left < 0:
                parts.append({})
                left = room - width - GAP
            parts[-1][column] = width
        return parts

    def _widths(self, most: int) -> list[int]:
        """The widths of the names, which together take `most` characters at most."""
        columns = zip(*(row[: self.names] for row in (self.headings, *self.rows)), strict=True)
        widths = [max(map(len, column)) for column in columns]
        while sum(widths) > most:
            widths[widths.index(max(widths))] -= 1
        return widths

    def _part(self, names: Sequence[int], numbers: Mapping[int, int]) -> Table:
        """The table of some columns of numbers, which have these widths."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading, width in zip(self.headings, names, strict=False):
            table.add_column(Text(heading), overflow="fold", width=width)
        for column, width in numbers.items():
            table.add_column(Text(self.headings[column]), justify="right", width=width)
        before: Sequence[str] = ()
        for number, row in enumerate(self.rows):
            if self.names > 1 and before and row[0] != before[0]:
                table.add_section()
            names_above = range(self.names) if self.names > 1 else ()
            same = next((i for i in names_above if before[i : i + 1] != row[i : i + 1]), len(names_above))
            cells = [*[""] * same, *row[same : self.names], *(row[column] for column in numbers)]
            table.add_row(*map(Text, cells), style=self.styles[number] if self.styles else "")
            before = row
        return table


GAP = 2
"""Characters between two columns in a terminal."""


def escaped(text: str) -> str:
    """A text for Markdown, within a table or outside."""
    return text.replace("|", r"\|")


Column = str | Callable[[Any], str]
"""How a cell is made of a record: a format, such as "{.rate:.1f}", or a function."""


def records_table(
    records: Sequence[Any],
    names: Mapping[str, Column],
    numbers: Mapping[str, Column],
    *,
    title: str = "",
    caption: str = "",
    style: Callable[[Any], str] = lambda record: "",
) -> ResultTable:
    """A table with a row for each record.

    Args:
        records: what the table shows.
        names: the columns of names by their headings.
        numbers: the columns of numbers.
        title: stands above it.
        caption: stands below it.
        style: the style of a record's row.
    """
    columns = {**names, **numbers}
    rows = [
        [one.format(of) if isinstance(one, str) else one(of) for one in columns.values()] for of in records
    ]
    return ResultTable([*columns], rows, len(names), title, caption, [style(one) for one in records])
