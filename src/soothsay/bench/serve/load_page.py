"""Makes one HTML page of the results of `soothsay bench serve`, without scripts and other files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from soothsay.bench.page_style import STYLE
from soothsay.bench.serve.load_charts import load_chart
from soothsay.bench.serve.load_tables import LoadTable, notes, tables
from soothsay.bench.serve.serve_results import MEASURES, LoadResults, Slo
from soothsay.plotting import inline_svg

METHOD = (
    "Rates are medians over rounds, from a trial's first request to the end of its last. Percentiles are "
    "over all answered requests of all rounds. Ratios are over the first target under the same load, medians "
    "over rounds; ratios of latencies are ratios of each round's medians. Times begin before a request's "
    "connection is made."
)


def page(results: LoadResults, slo: Slo) -> str:
    """Return the page. Raises `SoothsayError` if matplotlib, which draws the charts, is not installed."""
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
    chart = inline_svg(load_chart(results), "distributions of latencies, and what happened over time")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Load</title><style>{STYLE}</style></head><body>"
        f"<h1>Load</h1><p>{METHOD}</p><p class=dim>{meanings}.</p><p class=dim>{escape(facts)}</p>"
        f'{drawn}{said}<figure class="wide">{chart}</figure></body></html>\n'
    )


def _table(table: LoadTable) -> str:
    rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>{_cells(table.headings, "th")}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(cells: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
