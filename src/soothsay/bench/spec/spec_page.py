"""Spec-Bench's results: tables in the layout of its leaderboard, notes for readers, and an HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from soothsay.bench.html_pages import Chart, drawn, html_page
from soothsay.bench.spec.recommendation import BUSY, cpu_share, recommendations
from soothsay.bench.spec.spec_charts import bars, lines, stacks
from soothsay.bench.spec.spec_results import OVERALL, PLAIN, Score, SpecResults, SpecRow, by_setting
from soothsay.bench.tables import ResultTable, escaped

HEADINGS = {
    "conversation": "chat",
    "translation": "transl.",
    "summarization": "summ.",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
"""Spec-Bench's tasks, short enough for a terminal."""


def _number(value: float) -> str:
    """Format a number; empty if it is unknown, which is 0."""
    return f"{value:.2f}" if value else ""


def _prediction(score: Score) -> str:
    """Format a predicted speed-up, and how far it is from the measured one."""
    if not score.predicted or not score.speedup:
        return ""
    return f"{score.predicted:.2f} ({score.predicted / score.speedup - 1:+z.0%})"


COLUMNS: Mapping[str, Callable[[Score], str]] = {
    "accepted": lambda score: _number(score.accepted),
    OVERALL: lambda score: _number(score.speedup),
    "median": lambda score: _number(score.median_speedup),
    "decode": lambda score: _number(score.decode_speedup),
    "CPU": lambda score: _number(score.cpu_speedup),
    "tokens/s": lambda score: f"{score.rate:.0f}",
    "nodes": lambda score: f"{score.drafted:.1f}" if score.accepted else "",
    "predicted": _prediction,
    "best nodes": lambda score: str(score.best_nodes or ""),
    "equal": lambda s: "" if s.different is None else f"{s.answers - s.different}/{s.answers}",
}
"""The columns of the table that sums up all tasks. A cell is empty if its value is unknown.

`pages/spec.html` says what they mean.
"""


PREDICTED = (
    "predicted: the overall speed-up that theory expects, and how far it is from the measured one; "
    "best nodes: the largest tree that theory expects to be fastest, 1 is plain decoding"
)
"""The legend of columns that theory fills."""


def table(results: SpecResults, setting: tuple[float, int] | None = None) -> ResultTable:
    """Return speed-ups by task, then `COLUMNS`. Drafters that were left out come last.

    Args:
        results: the run.
        setting: the rows of this temperature and batch. None: all rows.
    """
    rows = [row for row in results.rows() if setting in (None, (row.temperature, row.batch))]
    tasks = [task for task in (rows[0].scores if rows else ()) if task != OVERALL]
    tasks = tasks if len(tasks) > 1 else []
    columns = {name: cell for name, cell in COLUMNS.items() if any(cell(row.overall) for row in rows)}
    settings, name = ["T", "batch"] if len({row.batch for row in rows}) > 1 else ["T"], ""
    if setting is not None:
        temperature, batch = setting
        settings = []
        name = f"{title(results)}, temperature {temperature:g}, batch {batch}: speed-up by task"

    def cells(row: SpecRow) -> list[str]:
        chosen = [f"{row.temperature:g}", str(row.batch)][: len(settings)]
        speedups = [_number(row.scores[task].speedup) if task in row.scores else "" for task in tasks]
        return [row.name, *chosen, *speedups, *(cell(row.overall) for cell in columns.values())]

    named = [HEADINGS.get(task, task) for task in tasks]
    headings = ["drafter", *settings, *named, *columns]
    left_out = [[drafter, *("" for _ in headings[2:]), "out"] for drafter in results.left_out]
    caption = PREDICTED if "predicted" in columns else ""
    return ResultTable(headings, [cells(row) for row in rows] + left_out, title=name, caption=caption)


def interval_table(results: SpecResults) -> ResultTable:
    """Return the 95% interval of each speed-up, and a cross where it is a loss.

    A cell is a task at batch 1, and all tasks together at larger batches: a small group of questions says
    little, since its answers end at different times.
    """
    rows = [row for row in results.rows() if row.name != PLAIN]
    tasks = list(rows[0].scores) if rows else []

    def cells(row: SpecRow) -> list[str]:
        scores = [row.scores.get(task) if row.batch == 1 or task == OVERALL else None for task in tasks]
        return [row.name, f"{row.temperature:g}", str(row.batch), *map(_interval, scores)]

    headings = ["drafter", "T", "batch", *(HEADINGS.get(task, task) for task in tasks)]
    name = f"{title(results)}: 95% intervals of the speed-up; ✗: slower than plain decoding; ?: too few"
    return ResultTable(headings, [cells(row) for row in rows], title=name)


def _interval(score: Score | None) -> str:
    if score is None:
        return ""
    if len(score.rates) == 1:
        return f"{score.speedup:.2f} ?"
    low, high = score.interval
    return f"{low:.2f}-{high:.2f}{' ✗' if score.is_slower else ''}"


def slower(results: SpecResults) -> int:
    """Return the number of cells of `interval_table` that are losses."""
    return sum(cell.endswith("✗") for row in interval_table(results).rows for cell in row)


def markdown(every: Sequence[SpecResults]) -> str:
    """Return the tables of all runs as Markdown, each with its notes. Several runs have titles."""
    parts: list[str] = []
    for results in every:
        if len(every) > 1:
            parts.append(f"**{title(results)}**")
        parts.append(table(results).markdown())
        if found := notes(results):
            parts.append("  \n".join(map(escaped, found)))
    return "\n\n".join(parts)


def title(results: SpecResults) -> str:
    """Return the name of a run: its model and dtype."""
    about = results.conditions
    return f"{Path(str(about.get('model', 'model'))).name}, {about.get('dtype', 'auto')}"


def notes(results: SpecResults) -> list[str]:
    """Return what a reader of the table must know."""
    found = [f"{name} was left out: {reason}" for name, reason in results.left_out.items()]
    if results.skipped:
        found.append(f"{results.skipped} turns were skipped: too long for the context.")
    if controllers := [row.name for row in results.rows() if row.name == "auto" or "|" in row.name]:
        found.append(
            f"{', '.join(dict.fromkeys(controllers))}: what drafters had learnt from other questions was "
            "forgotten before each answer; what they cost, and how often they were right, was not."
        )
    if (share := cpu_share(results.rows())) < BUSY:
        found.append(
            f"The machine was busy: the benchmark had as little as {share:.0%} of the time. Trust the "
            "speed-up by CPU time more."
        )
    return found + ([] if different(results) else [said for said, _ in recommendations(results)])


def different(results: SpecResults) -> int:
    """Return the number of answers that differ from plain decoding's."""
    return sum(row.overall.different or 0 for row in results.rows())


def page(every: Sequence[SpecResults]) -> str:
    """Return the page as text, with a section for each run.

    Raises `SoothsayError` if matplotlib, which draws the charts, is not installed.
    """
    heading = ", ".join(dict.fromkeys(str(one.conditions.get("prompts", "Spec-Bench")) for one in every))
    heading += f": {title(every[0])}" if len(every) == 1 else ""
    return html_page(
        "spec.html",
        title=heading,
        overview=_overview(every) if len(every) > 1 else [],
        runs=[_section(results) for results in every],
    )


def _overview(every: Sequence[SpecResults]) -> list[Chart]:
    """Draw every drafter's speed-up, a panel for each run and setting."""
    panels = []
    for results in every:
        for (temperature, batch), rows in by_setting(results.rows()):
            name = f"{title(results)}, T {temperature:g}, batch {batch}"
            panels.append((name, {row.name: row.overall for row in rows if row.name != PLAIN}))
    return _panels(panels)


def _section(results: SpecResults) -> dict[str, Any]:
    """What the page shows of a run."""
    rows = results.rows()
    settings = [
        (
            f"Temperature {temperature:g}, batch {batch}",
            _by_task(own),
            [*_by_depth(own), *_by_phase(own), *_by_nodes(own)],
        )
        for (temperature, batch), own in by_setting(rows)
    ]
    return {
        "title": title(results),
        "about": results.conditions,
        "different": different(results),
        "table": table(results),
        "notes": notes(results),
        "settings": settings,
        "curves": [*_curves(rows)],
    }


def _by_task(rows: Sequence[SpecRow]) -> list[Chart]:
    """Draw a panel for each task, all with one scale."""
    drafted = [row for row in rows if row.name != PLAIN]
    tasks = [OVERALL, *(task for task in rows[0].scores if task != OVERALL)]
    panels = [(HEADINGS.get(task, task), {row.name: row.scores[task] for row in drafted}) for task in tasks]
    return _panels(panels) if drafted else []


def _panels(panels: Sequence[tuple[str, Mapping[str, Score]]]) -> list[Chart]:
    """Draw speed-ups over plain decoding, all with one scale."""
    top = max([1.0, *(score.speedup for _, scores in panels for score in scores.values())])
    return [
        Chart(
            name,
            drawn(
                bars([(drafter, score.speedup) for drafter, score in scores.items()], top, reference=1.0),
                f"{name}: speed-up over plain decoding",
            ),
        )
        for name, scores in panels
    ]


def _by_depth(rows: Sequence[SpecRow]) -> Iterator[Chart]:
    depths = {row.name: row.overall.by_depth for row in rows if any(row.overall.by_depth)}
    series = {name: list(enumerate(shares, start=1)) for name, shares in depths.items()}
    name = "Steps that accept a draft token at this depth"
    if series:
        yield _chart(name, lines(series, "depth", "share of steps", percent=True), [*series])


def _by_nodes(rows: Sequence[SpecRow]) -> Iterator[Chart]:
    speedups = {row.name: row.overall.by_nodes for row in rows if len(row.overall.by_nodes) > 1}
    series = {name: list(enumerate(values, start=1)) for name, values in speedups.items()}
    name = "Speed-up after the first token that theory expects, by the most nodes of a tree"
    caption = (
        "The recorded trees are cut to their best nodes, and their verdicts replayed. The time of drafting "
        "stays as it was."
    )
    if series:
        yield _chart(name, lines(series, "nodes", "speed-up", reference=1.0), [*series], caption)


def _by_phase(rows: Sequence[SpecRow]) -> Iterator[Chart]:
    phased = [(row.name, row.overall.phases) for row in rows if row.overall.accepted]
    caption = (
        "prefill: until the first token. draft: in the drafter. verify: from the draft to the verdict, which "
        "is the target's pass. other: scheduling, text."
    )
    if phased:
        phases = [*phased[0][1]]
        yield _chart("Milliseconds a token, by phase", stacks(phased, "ms a token"), phases, caption)


def _curves(rows: Sequence[SpecRow]) -> Iterator[Chart]:
    """Draw speed-ups over each setting of which there are several values."""
    settings = {name: sorted({getattr(row, name) for row in rows}) for name in ("batch", "temperature")}
    for x, fixed in (("batch", "temperature"), ("temperature", "batch")):
        for value in settings[fixed] if len(settings[x]) > 1 else ():
            series = defaultdict[str, list[tuple[float, float]]](list)
            for row in rows:
                if row.name != PLAIN and getattr(row, fixed) == value:
                    series[row.name].append((getattr(row, x), row.overall.speedup))
            points = {name: sorted(own) for name, own in series.items()}
            name = f"Overall speed-up by {x}, {fixed} {value:g}"
            yield _chart(name, lines(points, x, "speed-up", reference=1.0), [*points])


def _chart(name: str, figure: Any, series: Sequence[str], caption: str = "") -> Chart:
    return Chart(name, drawn(figure, name), series, caption)
