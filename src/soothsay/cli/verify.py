"""`soothsay verify`: the guarantee, checked on a model and prompts of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from soothsay.bench.prompts import PromptEntry, encode, read_prompts, spread
from soothsay.cli.options import DTypeOption, MaxTokensOption, SeedOption, TemperatureOption
from soothsay.cli.registry import try_drafters
from soothsay.cli.tasks import TASKS
from soothsay.cli.terminal import notice
from soothsay.config import EngineConfig
from soothsay.errors import DrafterError

if TYPE_CHECKING:
    from soothsay.bench.equality import Difference, Emitted, Report
    from soothsay.drafters import DrafterSpec
    from soothsay.llm import LLM
    from soothsay.tokenizer import Tokenizer


def verify(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face directory, a .gguf file, a hub name, or a bundled model's name."),
    ] = "sibyl",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            show_default="all that need no files",
            help="Check this one; may be given repeatedly.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            "-p",
            exists=True,
            dir_okay=False,
            show_default="built-in ones",
            help="A .txt file with a prompt a line, or JSON lines with messages, turns or prompt.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default="all", help="Take so many prompts, evenly spread over the file."),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time, of all drafters mixed.")] = 8,
    dtype: DTypeOption = "auto",
) -> None:
    """Check that no drafter changes a token, or a bit of the logits it was drawn from.

    Each prompt is decoded plainly, alone and with nothing cached, and again with each drafter and without
    one, all of these mixed in batches. Ends with 0 if all answers are equal, with 1 if not.
    """
    entries = read_prompts(prompts) if prompts else _built_in()
    entries = entries if limit is None else spread(entries, limit)
    with notice(f"loading {model} ..."):
        from soothsay import LLM, SamplingParams
        from soothsay.bench.equality import compare

        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        rows = min(batch * EngineConfig.max_tree, EngineConfig.max_rows)  # few, so that prompts go in chunks
        llm = LLM(model, drafter="none", dtype=dtype, max_requests=batch, max_rows=rows)
        drafters = {spec: spec for spec in drafter} if drafter else _without_files(llm)
    ids = [encode(entry, llm) for entry in entries]
    with _progress(len(ids) * (2 + len(drafters.keys() - {"none"}))) as advance:
        report = compare(llm, ids, drafters, params, advance=advance)
    _show(Console(highlight=False), report, entries, llm.tokenizer, params.temperature)
    if report.divergences:
        raise typer.Exit(1)


def _built_in() -> list[PromptEntry]:
    """The demo's prompts, each as a question in the chat template and as a text to go on with."""
    asked = [PromptEntry(({"role": "user", "content": task.prompt},), id=task.name) for task in TASKS]
    return asked + [PromptEntry(task.prompt, id=f"{task.name}, as text") for task in TASKS]


def _without_files(llm: LLM) -> dict[str, DrafterSpec]:
    """Every drafter of the registry that can be had by its name alone."""
    built = try_drafters(llm.engine.target)
    return {name: one for name, one in built.items() if not isinstance(one, DrafterError)}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while answers are made; what it yields is called with the tokens of each. Only a
    terminal sees it.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("comparing"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} answers, {task.fields[rate]:.0f} tokens/s,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("comparing", total=total, rate=0.0)
        begin, done = time.perf_counter(), 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress.update(bar, advance=1, rate=done / (time.perf_counter() - begin))

        yield advance


def _show(
    console: Console,
    report: Report,
    entries: Sequence[PromptEntry],
    tokenizer: Tokenizer | None,
    temperature: float,
) -> None:
    """One table; and if there are divergences, another with each of them."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("drafter", overflow="fold")
    for heading in ("prompts", "tokens compared", "tokens a step", "divergences"):
        table.add_column(heading, justify="right")
    for comparison in report.comparisons:
        count = len(comparison.divergences)
        table.add_row(
            Text(comparison.drafter),
            f"{comparison.prompts:,}",
            f"{comparison.tokens:,}",
            f"{comparison.mean_accepted:.2f}",
            Text(str(count), "bold red" if count else ""),
        )
    console.print(table)
    if report.divergences:
        _show_divergences(console, report, entries, tokenizer)
    else:
        equal = "Every token, and every bit of the logits it was drawn from, is plain decoding's."
        console.print(Text.assemble(("✓ ", "bold green"), (equal, "bold")), soft_wrap=True)
    if report.skipped:
        console.print(f"{report.skipped} of {len(entries)} prompts were skipped: too long for the context.")
    if temperature:
        console.print(f"seed {report.seed}")


def _show_divergences(
    console: Console, report: Report, entries: Sequence[PromptEntry], tokenizer: Tokenizer | None
) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("prompt", overflow="fold")
    table.add_column("drafter", overflow="fold")
    table.add_column("differs in")
    table.add_column("position", justify="right")
    for heading in ("plain", "margin", "drafted", "margin"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "margin" else "left")

    def add(name: Text, drafter: Text, difference: Difference) -> None:
        sides = [_side(side, tokenizer) for side in (difference.plain, difference.drafted)]
        table.add_row(name, drafter, difference.what, str(difference.position), *sides[0], *sides[1])

    for divergence in report.divergences:
        entry = entries[divergence.prompt]
        name = f"{entry.id} ({entry.category})" if entry.category else entry.id
        add(Text(name), Text(divergence.drafter), divergence.first)
        if divergence.token not in (None, divergence.first):
            add(Text(""), Text(""), divergence.token)
    console.print(table)
    answers = sum(comparison.prompts for comparison in report.comparisons)
    alarm = f" {len(report.divergences)} of {answers} answers are not plain decoding's. "
    please = "This must never happen: please report it."
    console.print(Text.assemble((" DIFFERENT ANSWERS ", "bold white on red"), alarm, please), soft_wrap=True)
    explanation = (
        "Positions count from the answer's start. A margin is how far the best token stood above the second.",
        "Logits differ: a row was computed in another way; where margins are near 0, rounding decides.",
        "The token alone differs: another one was accepted than was drawn from the same logits.",
        "Where 'none' differs too, it is not the drafter.",
    )
    console.print(*explanation, sep="\n", style="dim", soft_wrap=True)


def _side(emitted: Emitted | None, tokenizer: Tokenizer | None) -> tuple[Text, str]:
    """A token, by number and text, and its margin."""
    if emitted is None:
        return Text("the end"), ""
    text = "" if tokenizer is None else repr(tokenizer.decode([emitted.token], skip_special=False))
    return Text(f"{emitted.token} {text}"), f"{emitted.margin:.7g}"
