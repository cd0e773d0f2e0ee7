"""`soothsay bench accepted`: mean accepted tokens by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.options import DTypeOption, MaxContextOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice
from soothsay.config import EngineConfig

if TYPE_CHECKING:
    from soothsay.bench.accepted import Report


HEADINGS = {
    "conversation": "chat",
    "translation": "transl.",
    "summarization": "summ.",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}
"""Spec-Bench's tasks, short enough for a terminal."""


def accepted(
    model: Annotated[str, typer.Argument(help="The target; see 'generate'.")],
    drafter: Annotated[
        list[str], typer.Option("--drafter", "-d", help="Measure this one; may be given repeatedly.")
    ],
    spec_bench: Annotated[
        Path,
        typer.Option(
            "--spec-bench", exists=True, dir_okay=False, help="Questions: JSON lines with category and turns."
        ),
    ],
    per_task: Annotated[
        int | None, typer.Option(min=1, show_default="all", help="Questions of each task, evenly spread.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", min=0, show_default="0", help="May be given repeatedly."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes of a draft tree, at most, the root included.")
    ] = EngineConfig.max_tree,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of all answers.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time; changes no number.")] = 8,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    to_json: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all numbers to a file.")
    ] = None,
) -> None:
    """Tokens a step by task of Spec-Bench, and whether every answer is plain decoding's.

    Tokens over steps, a step's bonus token counted and the pass over the prompt not, as on Spec-Bench's
    leaderboard: plain decoding has 1.00. "overall" is the mean over all steps of all questions, so that long
    answers weigh more. A second turn is asked behind plain decoding's answer to the first, for all drafters
    alike. Ends with 1 if any answer differs.
    """
    with notice(f"loading {model} ..."):
        from soothsay import LLM
        from soothsay.bench.accepted import bench_accepted, read_questions
        from soothsay.train.evaluate import measuring

        questions = read_questions(spec_bench, per_task)
        llm = LLM(model, drafter="none", dtype=dtype, config=measuring(batch, nodes, max_context))
    with progress_bar("answering") as progress:
        report = bench_accepted(
            llm,
            questions,
            {spec: spec for spec in drafter},
            temperatures=temperature or [0.0],
            max_tokens=max_tokens,
            seed=seed,
            progress=progress,
        )
    if markdown:
        print(_markdown(report))
    else:
        _show(report, f"{Path(model).name}: tokens a step, trees of at most {nodes} nodes")
    if to_json is not None:
        conditions = {
            "model": model,
            "dtype": dtype,
            "nodes": nodes,
            "max_tokens": max_tokens,
            "seed": seed,
            "per_task": per_task,
        }
        to_json.write_text(json.dumps({**conditions, **report.to_json()}, indent=1) + "\n")
    if any(row.overall.different for row in report.rows):
        raise typer.Exit(1)


def _cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells of each row."""
    tasks = list(report.rows[0].scores)
    rows = [
        [
            row.drafter,
            f"{row.temperature:g}",
            *(f"{row.scores[task].accepted:.2f}" if task in row.scores else "" for task in tasks),
            f"{row.overall.answers - row.overall.different}/{row.overall.answers}",
        ]
        for row in report.rows
    ]
    return ["drafter", "T", *(HEADINGS.get(task, task) for task in tasks), "equal"], rows


def _markdown(report: Report) -> str:
    headings, rows = _cells(report)
    ruler = ["---", *("---:" for _ in headings[1:])]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ruler, *escaped))


def _show(report: Report, title: str) -> None:
    headings, rows = _cells(report)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=Text(title),
        caption="T: temperature; equal: answers that are plain decoding's, token by token",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(headings[0], overflow="fold", min_width=16)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells, row in zip(rows, report.rows, strict=True):
        different = row.overall.different
        table.add_row(*(Text(cell) for cell in cells[:-1]), Text(cells[-1], "bold red" if different else ""))
    console = Console(highlight=False)
    console.print(table)
    if any(row.overall.different for row in report.rows):
        alarm = " Answers are not plain decoding's. This must never happen: 'soothsay verify' says more."
        console.print(Text.assemble((" DIFFERENT ANSWERS ", "bold white on red"), alarm), soft_wrap=True)
    if report.skipped:
        console.print(f"{report.skipped} turns were skipped: too long for the context.")
