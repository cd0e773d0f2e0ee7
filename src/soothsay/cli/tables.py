"""The look of the tables that commands print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from soothsay.bench.result_page import ResultTable

Column = str | Callable[[Any], str]
"""How a cell is made of a record: a format, such as "{.rate:.1f}", or a function."""


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A table of names, which are dim, and what belongs to them."""
    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(Text(name, "dim"), Text(fact) if isinstance(fact, str) else fact)
    return table


def numbers_table(
    names: Iterable[str],
    numbers: Iterable[str],
    *,
    title: str | Text | None = None,
    caption: str | None = None,
    dense: bool = False,
) -> Table:
    """A table with columns of names, and after them columns of numbers, which are aligned to the right.

    `dense`: there are many columns, close to each other, whose numbers stay in one line.
    """
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, padding=(0, 1, 0, 0 if dense else 1))
    table.title_justify = table.caption_justify = "left"
    for heading in names:
        table.add_column(heading, overflow="fold", min_width=8 if dense else None)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=dense)
    return table


def records_table(
    records: Sequence[Any],
    names: Mapping[str, Column],
    numbers: Mapping[str, Column],
    *,
    grouped: bool = False,
    style: Callable[[Any], str] = lambda record: "",
    **looks: Any,
) -> Table:
    """A `numbers_table` with a row for each record.

    Args:
        records: what the table shows.
        names: the columns of names by their headings.
        numbers: the columns of numbers.
        grouped: rows with equal names are a group, between lines. Only its first row shows them.
        style: the style of a record's row.
        looks: title and caption.
    """
    table, before = numbers_table(names, numbers, **looks), None
    for record in records:
        own, values = (
            [column.format(record) if isinstance(column, str) else column(record) for column in part.values()]
            for part in (names, numbers)
        )
        if grouped and own != before:
            table.add_section()
        table.add_row(*([""] * len(own) if grouped and own == before else own), *values, style=style(record))
        before = own
    return table


def result_table(content: ResultTable) -> Table:
    """Draw a table of results. With several names, a line separates rows that differ in the first one.

    Names that equal those of the row above are left out, and names after them.
    """
    names = content.names
    headings, title = content.headings, Text(content.title)
    table = numbers_table(headings[:names], headings[names:], title=title, dense=True)
    before: Sequence[str] = ()
    for row in content.rows:
        if names > 1 and before and row[0] != before[0]:
            table.add_section()
        same = next((i for i in range(names) if before[i : i + 1] != row[i : i + 1]), 0)
        table.add_row(*(Text(cell) for cell in (*[""] * same, *row[same:])))
        before = row
    return table
