"""`soothsay bench serve`: load on servers that speak OpenAI's protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.bench.options import HtmlOption
from soothsay.cli.progress import progress_bar
from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from soothsay.bench.serve.compare import Target
    from soothsay.bench.serve.load import Kind, Load
    from soothsay.bench.serve.mix import Mix
    from soothsay.bench.serve.results import Results, Slo
    from soothsay.bench.serve.tables import Table as Content

_ARRIVALS, _PROMPTS, _PROMISES = "Arrivals: one of the first three", "Prompts", "Goodput"

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def serve(
    target: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]URL",
            help="A server, by its address up to /v1; may be repeated, ratios are over the first. Behind it "
            "may follow ,model=NAME ,key=VARIABLE (of the environment) and further fields of requests as "
            "JSON, such as ,speculation=false.",
        ),
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=_ARRIVALS,
            help="So many clients, each asking again once answered.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R,...",
            rich_help_panel=_ARRIVALS,
            help="So many a second, at times of a Poisson process.",
        ),
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", rich_help_panel=_ARRIVALS, help="So many at once, again once all are answered."
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            rich_help_panel=_ARRIVALS,
            show_default="32",
            help="Conversations in a trial; one number, or one for each level.",
        ),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            rich_help_panel=_ARRIVALS,
            help="In place of --requests: begin others for so long.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Do everything so often; each time another target begins.")
    ] = 1,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Requests at once that do not count, before a target's first trial.")
    ] = 2,
    spec_bench: Annotated[
        Path | None,
        typer.Option(
            "--spec-bench",
            exists=True,
            dir_okay=False,
            rich_help_panel=_PROMPTS,
            help="Questions: JSON lines with category and turns.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            rich_help_panel=_PROMPTS,
            help="JSON lines with messages, turns or a prompt; or a .txt with a prompt a line.",
        ),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(min=1, rich_help_panel=_PROMPTS, help="Of a conversation, behind the server's answers."),
    ] = 1,
    shared_prefix: Annotated[
        int,
        typer.Option(
            metavar="WORDS", min=0, rich_help_panel=_PROMPTS, help="Length of a system message that all have."
        ),
    ] = 0,
    long: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, max=1, rich_help_panel=_PROMPTS, help="Of prompts behind a long text."
        ),
    ] = 0.0,
    long_words: Annotated[
        int, typer.Option(metavar="WORDS", min=1, rich_help_panel=_PROMPTS, help="Length of such a text.")
    ] = 1000,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of just so many tokens.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="0: always the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts' order, arrivals and answers.")] = 0,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Of silence, until a request is given up.")
    ] = "600s",
    slo_ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_PROMISES, help="To the first token, such as 500ms."),
    ] = None,
    slo_itl: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=_PROMISES, help="Between tokens, an answer's mean."),
    ] = None,
    slo_e2e: Annotated[
        str | None, typer.Option(metavar="TIME", rich_help_panel=_PROMISES, help="To the end.")
    ] = None,
    to_json: Annotated[
        Path | None,
        typer.Option(
            "--json", dir_okay=False, help="Append every request; a file that is there is continued."
        ),
    ] = None,
    html: HtmlOption = None,
    png: Annotated[Path | None, typer.Option("--png", dir_okay=False, help="Draw plots to a file.")] = None,
) -> None:
    """Latency percentiles, throughput and goodput of servers under load, several of them in turn.

    All are asked the same in the same order, and nothing twice while there is something new. An inter-token
    latency is given as seen, from chunk to chunk, and by tokens, where chunks have several. Ctrl-C keeps and
    shows what is there. Ends with 1 if a target has answered nothing.
    """
    loads = _loads({"concurrency": concurrency, "rate": rate, "burst": burst}, requests, duration)
    silence = seconds(timeout, "--timeout") or 0.0
    slo = _slo(slo_ttft, slo_itl, slo_e2e)
    with notice("reading prompts ..."):
        from soothsay.bench.plot import new_figure
        from soothsay.bench.serve.compare import Plan, ServeBench

        if html is not None or png is not None:
            new_figure()  # says now if there is nothing to draw with
        targets = [_target(text, silence, ignore_eos) for text in target]
        mix = _mix(spec_bench, prompts, seed, turns, shared_prefix, long, long_words)
        plan = Plan(loads, rounds, warm_up, max_tokens, temperature, seed)
    with progress_bar("asking", "s" if duration else "conversations") as progress:
        bench = ServeBench(targets, mix, plan, path=to_json, progress=progress)
        interrupted = False
        gc.freeze()  # what is imported: walking through it takes 30 ms, in which nothing is sent or timed
        try:
            asyncio.run(bench.run())
        except KeyboardInterrupt:
            interrupted = True
    _show(bench.results, slo)
    if bench.results.trials and html is not None:
        from soothsay.bench.serve.page import page

        html.write_text(page(bench.results, slo), encoding="utf-8")
    if bench.results.trials and png is not None:
        from soothsay.bench.serve.plots import save_plot

        save_plot(bench.results, png)
    if interrupted:
        raise typer.Exit(130)
    if not all(row.answered for row in bench.results.rows()):
        raise typer.Exit(1)


def seconds(text: str, name: str) -> float:
    """`"500ms"` -> 0.5. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise typer.BadParameter(f"{name} {text}: a time is wanted, such as 500ms, 1.5s or 2min")
    return float(found[1]) * _UNITS[found[2]]


def _slo(first: str | None, per_token: str | None, end: str | None) -> Slo:
    from soothsay.bench.serve.results import Slo

    options = {"--slo-ttft": first, "--slo-itl": per_token, "--slo-e2e": end}
    return Slo(*(None if text is None else seconds(text, name) for name, text in options.items()))


def _loads(options: dict[str, str | None], requests: str | None, duration: str | None) -> list[Load]:
    from soothsay.bench.serve.load import Load

    chosen = {kind: text for kind, text in options.items() if text is not None}
    if len(chosen) != 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --burst")
    if requests is not None and duration is not None:
        raise typer.BadParameter("give --requests or --duration, not both")
    ((kind, text),) = chosen.items()
    levels = _numbers(text, f"--{kind}")
    if duration is not None:
        lasting = seconds(duration, "--duration")
        return [Load(cast("Kind", kind), level, duration=lasting) for level in levels]
    counts = _numbers(requests or "32", "--requests")
    if len(counts) not in (1, len(levels)) or not all(count.is_integer() for count in counts):
        raise typer.BadParameter(f"--requests {requests}: one whole number, or one for each of {text}")
    pairs = zip(levels, counts * (len(levels) // len(counts)), strict=True)
    return [Load(cast("Kind", kind), level, requests=int(count)) for level, count in pairs]


def _numbers(text: str, name: str) -> list[float]:
    """`"1,4,16"` -> 1, 4, 16. Raises `typer.BadParameter`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{name} {text}: numbers are wanted, with commas between them") from None


def _target(text: str, timeout: float, ignore_eos: bool) -> Target:
    """`NAME=URL,model=...,key=...,field=JSON`. Commas within JSON are told apart by what follows them."""
    from soothsay.bench.client import Client
    from soothsay.bench.serve.compare import Target

    named = re.fullmatch(r"(?:([^=/]*)=)?(https?://.*)", text, re.DOTALL)
    if named is None:
        raise typer.BadParameter(f"--target {text}: NAME=http://... is wanted, up to where /v1 ends")
    url, *rest = re.split(r",(?=\w+=)", named[2])
    options: dict[str, str] = dict(part.split("=", 1) for part in rest)
    model, variable = options.pop("model", ""), options.pop("key", "")
    key = os.environ.get(variable, "")
    if variable and not key:
        raise typer.BadParameter(f"--target ...,key={variable}: there is no such environment variable")
    optional = {"ignore_eos": True} if ignore_eos else {}
    client = Client(url, model, key, timeout, optional)
    return Target(named[1] or client.place, client, {name: _json(one) for name, one in options.items()})


def _json(text: str) -> Any:
    """What is no JSON is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _mix(
    spec_bench: Path | None,
    prompts: Path | None,
    seed: int,
    turns: int,
    shared_prefix: int,
    long: float,
    long_words: int,
) -> Mix:
    from soothsay.bench.serve.mix import Mix, read_conversations, read_spec_bench

    if spec_bench is not None and prompts is None:
        conversations = read_spec_bench(spec_bench)
    elif prompts is not None and spec_bench is None:
        conversations = read_conversations(prompts)
    else:
        raise typer.BadParameter("give prompts: --spec-bench FILE or --prompts FILE")
    return Mix(
        conversations,
        seed,
        turns=turns,
        shared_prefix=shared_prefix,
        long_share=long,
        long_words=long_words,
    )


def _show(results: Results, slo: Slo) -> None:
    from soothsay.bench.serve.tables import notes, tables

    console = Console(highlight=False)
    if not results.trials:
        console.print("nothing was measured")
        return
    for content in tables(results, slo):
        console.print(_drawn(content))
    for note in notes(results, slo):
        console.print(Text(note), soft_wrap=True)


def _drawn(content: Content) -> Table:
    """Names that are the row's before are left out, and another load stands apart."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(content.title), title_justify="left")
    for place, heading in enumerate(content.headings):
        named = place < content.names
        table.add_column(heading, justify="left" if named else "right", no_wrap=not named)
    before: list[str] = []
    for row in content.rows:
        if before and row[0] != before[0]:
            table.add_section()
        same = next((i for i in range(content.names) if before[i : i + 1] != row[i : i + 1]), 0)
        table.add_row(*(Text(cell) for cell in (*[""] * same, *row[same:])))
        before = row
    return table
