"""The look of the tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A table of names, which are dim, and what belongs to them."""
    table = Table.grid(padding=(0, 2))
    for name, fact in facts:
        table.add_row(Text(name, "dim"), Text(fact) if isinstance(fact, str) else fact)
    return table


def numbers_table(
    names: Iterable[str], numbers: Iterable[str], *, title: str | None = None, caption: str | None = None
) -> Table:
    """A table with columns of names, and after them columns of numbers, which are aligned to the right."""
    table = Table(
        box=box.SIMPLE_HEAD, title=title, caption=caption, title_justify="left", caption_justify="left"
    )
    for heading in names:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
