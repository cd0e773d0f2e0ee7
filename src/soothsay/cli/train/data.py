"""`soothsay train data`: lets a model answer conversations, as data to train its drafters on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from soothsay.cli.options import (
    MODEL_HELP,
    AnswerSeedOption,
    ChatTemplateOption,
    DrafterOption,
    DTypeOption,
    MaxContextOption,
    MaxTokensOption,
    TemperatureOption,
)
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import facts_table
from soothsay.cli.terminal import PLAIN, notice

if TYPE_CHECKING:
    from soothsay.corpus import Tally
    from soothsay.train.answers import AnswersReport


Method = Literal["medusa", "hydra", "eagle", "eagle3", "mtp", "block", "redrafter"]
"""Trained drafters that read features of the target."""


def data(
    model: Annotated[
        str,
        typer.Argument(help=f"{MODEL_HELP} It has a chat template."),
    ],
    prompts: Annotated[
        Path,
        typer.Argument(
            exists=True,
            help="Conversations: JSON lines with 'messages' (may be .gz), or a directory saved by the "
            "package 'datasets'. Messages of assistants are left out.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="The file to write: JSON lines with 'messages'. An existing file is continued.",
        ),
    ],
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default="all", help="Number of conversations, drawn from the whole file."),
    ] = None,
    temperature: TemperatureOption = 0.7,
    max_tokens: MaxTokensOption = 512,
    batch: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
    seed: AnswerSeedOption = 0,
    features: Annotated[
        Method | None,
        typer.Option(
            help="Also keep the features that `soothsay train` of this name learns from, in a folder beside "
            "--out: training then needs no pass of the model. They take about 10 kB a token for a model of "
            "1.5B parameters. The model answers without a drafter.",
        ),
    ] = None,
    drafter: DrafterOption = PLAIN,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Let a model answer the users' messages of a file of conversations, turn by turn.

    Each answer follows the model's own earlier answers. A conversation is written when it ends. After an
    interruption, the same command continues.
    """
    if features is not None and drafter != PLAIN:
        raise typer.BadParameter("with --features the model answers without a drafter: leave out --drafter")
    with notice(f"reading {prompts} ..."):
        from soothsay.train.answers import read_unanswered, write_answers

        asked, tally = read_unanswered(prompts)
    with notice(f"loading {model} ..."):
        from soothsay import LLM, SamplingParams

        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        llm = LLM(
            model,
            drafter=drafter,
            dtype=dtype,
            max_context=max_context,
            chat_template=chat_template,
            max_requests=batch,
            prefix_caching=features is None,
        )
    folder = None
    if features is not None:
        from soothsay.train.new_heads import taps_of
        from soothsay.train.recorded import FeatureFolder

        folder = FeatureFolder(out.with_suffix(".features"), taps_of(features, llm.model.config.num_layers))
    with progress_bar("answering", "conversations") as progress:
        report = write_answers(llm, asked, out, params, limit=limit, features=folder, progress=progress)
    _show(report, tally, out)
    if folder is not None:
        Console(highlight=False, soft_wrap=True).print(f"features for {features}: {folder.path}")


def _show(report: AnswersReport, tally: Tally, out: Path) -> None:
    held = report.before + report.written
    before = f", {report.before:,} of them from earlier runs" if report.before else ""
    facts: list[tuple[str, str | Text]] = [
        ("written", f"{out}: {held:,} conversations{before}"),
        ("answers", f"{report.answers:,} with {report.tokens:,} tokens"),
    ]
    losses = {
        "answers cut, by --max-tokens or the context": report.cut,
        "conversations without their later turns": report.unfinished,
        "conversations left out": report.left_out,
        f"of {tally.read:,} entries cannot be used": tally.bad,
    }
    facts += [("", f"{count:,} {what}") for what, count in losses.items() if count]
    facts += [("", Text(reason, "dim")) for reason in (*report.reasons, *tally.named)]
    Console(highlight=False, soft_wrap=True).print(facts_table(facts))
