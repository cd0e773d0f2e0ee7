"""`soothsay train data`: lets a model answer conversations, as data to train its drafters on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.console import Console
from rich.text import Text

from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import facts_table
from soothsay.cli.terminal import PLAIN, notice
from soothsay.config import DType
from soothsay.options import (
    MODEL,
    REQUIRED,
    CommonOptions,
    ModelOptions,
    SamplingOptions,
    argument,
    option,
    shared,
)

if TYPE_CHECKING:
    from soothsay.corpus import Tally
    from soothsay.train.answers import AnswersReport


Method = Literal["medusa", "hydra", "eagle", "eagle3", "mtp", "block", "redrafter"]
"""Trained drafters that read features of the target."""


@dataclass(frozen=True, kw_only=True)
class AnswerConversations:
    """Let a model answer the users' messages of a file of conversations, turn by turn.

    Each answer follows the model's own earlier answers. A conversation is written when it ends. After an
    interruption, the same command continues.
    """

    model: str = argument(REQUIRED, f"{MODEL} It has a chat template.")
    prompts: Path = argument(
        REQUIRED,
        "Conversations: JSON lines with 'messages' (may be .gz), or a directory saved by the "
        "package 'datasets'. Messages of assistants are left out.",
        exists=True,
    )
    out: Path = option(
        REQUIRED,
        "The file to write: JSON lines with 'messages'. An existing file is continued.",
        "-o",
        dir_okay=False,
    )
    limit: int | None = option(
        None, "Number of conversations, drawn from the whole file.", min=1, show_default="all"
    )
    temperature: float = shared(CommonOptions, "temperature", default=0.7, panel=SamplingOptions.PANEL)
    max_tokens: int = shared(CommonOptions, "max_tokens", default=512)
    batch: int = option(32, "Conversations at a time.", min=1)
    seed: int = option(0, "Seed of all answers.", min=0)
    features: Method | None = option(
        None,
        "Also keep the features that `soothsay train` of this name learns from, in a folder beside "
        "--out: training then needs no pass of the model. They take about 10 kB a token for a model of "
        "1.5B parameters. The model answers without a drafter.",
    )
    drafter: str = shared(ModelOptions, "drafter", default=PLAIN)
    dtype: DType = shared(ModelOptions, "dtype")
    max_context: int | None = shared(ModelOptions, "max_context")
    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Answer the conversations that have no answer yet."""
        features = self.features
        if features is not None and self.drafter != PLAIN:
            raise typer.BadParameter(
                "with --features the model answers without a drafter: leave out --drafter"
            )
        with notice(f"reading {self.prompts} ..."):
            from soothsay.train.answers import read_unanswered, write_answers

            asked, tally = read_unanswered(self.prompts)
        with notice(f"loading {self.model} ..."):
            from soothsay import LLM, SamplingParams

            params = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)
            llm = LLM(
                self.model,
                drafter=self.drafter,
                dtype=self.dtype,
                max_context=self.max_context,
                chat_template=self.chat_template,
                max_requests=self.batch,
                prefix_caching=features is None,
            )
        folder = None
        if features is not None:
            from soothsay.train.features import FeatureFolder
            from soothsay.train.new_heads import taps_of

            taps = taps_of(features, llm.model.config.num_layers)
            folder = FeatureFolder(self.out.with_suffix(".features"), taps)
        with progress_bar("answering", "conversations") as progress:
            report = write_answers(
                *(llm, asked, self.out, params), limit=self.limit, features=folder, progress=progress
            )
        _show(report, tally, self.out)
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
