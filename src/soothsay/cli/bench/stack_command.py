"""`soothsay bench stack`: the gains of integers, speculation, batching and prefix caching in one table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.bench.bench_plans import StackPlan
from soothsay.cli.bench.bench_options import BenchOptions, check_charts, save_chart
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import records_table
from soothsay.cli.terminal import notice
from soothsay.options import shared

if TYPE_CHECKING:
    from soothsay.bench.stack.stack_results import StackResults, StackRow


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Measure the whole gain, one thing after the other: each rung adds one to the rung before.

    The rungs are transformers in bfloat16, this engine in bfloat16, integers, speculation, 4 and 16 requests
    at once, and a prefix cache. All answer the same prompts greedily, with a fixed number of tokens, and take
    turns. The prefix cache has longer prompts; its factor is over the same prompts without the cache. The
    command fails if speculation, batches or the cache change a token.
    """

    plan: StackPlan
    to_json: Path | None = shared(BenchOptions, "journal")
    png: Path | None = shared(BenchOptions, "png")

    def run(self) -> None:
        """Measure, and show the results."""
        check_charts(self.png)
        with notice(f"loading {self.plan.model} ..."):
            from soothsay.bench.stack.stack_bench import StackBench
            from soothsay.bench.stack.stack_chart import stack_chart
        with progress_bar("measuring") as progress, StackBench(self.plan, self.to_json, progress) as bench:
            results = bench.run()
        rows, console = results.rows(), Console(highlight=False)
        console.print(_table(rows, self.plan))
        for note in (*bench.notes, *_notes(results)):
            console.print(Text(note, "dim"), soft_wrap=True)
        save_chart(self.png, lambda: stack_chart(rows, _title(self.plan)))


def _title(plan: StackPlan) -> str:
    return f"{Path(plan.model).name}: {plan.requests} greedy answers of {plan.tokens} tokens"


def _table(rows: list[StackRow], plan: StackPlan) -> Table:
    def spread(row: StackRow) -> str:
        return "" if row.gain is None else f"{row.gain.factor.low:.2f} to {row.gain.factor.high:.2f}"

    return records_table(
        rows,
        {"each adds one thing": "{.rung.title}"},
        {
            "tokens/s": "{.rate:.1f}",
            "factor": lambda row: "" if row.gain is None else f"{row.gain.factor.median:.2f}x",
            "quartiles": spread,
            "product": lambda row: "" if row.gain is None else f"{row.gain.product.median:.2f}x",
        },
        # a base after the first is no rung: the last rung is compared with it
        style=lambda row: "dim" if row.gain is None and row is not rows[0] else "",
        title=_title(plan),
        caption=f"ratios within a round, medians and quartiles of {plan.rounds} rounds",
    )


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
