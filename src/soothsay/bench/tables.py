"""Tables of results: in a terminal, in Markdown, and on HTML pages that need no other files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text


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
