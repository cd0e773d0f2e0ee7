"""`soothsay verify`: checks the guarantee on a model and prompts that the user chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from soothsay.bench.measure import Meter
from soothsay.bench.prompts import DEMO, encode, read_prompts, spread
from soothsay.bench.tables import ResultTable, records_table
from soothsay.cli.terminal import fitting_drafters, load_llm, progress_bar, say
from soothsay.config import EngineConfig
from soothsay.corpus import PromptEntry
from soothsay.options import (
    PROMPTS,
    LoadOptions,
    ModelOrSibyl,
    SamplingOptions,
    common,
    drafters_like,
    option,
    optional,
    shared,
)

if TYPE_CHECKING:
    from soothsay.bench.equality import Emitted, EqualityReport
    from soothsay.drafters.registry import DrafterSpec
    from soothsay.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that no drafter changes a token, or a bit of the logits that it was drawn from.

    Decodes each prompt plainly, alone and with an empty cache. Then decodes it again with each drafter and
    with none, mixed in batches. The exit code is 0 if all answers are equal, and 1 if not.
    """

    choice: ModelOrSibyl
    drafter: list[str] | None = optional("all that need no files", "-d", autocompletion=drafters_like)
    """A drafter to check. Can be repeated."""

    prompts: Path | None = optional("built-in prompts", "-p", help=PROMPTS, exists=True)
    limit: int | None = optional("all", min=1)
    """Number of prompts, spread evenly over the file."""

    max_tokens: int = common("max_tokens", default=128, min=1)
    temperature: float = common("temperature", default=0.0, panel=SamplingOptions.PANEL)
    seed: int | None = shared(SamplingOptions, "seed")
    batch: int = option(8, min=1)
    """Requests in a batch, of all drafters mixed."""

    options: LoadOptions

    def run(self) -> None:
        """Compare. Exits with 1 if an answer differs."""
        entries = read_prompts(self.prompts) if self.prompts else _built_in()
        entries = entries if self.limit is None else spread(entries, self.limit)
        from soothsay.core.params import SamplingParams

        params = SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)
        # few, so that prefill needs chunks
        rows = min(self.batch * EngineConfig.max_tree, EngineConfig.max_rows)
        llm = load_llm(self.choice.name, max_requests=self.batch, max_rows=rows, **asdict(self.options))
        from soothsay.bench.equality import compare

        drafters: dict[str, DrafterSpec] = {spec: spec for spec in self.drafter or ()}
        drafters = drafters or {**fitting_drafters(llm.engine.target)}
        entries = [entry for entry in entries for _ in (None, *llm.adapters)]
        ids = [encode(entry, llm.tokenizer) for entry in entries]
        with progress_bar("comparing") as progress:
            meter = Meter(progress, len(ids) * (2 + len(drafters.keys() - {"none"})))
            meter.advance()
            report = compare(
                llm, ids, drafters, params, (None, *llm.adapters), advance=partial(meter.advance, 1)
            )
        self._show(report, entries, llm.tokenizer)
        if report.divergences:
            raise typer.Exit(1)

    def _show(self, report: EqualityReport, entries: list[PromptEntry], tokenizer: Tokenizer | None) -> None:
        """Show a table of all drafters, and a second table of the divergences if there are any."""
        checks = records_table(
            report.comparisons,
            {"drafter": "{.drafter}"},
            {
                "prompts": "{.prompts:,}",
                "tokens compared": "{.tokens:,}",
                "tokens a step": "{.mean_accepted:.2f}",
                "divergences": lambda one: str(len(one.divergences)),
            },
            style=lambda one: "bold red" if one.divergences else "",
        )
        say(checks)
        if report.divergences:
            _show_divergences(report, entries, tokenizer)
        _, *own = report.comparisons  # the first is "none"
        idle = [one.drafter for one in own if one.mean_accepted <= 1]
        if not report.divergences and (len(idle) < len(own) or not own):
            equal = "Every token, and every bit of the logits it was drawn from, is plain decoding's."
            say(Text.assemble(("✓ ", "bold green"), (equal, "bold")))
        if idle:
            little = "nothing was accepted, so this shows little: use more tokens or other prompts."
            say(f"{', '.join(idle)}: {little}", style="yellow")
        if report.skipped:
            say(f"{report.skipped} of {len(entries)} prompts were skipped: too long for the context.")
        if self.temperature:
            say(f"seed {report.seed}")


def _built_in() -> list[PromptEntry]:
    """The demo's prompts, each once in the chat template and once as plain text."""
    asked = read_prompts(DEMO)
    return asked + [PromptEntry(one.turns[0], id=f"{one.id}, as text") for one in asked]


def _show_divergences(
    report: EqualityReport, entries: Sequence[PromptEntry], tokenizer: Tokenizer | None
) -> None:
    headings = ("prompt", "drafter", "differs in", "position", "plain", "margin", "drafted", "margin")
    rows = list[list[str]]()
    for divergence in report.divergences:
        entry = entries[divergence.prompt]
        name = f"{entry.id} ({entry.category})" if entry.category else entry.id
        for one in filter(None, dict.fromkeys((divergence.first, divergence.token))):
            sides = [*_side(one.plain, tokenizer), *_side(one.drafted, tokenizer)]
            rows.append([name, divergence.drafter, one.what, str(one.position), *sides])
    say(ResultTable(headings, rows, names=2))
    answers = sum(comparison.prompts for comparison in report.comparisons)
    alarm = f" {len(report.divergences)} of {answers} answers differ from plain decoding. "
    please = "This must never happen: please report it."
    say(Text.assemble((" DIFFERENT ANSWERS ", "bold white on red"), alarm, please))
    explanation = (
        "Positions count from the answer's start. A margin is the best logit minus the second best.",
        "If logits differ, a row was computed in another way. Margins near 0 mean that rounding decides.",
        "If only the token differs, the accepted token is not the one drawn from the same logits.",
        "If 'none' differs too, the drafter is not the cause.",
    )
    say(*explanation, style="dim")


def _side(emitted: Emitted | None, tokenizer: Tokenizer | None) -> tuple[str, str]:
    """The id and text of a token, and its margin."""
    if emitted is None:
        return "the end", ""
    text = "" if tokenizer is None else repr(tokenizer.decode([emitted.token], skip_special=False))
    return f"{emitted.token} {text}", f"{emitted.margin:.7g}"
