"""`soothsay bench peers`, `stack` and `learn`: other engines, each part's gain, and that of learning."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.bench.bench_plans import BenchOptions, LearnPlan, PeerPlan, StackPlan
from soothsay.cli.bench.bench_options import check_charts, known_dtypes, save_chart, save_numbers
from soothsay.cli.tables import numbers_table, records_table
from soothsay.cli.terminal import notice, progress_bar, stage_bars
from soothsay.options import FILE, REQUIRED, CommonOptions, argument, shared

if TYPE_CHECKING:
    from soothsay.bench.learn import LearnReport
    from soothsay.bench.peers.peer_bench import PeerBench
    from soothsay.bench.peers.peer_results import PeerResults
    from soothsay.bench.stack_results import StackResults, StackRow


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
        from soothsay.bench.peers.peer_results import answers_chart

        if self.png is not None:
            if self.plan.questions is None:
                raise typer.BadParameter("--png draws whole answers: add --spec-bench FILE")
            check_charts(self.png)
        with stage_bars() as progress:
            bench = PeerBench(replace(self.plan, dtypes=[*dtypes]), self.to_json, progress)
            results = bench.run()
        _show_peers(results, bench)
        save_chart(self.png, lambda: answers_chart(results, dtypes))


def _show_peers(results: PeerResults, bench: PeerBench) -> None:
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

    caption = f"median of {bench.plan.rounds} rounds, {bench.threads} threads; equal: leading tokens, of 32"
    numbers = "ms", "tokens/s", "of ours", "equal"
    table = numbers_table(("", "engine"), numbers, title=f"weights in {dtype}", caption=caption)
    measures = {"decode": f"one token, context {CONTEXT}", "prompt": f"a prompt of {PROMPT} tokens"}
    for rows in VERIFIED:
        passes = "a pass of 1 row" if rows == 1 else f"a pass of {rows} rows"
        measures[f"verify {rows}"] = f"{passes}, context {CONTEXT}"
    agreement = results.agreement(dtype)
    for measure, title in measures.items():
        times = results.medians(measure, dtype)
        table.add_section()
        for engine, (seconds, count) in sorted(times.items(), key=lambda item: item[0] != OURS):
            shown = seconds / count if measure == "decode" else seconds
            equal = str(agreement.get(engine, "")) if measure == "decode" else ""
            rate = "" if measure.startswith("verify") else f"{count / seconds:.1f}"
            ratio = "" if engine == OURS else f"{seconds / times[OURS][0]:.2f}x"
            name = title if engine == OURS else ""
            table.add_row(name, engine, f"{1e3 * shown:.2f}", rate, ratio, equal)
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
    from soothsay.bench.spec.spec_page import HEADINGS

    rates = results.rates(dtype)
    title = f"whole answers, weights in {dtype}: tokens a second, mean over prompts"
    headings = [HEADINGS.get(task, task) for task in rates]
    table = numbers_table([""], headings, title=Text(title), dense=True)
    contestants = list(next(iter(rates.values()), {}))
    for engine, mode in sorted(contestants, key=lambda one: (one[0] != OURS, one)):
        table.add_row(f"{engine}, {_short(mode)}", *(f"{of[engine, mode]:.1f}" for of in rates.values()))
    table.add_section()
    for engine, mode in contestants:
        if engine == OURS and mode != PLAIN:
            ratios = (of[engine, mode] / of[OURS, PLAIN] for of in rates.values())
            table.add_row(f"{OURS}, {_short(mode)} / {PLAIN}", *(f"{ratio:.2f}x" for ratio in ratios))
    if any(engine != OURS for engine, _ in contestants):
        ours, theirs = (
            [max(of[one] for one in contestants if (one[0] == OURS) is own) for of in rates.values()]
            for own in (True, False)
        )
        table.add_row("our best / theirs", *(f"{a / b:.2f}x" for a, b in zip(ours, theirs, strict=True)))
    return table


def _short(mode: str) -> str:
    """A drafter without its options, which may be long paths."""
    return re.sub(r"\(.*?\)", "", mode)


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
            from soothsay.bench.stack_bench import StackBench
            from soothsay.bench.stack_results import stack_chart
        with progress_bar("measuring") as progress, StackBench(self.plan, self.to_json, progress) as bench:
            results = bench.run()
        rows, console = results.rows(), Console(highlight=False)
        console.print(_rungs(rows, self.plan))
        for note in (*bench.notes, *_notes(results)):
            console.print(Text(note, "dim"), soft_wrap=True)
        save_chart(self.png, lambda: stack_chart(rows, _title(self.plan)))


def _title(plan: StackPlan) -> str:
    return f"{Path(plan.model).name}: {plan.requests} greedy answers of {plan.tokens} tokens"


def _rungs(rows: list[StackRow], plan: StackPlan) -> Table:
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
        "cache has longer prompts. So the last product holds where the other factors hold for them too."
    ]
    if agreement := results.agreement():
        equal, prompts = agreement
        differ = (
            f"transformers and this engine give equal answers to {equal} of {prompts} prompts. They round at "
            "different places, so they may decide a near tie differently."
        )
        notes.insert(0, differ)
    return notes


@dataclass(frozen=True, kw_only=True)
class Learn:
    """Answer a stream of requests plainly, with a drafter as it is, and with one that learns.

    The file of --json is written anew after each window. An interruption shows what was measured until then.
    Exits with 1 if an answer differs from plain decoding's.
    """

    model: str = shared(CommonOptions, "model")
    file: Path = argument(REQUIRED, "The stream: JSON lines with 'messages' or 'prompt'.", **FILE)
    plan: LearnPlan
    png: Path | None = shared(BenchOptions, "png")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Answer the stream, and show the results."""
        check_charts(self.png)
        latest: LearnReport | None = None
        try:
            loading = f"reading {self.file}, loading {self.model} ..."
            with progress_bar("answering", "requests", paced=True, loading=loading) as show:
                from soothsay.bench.learn import bench_learn
                from soothsay.bench.prompts import read_prompts

                entries = read_prompts(self.file)[: self.plan.requests]
                if (kept := self.plan.held_out) >= len(entries):
                    raise typer.BadParameter(f"--held-out {kept}: the stream has {len(entries)} requests")

                def progress(report: LearnReport) -> None:
                    nonlocal latest
                    latest = report
                    show(report.answered, len(entries), report.tokens)
                    save_numbers(self.to_json, asdict(report))

                bench_learn(self.model, entries, self.plan, progress)
        finally:
            if latest is not None and latest.windows:
                _show_learning(latest, self.png)
        if latest is not None and latest.different:
            raise typer.Exit(1)


def _show_learning(report: LearnReport, png: Path | None) -> None:
    """Print the table, and draw the chart if there is a file for it."""
    from soothsay.bench.learn import learn_chart

    Console(highlight=False).print(_learning(report))
    save_chart(png, lambda: learn_chart(report))


def _learning(report: LearnReport) -> Table:
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
