"""`soothsay bench peers`, `equality`, `stack` and `learn`: other engines, and what each part gains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer
from rich.text import Text

from soothsay.bench.bench_plans import BenchOptions, EqualityPlan, LearnPlan, PeerPlan, StackPlan
from soothsay.cli.bench.bench_options import check_dtypes, save_chart, save_numbers, show
from soothsay.cli.terminal import notice, progress_bar, stage_bars
from soothsay.config import DType
from soothsay.options import PROMPTS, argument, common, shared

if TYPE_CHECKING:
    from soothsay.bench.learn import LearnReport


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Compare engines that run the same weights. Each has its own process, and they take turns.

    It measures decoding, passes of 4, 8 and 16 rows after a context of 128 tokens, and a prompt of 512. With
    --spec-bench it also measures whole answers, by each engine with and without its own prompt lookup. All
    engines run a GGUF file as it is. Other weights are exported for OpenVINO, and not run by llama.cpp.
    """

    plan: PeerPlan
    to_json: Path | None = shared(BenchOptions, "journal")

    def run(self) -> None:
        """Measure, and show the results."""
        check_dtypes(self.plan.dtypes or (), get_args(DType))
        from soothsay.bench.peers.peer_bench import PeerBench
        from soothsay.bench.peers.peer_results import answers_table, speeds_table, suspicions

        with stage_bars():
            bench = PeerBench(self.plan, self.to_json)
            results = bench.run()
        for weights in bench.dtypes:
            warnings = (Text(warning, "bold red") for warning in suspicions(results, weights))
            show(speeds_table(results, weights, self.plan.rounds), *warnings)
            if bench.questions:
                show(answers_table(results, weights))
        show(*bench.notes)


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Compare each engine's greedy answers with those of its own plain decoding: do the words change?

    Engines are transformers, with prompt lookup and assisted generation; llama.cpp's server, with n-grams and
    a draft model; OpenVINO GenAI, with prompt lookup; and this one. Each also answers in batches of 4 and 16.
    Answers are compared up to their end token. The margin is that of the two best tokens where answers part,
    by a pass in float32. Exits with 1 if an answer of this engine differs.
    """

    plan: EqualityPlan
    to_json: Path | None = shared(BenchOptions, "journal")
    png: Path | None = shared(BenchOptions, "png")
    markdown: Path | None = shared(BenchOptions, "markdown")

    def run(self) -> None:
        """Collect the answers, and show what differs."""
        from soothsay.bench.peers.equality_bench import EqualityBench
        from soothsay.bench.peers.equality_results import equality_chart, equality_table
        from soothsay.bench.peers.peer_results import OURS

        check_dtypes(self.plan.dtypes or (), (*get_args(DType), "float16"))
        with stage_bars():
            bench = EqualityBench(self.plan, self.to_json)
            results = bench.run()
        show(equality_table(results), *bench.notes, markdown=self.markdown)
        save_chart(self.png, lambda: equality_chart(results))
        if any(row.partings for row in results.rows() if row.way[0] == OURS):
            raise typer.Exit(1)


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
        with notice(f"loading {self.plan.model} ..."):
            from soothsay.bench.stack_bench import StackBench
            from soothsay.bench.stack_results import stack_chart, stack_notes, stack_table
        with progress_bar("measuring") as progress, StackBench(self.plan, self.to_json, progress) as bench:
            results = bench.run()
        rows, plan = results.rows(), self.plan
        title = f"{Path(plan.model).name}: {plan.requests} greedy answers of {plan.tokens} tokens"
        show(stack_table(rows, plan.rounds, title), *bench.notes, *stack_notes(results))
        save_chart(self.png, lambda: stack_chart(rows, title))


@dataclass(frozen=True, kw_only=True)
class Learn:
    """Answer a stream of requests plainly, with a drafter as it is, and with one that learns.

    The file of --json is written anew after each window. An interruption shows what was measured until then.
    Exits with 1 if an answer differs from plain decoding's.
    """

    model: str = common("model")
    file: Path = argument(help=f"The stream. {PROMPTS}", exists=True)
    plan: LearnPlan
    png: Path | None = shared(BenchOptions, "png")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Answer the stream, and show the results."""
        latest: LearnReport | None = None
        try:
            loading = f"reading {self.file}, loading {self.model} ..."
            with progress_bar("answering", "requests", paced=True, loading=loading) as tell:
                from soothsay.bench.learn import bench_learn, learn_chart, learn_table
                from soothsay.bench.prompts import read_prompts

                entries = read_prompts(self.file)[: self.plan.requests]
                if (kept := self.plan.held_out) >= len(entries):
                    raise typer.BadParameter(f"--held-out {kept}: the stream has {len(entries)} requests")

                def progress(report: LearnReport) -> None:
                    nonlocal latest
                    latest = report
                    tell(report.answered, len(entries), report.tokens)
                    save_numbers(self.to_json, asdict(report))

                bench_learn(self.model, entries, self.plan, progress)
        finally:
            if latest is not None and latest.windows:
                show(learn_table(latest))
                save_chart(self.png, lambda: learn_chart(latest))
        if latest is not None and latest.different:
            raise typer.Exit(1)
