"""`soothsay bench stack`: the gains of integers, speculation, batching and prefix caching in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.bench.bench_options import JournalOption, PngOption, check_charts
from soothsay.cli.options import DrafterOption, ModelArgument
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice
from soothsay.plotting import save_png

if TYPE_CHECKING:
    from soothsay.bench.stack.stack_bench import StackPlan
    from soothsay.bench.stack.stack_results import StackResults, StackRow


def stack(
    model: ModelArgument = "sibyl",
    questions: Annotated[
        Path | None,
        typer.Option(
            "--spec-bench",
            exists=True,
            dir_okay=False,
            show_default="requests for stories",
            help="File of prompts; those to answer are evenly spread over its categories.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; factors are medians.")] = 5,
    prefix: Annotated[
        int, typer.Option(min=1, help="Tokens that the prompts of the last rung share.")
    ] = 1000,
    integers: Annotated[
        Literal["int8", "int4"],
        typer.Option(help="What weights are rounded to, if the model's files have no integers."),
    ] = "int8",
    drafter: DrafterOption = "auto",
    peer: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Whether transformers is the first rung.")
    ] = True,
    to_json: JournalOption = None,
    png: PngOption = None,
) -> None:
    """Measure the whole gain, one thing after the other: each rung adds one to the rung before.

    The rungs are transformers in bfloat16, this engine in bfloat16, integers, speculation, 4 and 16 requests
    at once, and a prefix cache. All answer the same prompts greedily, with a fixed number of tokens, and take
    turns. The prefix cache has longer prompts; its factor is over the same prompts without the cache. The
    command fails if speculation, batches or the cache change a token.
    """
    check_charts(png)
    with notice(f"loading {model} ..."):
        from soothsay.bench.stack.stack_bench import StackPlan

        plan = StackPlan(model, integers, drafter, questions, requests, tokens, rounds, prefix, peer)
    with progress_bar("measuring") as progress:
        from soothsay.bench.stack.stack_bench import StackBench

        with StackBench(plan, to_json, progress) as bench:
            results = bench.run()
    rows = results.rows()
    console = Console(highlight=False)
    console.print(_table(rows, plan))
    for note in (*bench.notes, *_notes(results)):
        console.print(Text(note, "dim"), soft_wrap=True)
    if png is not None:
        from soothsay.bench.stack.stack_chart import stack_chart

        save_png(stack_chart(rows, _title(plan)), png, dpi=150)


def _title(plan: StackPlan) -> str:
    return f"{Path(plan.model).name}: {plan.requests} greedy answers of {plan.tokens} tokens"


def _table(rows: list[StackRow], plan: StackPlan) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_title(plan),
        caption=f"ratios within a round, medians and quartiles of {plan.rounds} rounds",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("each adds one thing")
    for heading in ("tokens/s", "factor", "quartiles", "product"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, row in enumerate(rows):
        cells = ["", "", ""]
        if row.gain is not None:
            factor, product = row.gain.factor, row.gain.product
            spread = f"{factor.low:.2f} to {factor.high:.2f}"
            cells = [f"{factor.median:.2f}x", spread, f"{product.median:.2f}x"]
        beside = place > 0 and row.gain is None  # it is no rung: the last rung is compared with it
        table.add_row(row.rung.title, f"{row.rate:.1f}", *cells, style="dim" if beside else "")
    return table


def _notes(results: StackResults) -> list[str]:
    notes = [
        "From integers on, all answers to a prompt are equal, token by token: this was checked. The prefix "
        "cache has longer prompts. So the last product holds where the other factors hold for them too.",
    ]
    if agreement := results.agreement():
        equal, prompts = agreement
        differ = (
            f"transformers and this engine give equal answers to {equal} of {prompts} prompts. They round at "
            "different places, so they may decide a near tie differently."
        )
        notes.insert(0, differ)
    return notes
