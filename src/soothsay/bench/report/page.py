"""One HTML page of Spec-Bench's results, tables and plots: nothing is fetched, and no script runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from soothsay.bench.report.charts import bars, legend, lines, stacks
from soothsay.bench.report.tables import COLUMNS, HEADINGS, different, notes, table, title
from soothsay.bench.spec.results import OVERALL, PLAIN, Results, Row, by_setting

STYLE = """
:root{color-scheme:light dark;--paper:#fafaf8;--card:#fff;--ink:#1d1f23;--dim:#666c75;--rule:#e2e3e6;
--bar:#3b6fb6;--worse:#c98b86;--alarm:#b3261e;--c0:#7d838c;--c1:#3b6fb6;--c2:#d1702a;--c3:#2f9158;
--c4:#b8478a;--c5:#8a63c7;--c6:#1794a3;--c7:#a67c1b;--c8:#c0453e;--c9:#5c8a1f}
@media (prefers-color-scheme:dark){:root{--paper:#15171a;--card:#1d2024;--ink:#e6e7ea;--dim:#9aa0aa;
--rule:#33373d;--bar:#7aa7e8;--worse:#8a5a56;--alarm:#ff8a80;--c0:#9aa0aa;--c1:#7aa7e8;--c2:#f0a05e;
--c3:#6cc48f;--c4:#e58bc0;--c5:#b79bea;--c6:#5cc9d6;--c7:#d8b354;--c8:#ef8a83;--c9:#a3cf66}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:2rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.7rem;margin:0}h2{font-size:1.3rem;margin:3rem 0 .25rem}
h3{font-size:1.05rem;margin:2rem 0 .5rem}h4{font-size:.9rem;margin:0 0 .25rem;font-weight:600}
p{margin:.4rem 0;max-width:75ch}.dim{color:var(--dim)}.alarm{color:var(--alarm);font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600;color:var(--dim)}th:first-child,td:first-child{text-align:left}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:1rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:1rem}
figure{margin:0;padding:.9rem 1rem;background:var(--card);border:1px solid var(--rule);border-radius:8px}
figcaption{font-size:.8rem;color:var(--dim);margin-top:.4rem}
svg{width:100%;height:auto;display:block;font-size:12px}svg text{fill:var(--ink)}
svg .tick,svg .number{fill:var(--dim);font-size:11px}.bar{fill:var(--bar)}.bar.worse{fill:var(--worse)}
line.rule{stroke:var(--rule)}line.reference{stroke:var(--dim);stroke-dasharray:3 3}
.line{fill:none;stroke-width:2}.legend svg{display:inline-block;width:22px;height:10px;margin-right:.35rem}
.legend{list-style:none;margin:.3rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:.1rem .9rem;
font-size:.8rem}
""".replace("\n", "")

METHOD = (
    "Every question is answered by plain decoding and by each drafter in turn, in one process, each question "
    "beginning with another of them. Tokens are raw token ids, none behind an end token. A second turn is "
    "asked behind plain decoding's answer to the first, for all alike. Nothing is found in a prefix cache. "
    "Times are wall times, the prompt's included unless said otherwise; of several rounds, medians."
)


def page(every: Sequence[Results]) -> str:
    """The page as text, a section for each run."""
    heading = "Spec-Bench" if len(every) > 1 else f"Spec-Bench: {title(every[0])}"
    body = "".join(_section(results, alone=len(every) == 1) for results in every)
    overview = _overview(every) if len(every) > 1 else ""
    meanings = "; ".join(f"<b>{column.heading}</b>: {escape(column.meaning)}" for column in COLUMNS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(heading)}</h1><p>{METHOD}</p><p class=dim>By task: speed-up over plain decoding; "
        f"{meanings}.</p>{overview}{body}</body></html>\n"
    )


def _overview(every: Sequence[Results]) -> str:
    """Every drafter's speed-up in each run, panels beside each other."""
    panels = []
    for results in every:
        for (temperature, batch), rows in by_setting(results.rows()):
            name = f"{title(results)}, T {temperature:g}, batch {batch}"
            panels.append((name, [(row.name, row.overall.speedup) for row in rows if row.name != PLAIN]))
    top = max((value for _, values in panels for _, value in values), default=1.0)
    return f"<h2>Overall speed-up</h2>{_panels(panels, top)}"


def _section(results: Results, alone: bool) -> str:
    about = results.conditions
    facts = (
        f"{about['questions']} questions, answers of at most {about['max_tokens']} tokens, trees of at most "
        f"{about['nodes']} nodes, {about['threads']} threads, {about['processor']}, "
        f"soothsay {about['soothsay']}"
    )
    alarm = (
        f"<p class=alarm>{bad} answers are not plain decoding's. This must never happen.</p>"
        if (bad := different(results))
        else ""
    )
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(results))
    plots = "".join(_plots(results))
    return (
        f"{'' if alone else f'<h2>{escape(title(results))}</h2>'}<p class=dim>{escape(facts)}</p>"
        f"{alarm}{_table(results)}{said}{plots}"
    )


def _table(results: Results) -> str:
    content = table(results)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in content.headings)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in content.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _plots(results: Results) -> Iterator[str]:
    rows = results.rows()
    for (temperature, batch), own in by_setting(rows):
        yield f"<h3>Temperature {temperature:g}, batch {batch}</h3>"
        yield _by_task(own)
        yield f'<div class="pair">{_by_depth(own)}{_by_phase(own)}</div>'
    batches, temperatures = sorted({row.batch for row in rows}), sorted({row.temperature for row in rows})
    curves = []
    for t in temperatures if len(batches) > 1 else ():
        own = [row for row in rows if row.temperature == t]
        curves.append(
            _curve(f"Overall speed-up by batch, temperature {t:g}", own, "batch", lambda r: r.batch)
        )
    for b in batches if len(temperatures) > 1 else ():
        own = [row for row in rows if row.batch == b]
        caption = f"Overall speed-up by temperature, batch {b}"
        curves.append(_curve(caption, own, "temperature", lambda r: r.temperature))
    if curves:
        yield f'<h3>All settings</h3><div class="pair">{"".join(curves)}</div>'


def _by_task(rows: Sequence[Row]) -> str:
    """A panel a task, all to one scale."""
    drafted = [row for row in rows if row.name != PLAIN]
    tasks = [OVERALL, *(task for task in rows[0].scores if task != OVERALL)]
    top = max((score.speedup for row in drafted for score in row.scores.values()), default=1.0)
    panels = [
        (HEADINGS.get(task, task), [(row.name, row.scores[task].speedup) for row in drafted])
        for task in tasks
    ]
    return _panels(panels, max(top, 1.0)) if drafted else ""


def _panels(panels: Sequence[tuple[str, list[tuple[str, float]]]], top: float) -> str:
    figures = "".join(
        f"<figure><h4>{escape(name)}</h4>{bars(values, top, reference=1.0)}</figure>"
        for name, values in panels
    )
    caption = "Speed-up over plain decoding, which is the dashed line: tokens/s, the mean over questions."
    return f'<div class="panels">{figures}</div><p class=dim>{caption}</p>'


def _by_depth(rows: Sequence[Row]) -> str:
    series = {
        row.name: list(enumerate(row.overall.by_depth, start=1)) for row in rows if any(row.overall.by_depth)
    }
    if not series:
        return ""
    plot = lines(series, "depth", "share of steps", percent=True)
    return _figure("Steps that accept so many guesses, or more", plot, [*series])


def _by_phase(rows: Sequence[Row]) -> str:
    phased = [(row.name, row.overall.phases) for row in rows if row.overall.accepted]
    caption = (
        "prefill: until the first token. draft: in the drafter. verify: the target's pass, from the guesses "
        "to the verdict on them. other: scheduling, text."
    )
    if not phased:
        return ""
    plot = stacks(phased, "ms a token")
    return _figure("Milliseconds a token, by phase", plot, [*phased[0][1]], caption)


def _curve(name: str, rows: Sequence[Row], label: str, x: Callable[[Row], float]) -> str:
    series = {
        drafter: sorted((x(row), row.overall.speedup) for row in rows if row.name == drafter)
        for drafter in dict.fromkeys(row.name for row in rows if row.name != PLAIN)
    }
    if not series:
        return ""
    return _figure(name, lines(series, label, "speed-up", reference=1.0), [*series])


def _figure(name: str, plot: str, names: Sequence[str], caption: str = "") -> str:
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h4>{escape(name)}</h4>{plot}{legend(names)}{said}</figure>"
