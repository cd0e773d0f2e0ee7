"""Tables of results: in a terminal, in Markdown, and on HTML pages that need no other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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
        names = self._widths(options.max_width // (2 if self.names > 1 else 3))
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


STYLE = """
:root{color-scheme:light dark;--page:#fafaf8;--ink:#1d1f23;--dim:#666c75;--rule:#e2e3e6;--alarm:#b3261e}
@media (prefers-color-scheme:dark){:root{--page:#15171a;--ink:#e6e7ea;--dim:#9aa0aa;--rule:#33373d;
--alarm:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:2rem 1.25rem 4rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;margin:0}h2{font-size:1.3rem;margin:3rem 0 .25rem}
h3{font-size:1.05rem;margin:2rem 0 .5rem}h4{font-size:.9rem;margin:0 0 .25rem;font-weight:600}
p{margin:.4rem 0;max-width:75ch}.dim{color:var(--dim)}.alarm{color:var(--alarm);font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600;color:var(--dim)}th:first-child,td:first-child{text-align:left}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:1rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:1rem}
figure{margin:0;padding:.9rem 1rem;background:#fff;color:#1d1f23;border:1px solid var(--rule);
border-radius:8px}figcaption{font-size:.8rem;color:#666c75;margin-top:.4rem}
svg{width:100%;height:auto;display:block;stroke-linejoin:round}
.legend{list-style:none;margin:.3rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.1rem .9rem;
font-size:.8rem}.legend span{display:inline-block;width:22px;vertical-align:middle;margin-right:.35rem;
border-top-width:2px}
""".replace("\n", "")
"""The style sheet. Charts stand on white paper, also on a dark page."""


def html_page(title: str, body: str) -> str:
    """A page with a heading. `body` is HTML, `title` is text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def html_table(table: ResultTable) -> str:
    """A table, without its title."""
    rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in table.rows)
    head = f"<thead><tr>{_cells(table.headings, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'


def paragraphs(notes: Sequence[str]) -> str:
    """A paragraph for each note."""
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _cells(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


Column = str | Callable[[Any], str]
"""How a cell is made of a record: a format, such as "{.rate:.1f}", or a function."""


def numbers_table(names: Iterable[str], numbers: Iterable[str], *, caption: str | None = None) -> Table:
    """A table with columns of names, and after them columns of numbers, which are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for heading in names:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


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
