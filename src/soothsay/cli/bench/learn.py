"""`soothsay bench learn`: measures what learning while serving gains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import AnswerTemperatureOption, JsonOption, PngOption, check_charts
from soothsay.cli.options import AnswerTokensOption, ModelArgument
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.files import write_json
from soothsay.plotting import save_png

if TYPE_CHECKING:
    from soothsay.bench.learn import LearnReport


def learn(
    model: ModelArgument,
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="The stream: JSON lines with 'messages' or 'prompt'.",
        ),
    ],
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="A trained drafter, or a composition with one.")
    ] = "auto",
    share: Annotated[
        float, typer.Option("--share", min=0.001, max=1, help="Share of a core's time for learning.")
    ] = 0.1,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests, at most.")] = 2000,
    held_out: Annotated[
        int, typer.Option("--held-out", min=0, help="Requests at the end that are reported apart.")
    ] = 200,
    window: Annotated[int, typer.Option("--window", min=1, help="Requests between two measurements.")] = 20,
    every: Annotated[
        int,
        typer.Option("--every", min=1, help="Compare in one of so many windows, and in all held-out ones."),
    ] = 1,
    max_tokens: AnswerTokensOption = 64,
    temperature: AnswerTemperatureOption = 0.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests at a time.")] = 1,
    png: PngOption = None,
    to_json: JsonOption = None,
) -> None:
    """Answer a stream of requests plainly, with a drafter as it is, and with one that learns.

    The file of --json is written anew after each window. An interruption shows what was measured until then.
    Exits with 1 if an answer differs from plain decoding's.
    """
    check_charts(png)
    latest: LearnReport | None = None
    try:
        with ExitStack() as loading, progress_bar("answering", "requests", paced=True) as show:
            loading.enter_context(notice(f"reading {file}, loading {model} ..."))
            from soothsay.bench.learn import bench_learn
            from soothsay.bench.prompts import read_prompts

            entries = read_prompts(file)[:requests]
            if held_out >= len(entries):
                raise typer.BadParameter(f"--held-out {held_out}: the stream has {len(entries)} requests")

            def progress(report: LearnReport) -> None:
                nonlocal latest
                latest = report
                loading.close()
                show(report.answered, len(entries), report.tokens)
                if to_json is not None:
                    write_json(to_json, asdict(report), indent=1)

            bench_learn(
                model,
                entries,
                drafter=drafter,
                share=share,
                held_out=held_out,
                window=window,
                every=every,
                max_tokens=max_tokens,
                temperature=temperature,
                batch=batch,
                progress=progress,
            )
    finally:
        if latest is not None and latest.windows:
            _show(latest, png)
    if latest is not None and latest.different:
        raise typer.Exit(1)


def _show(report: LearnReport, png: Path | None) -> None:
    """Print the table, and draw the chart if there is a file for it."""
    from soothsay.bench.learn_chart import learn_chart

    Console(highlight=False).print(_table(report))
    if png is not None:
        save_png(learn_chart(report), png, dpi=150)


def _table(report: LearnReport) -> Table:
    from soothsay.bench.learn import CONTENDERS, PLAIN

    table = numbers_table(
        ("requests", ""),
        ("tokens a step", "tokens/s", "over plain", "tokens per CPU second"),
        title=f"{report.drafter}, learning in {report.share:.0%} of a core's time",
        caption=f"{report.compared - report.different} of {report.compared} answers equal plain decoding's; "
        "windows in which all three ran",
    )
    for held_out in (False, True):
        table.add_section()
        plain = report.total(PLAIN, held_out=held_out)
        for name in CONTENDERS if plain.tokens else ():
            run = report.total(name, held_out=held_out)
            table.add_row(
                ("held out" if held_out else "stream") if name == PLAIN else "",
                name,
                f"{run.accepted:.2f}",
                f"{run.tokens / run.seconds:.0f}",
                f"{run.tokens / run.seconds / (plain.tokens / plain.seconds):.2f}x",
                f"{run.tokens / run.cpu:.0f}",
            )
    return table
