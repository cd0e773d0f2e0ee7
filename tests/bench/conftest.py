"""Every table that a test of a benchmark shows is drawn again for 80 columns: all of it must be there."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from soothsay.bench.tables import ResultTable


def drawn(table: ResultTable, width: int = 80) -> str:
    """The table as a terminal of this width shows it. Fails if a line is longer, or something is cut."""
    out = StringIO()
    Console(file=out, width=width, highlight=False, color_system=None).print(table)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width, text
    assert "…" not in text
    words = text.split()
    for heading in table.headings[table.names :]:
        assert {*heading.split()} <= {*words}, f"{heading!r} is missing: {text}"
    for row in table.rows:
        assert all(cell in text for cell in row[table.names :]), f"{row}: {text}"
    return text


@pytest.fixture(autouse=True)
def _tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shown, draw = list[ResultTable](), ResultTable.__rich_console__

    def noting(table: ResultTable, *terminal: object) -> object:
        shown.append(table)
        return draw(table, *terminal)  # type: ignore[arg-type]

    monkeypatch.setattr(ResultTable, "__rich_console__", noting)
    yield
    for table in [*shown]:
        drawn(table)
