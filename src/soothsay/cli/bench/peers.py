"""`soothsay bench peers`: compares engines that run the same weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from soothsay.cli.bench.bench_options import (
    JournalOption,
    PngOption,
    check_charts,
    dtypes_option,
    known_dtypes,
)
from soothsay.cli.options import DrafterOption, ModelArgument
from soothsay.cli.tables import numbers_table
from soothsay.plotting import save_png

if TYPE_CHECKING:
    from soothsay.bench.peers.peer_bench import PeerBench, PeerPlan
    from soothsay.bench.peers.peer_results import PeerResults

SUSPICIOUS = 8
"""With fewer leading tokens equal to ours, of 32, an engine probably runs another model."""


def peers(
    model: ModelArgument,
    dtype: Annotated[list[str] | None, dtypes_option("bfloat16; auto for a .gguf file")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, openvino or llama.cpp; may be repeated.", show_default="all that are there"
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[PEER=]PATH",
            help="Python interpreter with the packages of all peers, or of one; may be repeated.",
            show_default="this one",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded in a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; times are medians.")] = 5,
    threads: Annotated[
        int | None, typer.Option(min=1, show_default="torch's", help="Threads of each engine.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--spec-bench",
            exists=True,
            dir_okay=False,
            help="Also measure whole answers to the prompts of this file.",
        ),
    ] = None,
    per_task: Annotated[int, typer.Option(min=1, help="Number of prompts of each task.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    drafter: DrafterOption = "auto",
    lookup_tokens: Annotated[
        int,
        typer.Option(min=0, help="Draft tokens of the peers' prompt lookup; 0: as their makers recommend."),
    ] = 0,
    draft_model: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A draft model for llama.cpp and openvino, if MODEL is a GGUF file: another GGUF file.",
            show_default="none",
        ),
    ] = "",
    work: Annotated[
        Path,
        typer.Option(file_okay=False, help="Directory for exported models, which are used again, and logs."),
    ] = Path("peers"),
    to_json: JournalOption = None,
    png: PngOption = None,
) -> None:
    """Compare engines that run the same weights. Each has its own process, and they take turns.

    It measures decoding, passes of 4, 8 and 16 rows after a context of 128 tokens, and a prompt of 512. With
    --spec-bench it also measures whole answers, by each engine with and without its own prompt lookup. All
    engines run a GGUF file as it is; other weights are exported for them.
    """
    dtypes = known_dtypes(dtype or (["auto"] if model.endswith(".gguf") else None))
    import torch

    from soothsay.bench.peers.peer_bench import PEERS, PeerBench, PeerPlan
    from soothsay.bench.peers.peer_chart import answers_chart

    if png is not None:
        if questions is None:
            raise typer.BadParameter("--png draws whole answers: add --spec-bench FILE")
        check_charts(png)
    plan = PeerPlan(
        model=model,
        work=work,
        threads=threads or torch.get_num_threads(),
        dtypes=dtypes,
        peers=peer or PEERS,
        pythons=_pythons(peer_python or ()),
        tokens=tokens,
        rounds=rounds,
        questions=questions,
        per_task=per_task,
        max_tokens=max_tokens,
        drafter=drafter,
        lookup_tokens=lookup_tokens,
        draft_model=draft_model,
    )
    with _Bars() as bars:
        bench = PeerBench(plan, to_json, bars)
        results = bench.run()
    _show(results, bench)
    if png is not None:
        save_png(answers_chart(results, dtypes), png, dpi=150)


class _Bars:
    """Progress bars on stderr, one for each part of the work, if stderr is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, description: str, done: int, steps: int) -> None:
        """Update the bar of a part and hide the others."""
        tasks = [task.id for task in self._progress.tasks if task.description == description]
        for other in self._progress.task_ids:
            self._progress.update(other, visible=other in tasks)
        task = tasks[0] if tasks else self._progress.add_task(description, total=None)
        self._progress.update(task, completed=done, total=steps or None)


def _pythons(options: Sequence[str]) -> dict[str, str]:
    """Parse `["A", "openvino=B"]` into `{"": "A", "openvino": "B"}`, where "" is any other engine."""
    pythons = {}
    for option in options:
        peer, equals, path = option.partition("=")
        pythons.update({peer: path} if equals else {"": option})
    return pythons


def _show(results: PeerResults, bench: PeerBench) -> None:
    console = Console(highlight=False)
    for weights in bench.plan.dtypes:
        console.print(_speeds(results, weights, bench.plan))
        _warn(results, weights, console)
        if bench.questions:
            console.print(_answers(results, weights))
    for note in bench.notes:
        console.print(Text(note, "dim"), soft_wrap=True)


def _speeds(results: PeerResults, dtype: str, plan: PeerPlan) -> Table:
    from soothsay.bench.peers.peer_bench import CONTEXT, PROMPT, VERIFIED
    from soothsay.bench.peers.peer_results import OURS

    table = numbers_table(
        ("", "engine"),
        ("ms", "tokens/s", "of ours", "equal"),
        title=f"weights in {dtype}",
        caption=f"median of {plan.rounds} rounds, {plan.threads} threads; equal: leading tokens, of 32",
    )
    measures = {
        "decode": f"one token, context {CONTEXT}",
        "prompt": f"a prompt of {PROMPT} tokens",
        **{
            f"verify {rows}": f"a pass of {rows} {'row' if rows == 1 else 'rows'}, context {CONTEXT}"
            for rows in VERIFIED
        },
    }
    agreement = results.agreement(dtype)
    for measure, title in measures.items():
        times = results.medians(measure, dtype)
        table.add_section()
        for engine, (seconds, count) in sorted(times.items(), key=lambda item: item[0] != OURS):
            shown = seconds / count if measure == "decode" else seconds
            equal = str(agreement.get(engine, "")) if measure == "decode" else ""
            table.add_row(
                title if engine == OURS else "",
                engine,
                f"{1e3 * shown:.2f}",
                "" if measure.startswith("verify") else f"{count / seconds:.1f}",
                "" if engine == OURS else f"{seconds / times[OURS][0]:.2f}x",
                equal,
            )
    return table


def _warn(results: PeerResults, dtype: str, console: Console) -> None:
    """Warn if an engine's tokens differ much from ours, except in int4, where engines round differently."""
    for engine, equal in results.agreement(dtype).items():
        if equal < SUSPICIOUS and dtype != "int4":
            line = f"{engine} agrees in {equal} of 32 leading tokens only: does it run the same model?"
            console.print(Text(line, "bold red"), soft_wrap=True)


def _answers(results: PeerResults, dtype: str) -> Table:
    """Return a table of whole answers: tokens a second by task, and speed-ups."""
    from soothsay.bench.peers.peer_results import OURS, PLAIN
    from soothsay.bench.report.speedup_tables import HEADINGS

    rates = results.rates(dtype)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"whole answers, weights in {dtype}: tokens a second, mean over prompts",
        title_justify="left",
    )
    table.add_column("", no_wrap=True)
    for task in rates:
        table.add_column(HEADINGS.get(task, task), justify="right", no_wrap=True)
    contestants = list(next(iter(rates.values()), {}))
    for engine, mode in sorted(contestants, key=lambda one: (one[0] != OURS, one)):
        table.add_row(f"{engine}, {_short(mode)}", *(f"{of[engine, mode]:.1f}" for of in rates.values()))
    table.add_section()
    for engine, mode in contestants:
        if engine == OURS and mode != PLAIN:
            ratios = (of[engine, mode] / of[OURS, PLAIN] for of in rates.values())
            table.add_row(f"{OURS}, {_short(mode)} / {PLAIN}", *(f"{ratio:.2f}x" for ratio in ratios))
    if any(engine != OURS for engine, _ in contestants):
        best = [
            tuple(max(of[one] for one in contestants if (one[0] == OURS) is ours) for ours in (True, False))
            for of in rates.values()
        ]
        table.add_row("our best / theirs", *(f"{own / other:.2f}x" for own, other in best))
    return table


def _short(mode: str) -> str:
    """A drafter without its options, which may be long paths."""
    return re.sub(r"\(.*?\)", "", mode)
