"""One HTML page of what servers did under load: nothing is fetched, and no script runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from soothsay.bench.report.page import STYLE
from soothsay.bench.serve.plots import svg
from soothsay.bench.serve.results import MEASURES, Results, Slo
from soothsay.bench.serve.tables import Table, notes, tables

METHOD = (
    "Rates are medians over rounds, from a trial's first request to the end of its last. Percentiles are "
    "over all answered requests of all rounds. Ratios are over the first target under the same load, medians "
    "over rounds; of latencies, those of each round's median. Times begin before a request's connection is "
    "made."
)


def page(results: Results, slo: Slo) -> str:
    """The page as text. Raises `SoothsayError` if matplotlib, which draws its plots, is not installed."""
    about = results.journal.conditions
    places = zip(about["targets"], about["urls"], strict=True)
    facts = (
        f"{', '.join(f'{name} at {url}' for name, url in places)}; answers of at most {about['max_tokens']} "
        f"tokens, temperature {about['temperature']:g}; {about['conversations']} conversations; "
        f"{about['processor']}; soothsay {about['soothsay']}"
    )
    meanings = "; ".join(f"<b>{measure.name}</b>: {escape(measure.meaning)}" for measure in MEASURES)
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(results, slo))
    drawn = "".join(map(_table, tables(results, slo)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Load</title><style>{STYLE}figure.paper{{background:#fff}}</style></head><body>"
        f"<h1>Load</h1><p>{METHOD}</p><p class=dim>{meanings}.</p><p class=dim>{escape(facts)}</p>"
        f'{drawn}{said}<figure class="paper wide">{svg(results)}</figure></body></html>\n'
    )


def _table(table: Table) -> str:
    rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>{_cells(table.headings, "th")}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
