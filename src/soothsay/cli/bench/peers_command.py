"""`soothsay bench peers`: compares engines that run the same weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.bench.bench_plans import PeerPlan
from soothsay.cli.bench.bench_options import BenchOptions, check_charts, known_dtypes, save_chart
from soothsay.cli.progress import stage_bars
from soothsay.cli.tables import numbers_table, wide_table
from soothsay.options import shared

if TYPE_CHECKING:
    from soothsay.bench.peers.peer_bench import PeerBench
    from soothsay.bench.peers.peer_results import PeerResults

SUSPICIOUS = 8
"""With fewer leading tokens equal to ours, of 32, an engine probably runs another model."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Compare engines that run the same weights. Each has its own process, and they take turns.

    It measures decoding, passes of 4, 8 and 16 rows after a context of 128 tokens, and a prompt of 512. With
    --spec-bench it also measures whole answers, by each engine with and without its own prompt lookup. All
    engines run a GGUF file as it is; other weights are exported for them.
    """

    plan: PeerPlan
    to_json: Path | None = shared(BenchOptions, "journal")
    png: Path | None = shared(BenchOptions, "png")

    def run(self) -> None:
        """Measure, and show the results."""
        is_file = self.plan.model.endswith(".gguf")
        dtypes = known_dtypes(self.plan.dtypes, ("auto",) if is_file else ("bfloat16",))
        from soothsay.bench.peers.peer_bench import PeerBench
        from soothsay.bench.peers.peer_chart import answers_chart

        if self.png is not None:
            if self.plan.questions is None:
                raise typer.BadParameter("--png draws whole answers: add --spec-bench FILE")
            check_charts(self.png)
        with stage_bars() as progress:
            bench = PeerBench(replace(self.plan, dtypes=[*dtypes]), self.to_json, progress)
            results = bench.run()
        _show(results, bench)
        save_chart(self.png, lambda: answers_chart(results, dtypes))


def _show(results: PeerResults, bench: PeerBench) -> None:
    console = Console(highlight=False)
    for weights in bench.dtypes:
        console.print(_speeds(results, weights, bench))
        _warn(results, weights, console)
        if bench.questions:
            console.print(_answers(results, weights))
    for note in bench.notes:
        console.print(Text(note, "dim"), soft_wrap=True)


def _speeds(results: PeerResults, dtype: str, bench: PeerBench) -> Table:
    from soothsay.bench.peers.peer_bench import CONTEXT, PROMPT, VERIFIED
    from soothsay.bench.peers.peer_results import OURS

    table = numbers_table(
        ("", "engine"),
        ("ms", "tokens/s", "of ours", "equal"),
        title=f"weights in {dtype}",
        caption=f"median of {bench.plan.rounds} rounds, {bench.threads} threads; "
        "equal: leading tokens, of 32",
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
    title = f"whole answers, weights in {dtype}: tokens a second, mean over prompts"
    table = wide_table(["", *(HEADINGS.get(task, task) for task in rates)], title=title)
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
