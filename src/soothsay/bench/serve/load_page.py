"""Makes one HTML page of the results of `soothsay bench serve`, without scripts and other files."""

from __future__ import annotations

from html import escape

from soothsay.bench.html_page import html_page, html_table, paragraphs
from soothsay.bench.serve.load_charts import load_chart
from soothsay.bench.serve.load_tables import notes, tables
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
    drawn = "".join(f"<h2>{escape(one.title)}</h2>{html_table(one)}" for one in tables(results, slo))
    chart = inline_svg(load_chart(results), "distributions of latencies, and what happened over time")
    return html_page(
        "Load",
        f"<p>{METHOD}</p><p class=dim>{meanings}.</p><p class=dim>{escape(facts)}</p>"
        f'{drawn}{paragraphs(notes(results, slo))}<figure class="wide">{chart}</figure>',
    )
