"""`soothsay demo`: real prompts, decoded plainly and by every drafter, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from soothsay.cli.options import DTypeOption, ModelOption
from soothsay.cli.registry import try_drafters
from soothsay.cli.tasks import TASKS, Task
from soothsay.cli.terminal import ACCEPTED, PLAIN, load_llm
from soothsay.errors import DrafterError

if TYPE_CHECKING:
    from soothsay.drafters import DrafterSpec
    from soothsay.engine.answer import Piece, SpeculationStats
    from soothsay.llm import LLM

SHOWN_CHARACTERS = 240
SHOWN_LINES = 6
"""Of a prompt and of an answer, at most."""

SHOWN = ("auto", "suffix", "mtp")
"""Drafters that a first look compares: the controller, one that looks things up, one that was trained."""

PATIENCE = 30.0
"""Seconds after which no further round is begun, so that a slow machine is done in about a minute too."""

UNSTEADY = 1.5
"""Where the median round takes longer than the fastest by this factor, the machine is not quiet."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and the time it took."""

    pieces: list[Piece]
    stats: SpeculationStats
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens, an end token included."""
        return [piece.token for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Entry:
    """A task decoded with one drafter, repeatedly."""

    task: Task
    drafter: str
    runs: list[Run]

    @property
    def seconds(self) -> float:
        """Of the median run."""
        return median(run.seconds for run in self.runs)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return len(self.runs[0].pieces) / self.seconds

    @property
    def stats(self) -> SpeculationStats:
        """What speculation did in the first run."""
        return self.runs[0].stats

    def equals(self, plain: Entry) -> bool:
        """Whether every run says exactly what plain decoding says."""
        return all(run.tokens == plain.runs[0].tokens for run in self.runs)


def demo(
    model: ModelOption = "sibyl",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            show_default="auto, suffix and mtp, as the model has them",
            help="Compare this one; may be given repeatedly.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer, at most.")
    ] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; times are the median of them.")] = 5,
    dtype: DTypeOption = "auto",
) -> None:
    """Decode real prompts plainly and speculatively, and compare: the same tokens, sooner."""
    if PLAIN in (drafter or ()):
        raise typer.BadParameter(f"{PLAIN!r} decodes plainly, which is what the others are compared with")
    llm = load_llm(model, dtype=dtype, prefix_caching=False)  # each answer begins with the whole prompt
    names = list(dict.fromkeys(drafter)) if drafter else _guessing(llm)
    console = Console(highlight=False)
    console.print()
    console.print(
        Text.assemble(
            (model, "bold"),
            f" answers {len(TASKS)} prompts, plainly and with {', '.join(names)}. ",
            "Tokens that a drafter had guessed are in ",
            (ACCEPTED, ACCEPTED),
            ".",
        )
    )
    if model == "sibyl":
        console.print("It is a toy of 15 million parameters, and answers like one.", style="dim")
    console.print()
    entries = _measure_with_progress(llm, names, max_tokens, repeats)
    for task in TASKS:
        _show_answer(console, task, [e for e in entries if e.task is task and e.drafter != PLAIN])
    console.print(_table(entries))
    if not _show_verdict(console, entries):
        raise typer.Exit(1)


def decode(llm: LLM, task: Task, drafter: DrafterSpec, max_tokens: int) -> Run:
    """Answer `task` once."""
    from soothsay.engine.params import SamplingParams

    params = SamplingParams(temperature=task.temperature, seed=task.seed, max_tokens=max_tokens)
    template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    prompt = llm.chat_prompt([{"role": "user", "content": task.prompt}]) if template else task.prompt
    begin = time.perf_counter()
    stream = llm.stream(prompt, params, drafter=drafter)
    pieces = list(stream)
    return Run(pieces, stream.choice.stats, time.perf_counter() - begin)


def measure(
    llm: LLM, names: Sequence[str], max_tokens: int, repeats: int, advance: Callable[[], None]
) -> list[Entry]:
    """Every task, plainly and with each drafter in turn, so that a noisy machine disturbs all alike.

    Drafters are made anew for each round: what they learn in it from earlier prompts they may use, but none
    sees a prompt twice. `advance` is called after each run.
    """
    from soothsay.drafters import build_drafter

    entries = [Entry(task, name, []) for task in TASKS for name in (PLAIN, *names)]
    begin = time.perf_counter()
    for number in range(repeats):
        if number and time.perf_counter() - begin > PATIENCE:
            break
        specs = {name: build_drafter(name, llm.engine.target) for name in (PLAIN, *names)}
        for entry in entries:
            entry.runs.append(decode(llm, entry.task, specs[entry.drafter], max_tokens))
            advance()
    return entries


def _guessing(llm: LLM) -> list[str]:
    """Those of `SHOWN` that there are for the model."""
    built = try_drafters(llm.engine.target, SHOWN)
    return [name for name, one in built.items() if not isinstance(one, DrafterError)]


def _measure_with_progress(llm: LLM, names: Sequence[str], max_tokens: int, repeats: int) -> list[Entry]:
    decode(llm, TASKS[0], PLAIN, 8)  # kernels are chosen at their first use
    console = Console(stderr=True)
    total = repeats * len(TASKS) * (1 + len(names))
    columns = (TextColumn("decoding"), BarColumn(), TextColumn("{task.completed}/{task.total} answers"))
    with Progress(  # drawn between the answers, not while one is timed
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("decoding", total=total)
        return measure(llm, names, max_tokens, repeats, lambda: progress.update(bar, advance=1, refresh=True))


def _show_answer(console: Console, task: Task, entries: Sequence[Entry]) -> None:
    """The prompt, and the answer with the guesses of the drafter that had most of them right."""
    best = max(entries, key=lambda entry: entry.stats.mean_accepted)
    answer = Text()
    for piece in best.runs[0].pieces:
        answer.append(piece.text, ACCEPTED if piece.drafted else "")
    at = f", temperature {task.temperature:g}" if task.temperature else ""
    prompt = Text(" ".join(task.prompt.split()), "dim")
    console.print(Text.assemble((task.name, "bold"), (f" ({best.drafter}{at})", "dim")))
    console.print(Padding(_shortened(prompt), (0, 0, 0, 2)))
    console.print(Padding(_shortened(answer), (0, 0, 1, 2)))


def _shortened(text: Text) -> Text:
    """At most `SHOWN_LINES` lines and `SHOWN_CHARACTERS` characters of a text."""
    first = Text("\n").join(text.split("\n", allow_blank=True)[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    return first if len(first) == len(text) else first + Text(" ...", "dim")


def _table(entries: Sequence[Entry]) -> Table:
    note = "accepted: tokens a step, counting the one that every step gives"
    table = Table(box=box.SIMPLE_HEAD, caption=note, caption_justify="left", padding=(0, 1))
    for heading in ("task", "drafter"):
        table.add_column(heading)
    for heading in ("tokens/s", "speed-up", "steps", "accepted", "equal"):
        table.add_column(heading, justify="right")
    for entry in entries:
        plain = _plain(entries, entry)
        first = entry is plain
        if first:
            table.add_section()
        table.add_row(
            entry.task.name if first else "",
            Text("plain" if first else entry.drafter),
            f"{entry.rate:.0f}",
            "" if first else f"{plain.seconds / entry.seconds:.2f}x",
            str(entry.stats.steps),
            f"{entry.stats.mean_accepted:.2f}",
            ("" if first else "[green]✓[/]") if entry.equals(plain) else "[bold red]DIFFERS[/]",
            style="dim" if first else "",
        )
    return table


def _show_verdict(console: Console, entries: Sequence[Entry]) -> bool:
    """The result over all tasks. Returns whether every answer is what plain decoding says."""
    plain = [entry for entry in entries if entry.drafter == PLAIN]
    differing = [entry for entry in entries if not entry.equals(_plain(entries, entry))]
    for entry in differing:
        what = f" {entry.task.name} with {entry.drafter} does not say what plain decoding says."
        alarm = (" DIFFERENT TOKENS ", "bold white on red")
        console.print(Text.assemble(alarm, what, " This must never happen: please report it."))
    if not differing:
        same = ("Every answer is the same as plain decoding's, token for token", "bold")
        console.print(Text.assemble(("✓ ", "bold green"), same, f", in {len(plain[0].runs)} rounds."))
    for name in dict.fromkeys(entry.drafter for entry in entries if entry.drafter != PLAIN):
        mine = [entry for entry in entries if entry.drafter == name]
        speedup = sum(entry.seconds for entry in plain) / sum(entry.seconds for entry in mine)
        tokens, steps = sum(entry.stats.emitted for entry in mine), sum(entry.stats.steps for entry in mine)
        result = f" over all prompts: {speedup:.2f}x as fast as plain, {tokens / steps:.2f} tokens a step"
        console.print(Text.assemble("  ", (name, "bold"), result))
    rounds = [sum(seconds) for seconds in zip(*([run.seconds for run in e.runs] for e in plain), strict=True)]
    if median(rounds) > UNSTEADY * min(rounds):
        console.print("Times differ much between rounds: the machine is busy with else.", style="yellow")
    console.print()
    return not differing


def _plain(entries: Sequence[Entry], entry: Entry) -> Entry:
    """The plain entry of the same task."""
    return next(other for other in entries if other.task is entry.task and other.drafter == PLAIN)
