"""Makes tables of results in the layout of Spec-Bench's leaderboard, and notes for their readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from soothsay.bench.result_table import ResultTable, escaped
from soothsay.bench.spec.spec_results import OVERALL, Score, SpecResults, SpecRow

HEADINGS = {
    "conversation": "chat",
    "translation": "transl.",
    "summarization": "summ.",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
"""Spec-Bench's tasks, short enough for a terminal."""


WIDE, WIDEST = 120, 145
"""Characters of a line with room for most columns, and for all."""

BUSY = 0.9
"""Share of CPU time in wall time below which a note says that the machine was busy."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table that sums up all tasks."""

    heading: str
    meaning: str
    value: str | Callable[[Score], str]  # the name of a ratio of `Score`, or a function that writes a cell
    width: int = 0  # characters of the line that it needs in a terminal

    def cell(self, score: Score) -> str:
        """The text of the cell for a score. Empty if the value is unknown."""
        return _number(getattr(score, self.value)) if isinstance(self.value, str) else self.value(score)


def _equal(score: Score) -> str:
    return "" if score.different is None else f"{score.answers - score.different}/{score.answers}"


def _number(value: float) -> str:
    """Format a number; empty if it is unknown, which is 0."""
    return f"{value:.2f}" if value else ""


def _prediction(score: Score) -> str:
    """Format a predicted speed-up, and how far it is from the measured one."""
    if not score.predicted or not score.speedup:
        return ""
    return f"{score.predicted:.2f} ({score.predicted / score.speedup - 1:+.0%})"


COLUMNS = (
    Column("accepted", "tokens a step, with the bonus token, without the pass over the prompt", "accepted"),
    Column(
        OVERALL, "speed-up: mean over questions of tokens/s, over the same mean of plain decoding", "speedup"
    ),
    Column("median", "speed-up: median over questions of one rate over the other", "median_speedup", WIDE),
    Column("decode", "speed-up after the first token", "decode_speedup", WIDE),
    Column(
        "CPU", "speed-up by CPU time, which other work on the machine hardly affects", "cpu_speedup", WIDE
    ),
    Column(
        "tokens/s",
        "mean over questions, with the time of the prompt",
        lambda score: f"{score.rate:.0f}",
        WIDE,
    ),
    Column(
        "nodes",
        "draft tokens verified a step",
        lambda score: f"{score.drafted:.1f}" if score.accepted else "",
        WIDE,
    ),
    Column(
        "predicted",
        "the overall speed-up that theory expects, and how far it is from the measured one: tokens a step, "
        "times of passes and of drafting, and plain decoding's own time",
        _prediction,
        WIDEST,
    ),
    Column(
        "best nodes",
        "the largest tree, with its root, that theory expects to be fastest; 1 is plain decoding",
        lambda score: str(score.best_nodes or ""),
        WIDEST,
    ),
    Column("equal", "answers that equal plain decoding's, token by token", _equal),
)


def table(results: SpecResults) -> ResultTable:
    """Return all rows of a run: speed-up by task, then `COLUMNS`; drafters that were left out come last."""
    rows = results.rows()
    settings = ["T", "batch"] if len({row.batch for row in rows}) > 1 else ["T"]
    return _table(results, rows, settings, COLUMNS)


def table_of(
    results: SpecResults, setting: tuple[float, int], rows: Sequence[SpecRow], width: int
) -> ResultTable:
    """Return the rows of one temperature and batch, with the columns for lines of `width` characters."""
    content = _table(results, rows, [], [column for column in COLUMNS if column.width <= width])
    temperature, batch = setting
    name = f"{title(results)}, temperature {temperature:g}, batch {batch}: speed-up by task"
    return replace(content, title=name)


def _table(
    results: SpecResults, rows: Sequence[SpecRow], settings: Sequence[str], columns: Sequence[Column]
) -> ResultTable:
    columns = [column for column in columns if any(column.cell(row.overall) for row in rows)]
    tasks = [task for task in (rows[0].scores if rows else ()) if task != OVERALL]
    cells = [
        [
            row.name,
            *[f"{row.temperature:g}", str(row.batch)][: len(settings)],
            *(_number(row.scores[task].speedup) if task in row.scores else "" for task in tasks),
            *(column.cell(row.overall) for column in columns),
        ]
        for row in rows
    ]
    headings = [
        "drafter",
        *settings,
        *(HEADINGS.get(task, task) for task in tasks),
        *(column.heading for column in columns),
    ]
    left_out = [[name, *("" for _ in headings[2:]), "out"] for name in results.left_out]
    return ResultTable(headings, cells + left_out)


def markdown(every: Sequence[SpecResults]) -> str:
    """Return the tables of all runs as Markdown, each with its notes. Several runs have titles."""
    return "\n\n".join(
        "\n\n".join(
            [
                *([f"**{title(results)}**"] if len(every) > 1 else []),
                table(results).markdown(),
                *(["  \n".join(escaped(note) for note in notes(results))] if notes(results) else []),
            ]
        )
        for results in every
    )


def title(results: SpecResults) -> str:
    """Return the name of a run: its model and dtype."""
    about = results.conditions
    return f"{Path(str(about.get('model', 'model'))).name}, {about.get('dtype', 'auto')}"


def notes(results: SpecResults) -> list[str]:
    """Return what a reader of the table must know."""
    found = [f"{name} was left out: {reason}" for name, reason in results.left_out.items()]
    if results.skipped:
        found.append(f"{results.skipped} turns were skipped: too long for the context.")
    if results.conditions.get("carry"):
        found.append("Drafters kept what they had learnt from the questions before.")
    elif controllers := [row.name for row in results.rows() if row.name == "auto" or "|" in row.name]:
        found.append(
            f"{', '.join(dict.fromkeys(controllers))}: what drafters had learnt from other questions was "
            "forgotten before each answer; what they cost, and how often they were right, was not."
        )
    shares = [row.overall.cpu_share for row in results.rows() if row.overall.cpu_share]
    if shares and min(shares) < BUSY:
        found.append(
            f"The machine was busy: the benchmark had as little as {min(shares):.0%} of the time. Trust the "
            "speed-up by the processor's time more."
        )
    return found


def different(results: SpecResults) -> int:
    """Return the number of answers that differ from plain decoding's."""
    return sum(row.overall.different or 0 for row in results.rows())
