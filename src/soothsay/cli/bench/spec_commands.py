"""`soothsay bench spec`, `length` and `report`: drafters on questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from soothsay.bench.bench_plans import BenchOptions, LengthPlan, SpecOptions
from soothsay.cli.bench.bench_options import save_chart, show, write_markdown
from soothsay.cli.terminal import fitting_drafters, notice, progress_bar, say
from soothsay.config import DType
from soothsay.files import write_text
from soothsay.options import BUNDLED, FILE, ModelOptions, argument, common, flag, optional, shared

if TYPE_CHECKING:
    from soothsay.bench.spec.spec_results import SpecResults
    from soothsay.drafters.base import Drafter, Target
    from soothsay.drafters.registry import DrafterSpec


USUAL, MOST = ("auto", "suffix", "prompt-lookup", "recycling"), 7
"""The drafters that need no training, and the largest number that is measured if none is named."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Measure which drafter is fastest on Spec-Bench or your own prompts, and check that answers stay equal.

    Plain decoding and each drafter answer every question in turn. Speed-up is the leaderboard's: mean tokens
    a second over questions, with the prompt, divided by that of plain decoding. "accepted" is tokens a step
    with the bonus token, without the pass over the prompt. "predicted" is the speed-up that theory expects.
    Second turns follow plain decoding's answers to the first. It ends with a recommendation. Ctrl-C shows
    the results so far, with exit code 130. The exit code is 1 if an answer differs from plain decoding's.
    """

    model: str = common("model", default=BUNDLED)
    prompts: Path = shared(BenchOptions, "prompts")
    drafter: list[str] | None = optional(
        f"those of {', '.join(USUAL)} that fit the model, and its trained ones; {MOST} at most", "-d"
    )
    """Drafter to measure; may be repeated."""

    options: SpecOptions
    never_slower: bool = flag()
    """Show 95% intervals, and exit with 1 if a drafter is slower than plain decoding."""

    dtype: DType = shared(ModelOptions, "dtype")
    device: str = shared(ModelOptions, "device")
    kernels: str = shared(ModelOptions, "kernels")
    max_context: int | None = shared(ModelOptions, "max_context")
    to_json: Path | None = shared(BenchOptions, "journal")
    markdown: Path | None = shared(BenchOptions, "markdown")
    html: Path | None = shared(BenchOptions, "html")

    def run(self) -> None:
        """Measure, and show the results."""
        options = self.options
        if options.verifiers and not any(options.temperatures):
            raise typer.BadParameter("--verifier needs -t above 0: at temperature 0 all verifiers are match")
        if options.trees and self.to_json is None:
            raise typer.BadParameter("--trees needs --json FILE, where the trees go")
        with notice(f"loading {self.model} ..."):
            from soothsay import LLM
            from soothsay.bench.prompts import SPEC_BENCH, by_task, in_turns, read_prompts
            from soothsay.bench.spec.spec_bench import SpecBench, SpecPlan, serving
            from soothsay.model.timing.pass_measuring import measure_passes

            tasks = by_task(read_prompts(self.prompts), options.per_task)
            questions = in_turns(tasks.values())
            config = serving(max(options.batches), options.nodes, self.max_context)
            own = {name: getattr(self, name) for name in ("dtype", "device", "kernels")}
            llm = LLM(self.model, drafter="none", config=config, **own)
            drafters: Mapping[str, DrafterSpec] = {name: name for name in self.drafter or ()}
            plan = SpecPlan(drafters or _fitting(llm.engine.target), **vars(options))
            about = {"model": self.model, "dtype": llm.about()["dtype"], "kernels": self.kernels}
            if self.prompts != SPEC_BENCH:
                about["prompts"] = self.prompts.name
            times = partial(measure_passes, llm.model, llm.config.max_context or 0)
        stopped = False
        with progress_bar("answering", limit=plan.limit) as progress:
            bench = SpecBench(llm, questions, plan, about, self.to_json, progress, times)
            names, limit = [one.name for one in bench.contenders], plan.limit / 60
            at_most = f"at most {limit:g} minutes" if math.isfinite(limit) else "without a limit of time"
            asked = (
                f"{len(questions)} questions of {len(tasks)} tasks"
                if len(tasks) > 1
                else f"{len(questions)} prompts"
            )
            said = f"{asked}, in turns by {', '.join(names)}; {at_most}, after a warm-up"
            say(said, stderr=True, style="dim")
            try:
                bench.run()
            except KeyboardInterrupt:
                stopped = True
        results = bench.results
        if stopped:
            resumes = "" if self.to_json is None else "; the same command goes on"
            say(f"stopped after {results.prompts} of {asked}{resumes}", stderr=True)
            if not results.rows():
                raise typer.Exit(130)
        wrong = finish([results], self.markdown, self.html, self.never_slower)
        if stopped or wrong:
            raise typer.Exit(130 if stopped else 1)


def _fitting(target: Target) -> dict[str, Drafter]:
    """The drafters that are measured if none is named, without those that run the target itself to draft."""
    from soothsay.drafters.registry import TRAINED

    return dict(islice(fitting_drafters(target, (*USUAL, *TRAINED)).items(), MOST))


def finish(
    every: Sequence[SpecResults], markdown: Path | None, html: Path | None, never_slower: bool = False
) -> bool:
    """Write the files that were asked for, and show the tables.

    Returns whether an answer differs, or a drafter that must never be slower is.
    """
    from soothsay.bench.spec.spec_page import different, interval_table, page, slower
    from soothsay.bench.spec.spec_page import markdown as as_markdown

    if markdown is not None:
        write_markdown(as_markdown(every), markdown)
    if markdown != Path("-"):
        for results in every:
            _show(results)
    if html is not None:
        write_text(html, page(every))
    if never_slower:
        for results in every:
            show(interval_table(results))
    return any(different(results) or (never_slower and slower(results)) for results in every)


def _show(results: SpecResults) -> None:
    from soothsay.bench.spec.recommendation import recommendations
    from soothsay.bench.spec.spec_page import different, notes, table

    settings = dict.fromkeys((row.temperature, row.batch) for row in results.rows())
    show(*(table(results, setting) for setting in settings))
    if different(results):
        alarm = " Answers are not plain decoding's. This must never happen: 'soothsay verify' says more."
        show(Text.assemble((" DIFFERENT ANSWERS ", "bold white on red"), alarm))
    show(*map(Text, notes(results)))
    show(*(Text(f"  {command}", "bold") for _, command in recommendations(results)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show results of 'bench spec' again, several runs together. Nothing is measured.

    The exit code is 1 if an answer differed from plain decoding's.
    """

    files: list[Path] = argument(**FILE)
    """What 'bench spec --json' wrote."""

    markdown: Path | None = shared(BenchOptions, "markdown")
    html: Path | None = shared(BenchOptions, "html")
    never_slower: bool = shared(Spec, "never_slower")

    def run(self) -> None:
        """Read the files, and show them."""
        from soothsay.bench.spec.spec_results import SpecResults

        every = [SpecResults.read(file) for file in self.files]
        if finish(every, self.markdown, self.html, self.never_slower):
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Length:
    """Measure tokens a step and speed-up by position in long answers, and by length of the prompt.

    Plain decoding and each drafter answer every prompt in turn. A stretch of an answer in which 80% of the
    4-grams stood earlier in it is a loop: it is left out, and what follows it. Speed-up is in decoding, over
    plain decoding in the same stretches. Exits with 1 if an answer differs from plain decoding's.
    """

    plan: LengthPlan
    to_json: Path | None = shared(BenchOptions, "journal")
    markdown: Path | None = shared(BenchOptions, "markdown")
    png: Path | None = shared(BenchOptions, "png")

    def run(self) -> None:
        """Measure, and show the results."""
        loading = f"loading {self.plan.model} ..."
        with progress_bar("answering", paced=True, loading=loading) as progress:
            from soothsay import LLM
            from soothsay.bench.length import LengthBench, length_chart, length_table
            from soothsay.bench.spec.spec_bench import serving

            config, kernels = serving(1, self.plan.nodes), self.plan.kernels
            llm = LLM(self.plan.model, drafter="none", config=config, kernels=kernels)
            bench = LengthBench(llm, self.plan, self.to_json, progress)
            results = bench.run()
        left_out = f"{bench.left_out} answers left out: the context is too short"
        show(length_table(results), *([left_out] if bench.left_out else []), markdown=self.markdown)
        save_chart(self.png, lambda: length_chart(results))
        if results.different:
            raise typer.Exit(1)
