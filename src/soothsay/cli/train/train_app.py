"""The list of commands below `soothsay train`, and those that train nothing: `data` and `layer-skip`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.text import Text

from soothsay.bench.tables import records_table
from soothsay.cli.command_classes import add_commands
from soothsay.cli.terminal import PLAIN, facts_table, load_bar, notice, progress_bar, say
from soothsay.cli.text_stores import KeepAnswers
from soothsay.cli.train.training_commands import COMMANDS
from soothsay.config import DType
from soothsay.options import (
    FILE,
    MODEL,
    ModelOptions,
    SamplingOptions,
    argument,
    common,
    option,
    optional,
    required,
    shared,
)

if TYPE_CHECKING:
    from soothsay.corpus import Tally
    from soothsay.drafters.models.layer_skipping import SkipSet
    from soothsay.train.answers import AnswersReport


Method = Literal["medusa", "hydra", "eagle", "eagle3", "mtp", "block", "redrafter"]
"""Trained drafters that read features of the target."""


@dataclass(frozen=True, kw_only=True)
class AnswerConversations:
    """Let a model answer the users' messages of a file of conversations, turn by turn.

    Each answer follows the model's own earlier answers. A conversation is written when it ends. After an
    interruption, the same command continues.
    """

    model: str = argument(help=f"{MODEL} It has a chat template.")
    prompts: Path = argument(exists=True)
    """Conversations: JSON lines with 'messages', 'turns' or a 'prompt', or a .txt file with a message in each
    line (may be .gz), or a directory saved by the package 'datasets'. Messages of assistants are left out."""

    out: Path = required("-o", dir_okay=False)
    """The file to write: JSON lines with 'messages'. An existing file is continued."""

    limit: int | None = optional("all", min=1)
    """Number of conversations, drawn from the whole file."""

    temperature: float = common("temperature", default=0.7, panel=SamplingOptions.PANEL)
    max_tokens: int = common("max_tokens", default=512, min=1)
    batch: int = option(32, min=1)
    """Conversations at a time."""

    seed: int = option(0, min=0)
    """Seed of all answers."""

    features: Method | None = option(None)
    """Also keep the features that `soothsay train` of this name learns from, in a folder beside --out:
    training then needs no pass of the model. They take about 6.5 kB a token for a model of 1.5B
    parameters. The model answers without a drafter."""

    drafter: str = shared(ModelOptions, "drafter", default=PLAIN)
    dtype: DType = shared(ModelOptions, "dtype")
    device: str = shared(ModelOptions, "device")
    kernels: str = shared(ModelOptions, "kernels")
    max_context: int | None = shared(ModelOptions, "max_context")
    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Answer the conversations that have no answer yet."""
        features = self.features
        if features is not None and self.drafter != PLAIN:
            problem = "with --features the model answers without a drafter: leave out --drafter"
            raise typer.BadParameter(problem)
        with notice(f"reading {self.prompts} ..."):
            from soothsay.train.answers import read_unanswered, write_answers

            asked, tally = read_unanswered(self.prompts)
        with load_bar(f"loading {self.model} ..."):
            from soothsay import LLM, SamplingParams

            params = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)
            names = "drafter", "dtype", "device", "kernels", "max_context", "chat_template"
            own = {name: getattr(self, name) for name in names}
            llm = LLM(self.model, max_requests=self.batch, prefix_caching=features is None, **own)
        folder = None
        if features is not None:
            from soothsay.train.features import FeatureFolder
            from soothsay.train.new_heads import taps_of

            taps = taps_of(features, llm.model.spec.num_layers)
            folder = FeatureFolder(self.out.with_suffix(".features"), taps)
        with progress_bar("answering", "conversations", resumes=True) as progress:
            report = write_answers(
                *(llm, asked, self.out, params), limit=self.limit, features=folder, progress=progress
            )
        _show_answers(report, tally, self.out)
        if folder is not None:
            print(f"features for {features}: {folder.path}")


def _show_answers(report: AnswersReport, tally: Tally, out: Path) -> None:
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
    say(facts_table(facts))


@dataclass(frozen=True, kw_only=True)
class FindSkippedLayers:
    """Find the layers that the drafter 'layer-skip' leaves out of the model (arXiv 2309.08168).

    Nothing is trained. Layers are left out one after the other: each time the one whose loss costs least.
    """

    model: str = common("model")
    text: Path | None = argument(default=None, **FILE, show_default="the model writes its own")
    """Text to measure with: plain text, or .jsonl with 'messages' or 'text'; may be .gz."""

    out: Path | None = optional("drafters/layer-skip beside the model", "-o")
    """The directory to write."""

    samples: int = option(16, min=1)
    """Pieces of text."""

    tokens: int = option(128, min=2)
    """Tokens in a piece."""

    dtype: DType = shared(ModelOptions, "dtype")
    kernels: str = shared(ModelOptions, "kernels")

    def run(self) -> None:
        """Search, and write the best set of layers."""
        model, out, text = self.model, self.out, self.text
        with load_bar(f"loading {model} ..."):
            from soothsay.drafters.models.layer_skipping import skip_directory
            from soothsay.errors import DrafterError
            from soothsay.model.weights.checkpoint import open_checkpoint
            from soothsay.model.weights.load import load_model
            from soothsay.quantizing.quantize_model import read_samples, write_samples
            from soothsay.train.skip_search import search

            checkpoint = open_checkpoint(model)
            if out is None and not checkpoint.path.is_dir():
                raise DrafterError(
                    f"{checkpoint.path} is a single file, not a directory that can hold a drafter: give --out"
                )
            tokenizer = checkpoint.tokenizer()
            target = load_model(checkpoint, self.dtype, kernels=self.kernels)
        with notice("reading text ..." if text else f"{model} writes text to measure with ..."):
            if text:
                pieces = read_samples(text, tokenizer, self.samples, self.tokens)
            else:
                pieces = write_samples(target, tokenizer, self.samples, self.tokens)
        with progress_bar("leaving out", "layers") as progress:
            found = search(target, pieces, progress)
        best = max(found, key=lambda one: one.speedup)
        directory = out or skip_directory(checkpoint.path)
        best.save(directory, target.spec.num_layers)
        _show_skipped(found, best, directory)


def _show_skipped(found: list[SkipSet], best: SkipSet, directory: Path) -> None:
    table = records_table(
        found,
        {"layers left out": lambda one: ", ".join(map(str, one.skip))},
        {
            "tokens kept": "{.agreement:.1%}",
            "cost of a draft token": "{.cost:.2f}",
            "draft tokens": "{.depth}",
            "best speed-up": "{.speedup:.2f}",
        },
        style=lambda one: "bold" if one is best else "",
    )
    say(table, f"{directory} has the best of them.")
    if best.speedup <= 1:
        say("None of them is expected to be faster than plain decoding.")


train = typer.Typer(
    no_args_is_help=True, help="Train drafters or a model, or make the data to train them on."
)
add_commands(
    train, {"data": AnswerConversations, **COMMANDS, "layer-skip": FindSkippedLayers, "suffix": KeepAnswers}
)
