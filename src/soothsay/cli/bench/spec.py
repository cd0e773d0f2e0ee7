"""`soothsay bench spec`: measures drafters on the questions of Spec-Bench."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.bench.bench_options import (
    HtmlOption,
    JournalOption,
    MarkdownOption,
    NodesOption,
    check_charts,
    write_markdown,
)
from soothsay.cli.option_groups import grouped
from soothsay.cli.options import (
    AnswerSeedOption,
    AnswerTokensOption,
    DTypeOption,
    MaxContextOption,
    ModelArgument,
)
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice
from soothsay.config import EngineConfig
from soothsay.files import write_text

if TYPE_CHECKING:
    from soothsay.bench.endpoint import Endpoint
    from soothsay.bench.spec.spec_results import SpecResults

_endpoint = partial(typer.Option, rich_help_panel="Another server")


@dataclass(frozen=True)
class EndpointOptions:
    """Servers that `bench spec` measures too."""

    endpoint: Annotated[
        list[str] | None,
        _endpoint(
            metavar="URL",
            help="Server with OpenAI's chat completions to measure too: http://localhost:8000/v1; may be "
            "repeated.",
        ),
    ] = None
    endpoint_model: Annotated[
        list[str] | None, _endpoint(help="The server's name for its model; once for each --endpoint.")
    ] = None
    api_key_env: Annotated[
        str | None, _endpoint(metavar="VARIABLE", help="Environment variable with the server's key.")
    ] = None

    def servers(self) -> list[Endpoint]:
        """The servers. Raises `typer.BadParameter`."""
        from soothsay.bench.endpoint import Endpoint

        urls, models, variable = self.endpoint or (), self.endpoint_model or (), self.api_key_env
        if len(urls) != len(models):
            raise typer.BadParameter("--endpoint needs --endpoint-model, once for each")
        key = os.environ.get(variable, "") if variable else ""
        if variable and not key:
            raise typer.BadParameter(f"--api-key-env {variable}: there is no such environment variable")
        servers = [Endpoint(url, name, key) for url, name in zip(urls, models, strict=True)]
        if len({server.name for server in servers}) < len(servers):
            raise typer.BadParameter("two of the endpoints are the same")
        return servers


@grouped
def spec(
    model: ModelArgument,
    *,
    spec_bench: Annotated[
        Path,
        typer.Option(
            "--spec-bench", exists=True, dir_okay=False, help="Questions: JSON lines with category and turns."
        ),
    ],
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Drafter to measure; may be repeated.")
    ] = None,
    per_task: Annotated[
        int | None,
        typer.Option(min=1, show_default="all", help="Number of questions of each task, evenly spread."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", "-t", min=0, show_default="0", help="Sampling temperature; may be repeated."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="1", help="Questions answered in one batch; may be repeated."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of times that each question is asked; times are medians.")
    ] = 1,
    nodes: NodesOption = EngineConfig.max_tree,
    max_tokens: AnswerTokensOption = 128,
    seed: AnswerSeedOption = 0,
    verifier: Annotated[
        list[str] | None,
        typer.Option(
            show_default="match",
            help="How draft tokens are accepted at temperatures above 0: match, rejection, specinfer, rsd, "
            "block, traversal or typical; may be repeated, for a comparison.",
        ),
    ] = None,
    trees: Annotated[
        bool, typer.Option("--trees", help="Write the draft tree of each step to the file of --json too.")
    ] = False,
    carry: Annotated[
        bool, typer.Option("--carry", help="Let drafters keep what they learn from other questions.")
    ] = False,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
    to_json: JournalOption = None,
    markdown: MarkdownOption = None,
    html: HtmlOption = None,
    others: EndpointOptions,
) -> None:
    """Measure speed-up and accepted tokens by task of Spec-Bench, and check that answers stay the same.

    Plain decoding and each drafter answer every question in turn. Speed-up is the leaderboard's: mean tokens
    a second over questions, with the prompt, divided by that of plain decoding. "accepted" is tokens a step
    with the bonus token, without the pass over the prompt. Second turns follow plain decoding's answers to
    the first. A wide terminal also shows the speed-up that theory predicts, and the best number of nodes. The
    exit code is 1 if an answer differs from plain decoding's.
    """
    servers = others.servers()
    if not drafter and not servers:
        raise typer.BadParameter("name at least one drafter, -d NAME, or a server, --endpoint URL")
    if verifier and not any(temperature or ()):
        raise typer.BadParameter("--verifier needs -t above 0: at temperature 0 all verifiers are match")
    if trees and to_json is None:
        raise typer.BadParameter("--trees needs --json FILE, where the trees go")
    check_charts(html)
    batches = batch or [1]
    with notice(f"loading {model} ..."):
        from soothsay import LLM
        from soothsay.bench.spec.questions import read_questions
        from soothsay.bench.spec.spec_bench import SpecBench, SpecPlan, serving
        from soothsay.model.pass_measuring import measure_passes

        questions = read_questions(spec_bench, per_task)
        llm = LLM(model, drafter="none", dtype=dtype, config=serving(max(batches), nodes, max_context))
        plan = SpecPlan(
            drafters={name: name for name in drafter or ()},
            temperatures=temperature or [0.0],
            batches=batches,
            rounds=rounds,
            max_tokens=max_tokens,
            seed=seed,
            carry=carry,
            verifiers=verifier or ["match"],
            trees=trees,
        )
        found = str(llm.model.dtype).removeprefix("torch.")
        about = {"model": model, "dtype": f"auto ({found})" if dtype == "auto" else dtype}
    with progress_bar("answering") as progress:
        times = partial(measure_passes, llm.model, llm.config.max_context or 0)
        bench = SpecBench(
            *(llm, questions, plan), others=servers, about=about, path=to_json, progress=progress, times=times
        )
        results = bench.run()
    finish([results], markdown, html)


def finish(every: Sequence[SpecResults], markdown: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, and show the tables. Exits with 1 if an answer differs."""
    from soothsay.bench.report.speedup_page import page
    from soothsay.bench.report.speedup_tables import different
    from soothsay.bench.report.speedup_tables import markdown as as_markdown

    if markdown is not None:
        write_markdown(as_markdown(every), markdown)
    if markdown != Path("-"):
        for results in every:
            _show(results)
    if html is not None:
        write_text(html, page(every))
    if any(different(results) for results in every):
        raise typer.Exit(1)


def _show(results: SpecResults) -> None:
    from soothsay.bench.report.speedup_tables import different, notes, table_of, title
    from soothsay.bench.spec.spec_results import by_setting

    console = Console(highlight=False)
    for (temperature, batch), rows in by_setting(results.rows()):
        content = table_of(results, rows, console.width)
        drawn = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            title=Text(f"{title(results)}, temperature {temperature:g}, batch {batch}: speed-up by task"),
            title_justify="left",
        )
        drawn.add_column(content.headings[0], overflow="fold", min_width=8)
        for heading in content.headings[1:]:
            drawn.add_column(heading, justify="right", no_wrap=True)
        for cells in content.rows:
            drawn.add_row(*(Text(cell) for cell in cells))
        console.print(drawn)
    if different(results):
        alarm = " Answers are not plain decoding's. This must never happen: 'soothsay verify' says more."
        console.print(Text.assemble((" DIFFERENT ANSWERS ", "bold white on red"), alarm), soft_wrap=True)
    for note in notes(results):
        console.print(Text(note), soft_wrap=True)
