"""`soothsay bench serve` and `soothsay bench busy`: servers under load, and beside busy processes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.text import Text

from soothsay.bench.bench_plans import BenchOptions, ServeOptions
from soothsay.bench.tables import records_table
from soothsay.cli.bench.bench_options import save_chart, save_numbers, show
from soothsay.cli.terminal import notice, progress_bar
from soothsay.files import write_text
from soothsay.options import argument, flag, option, optional, shared

if TYPE_CHECKING:
    from soothsay.bench.serve.serve_bench import LoadTarget, ServeBench
    from soothsay.bench.serve.serve_results import LoadResults, Slo
    from soothsay.bench.serve.server_load import Arrivals, Kind, Mix


CONCURRENCY = "4"
"""The load if none is given."""

REQUESTS = "32"
"""Conversations in a trial if neither their number nor a duration is given."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


@dataclass(frozen=True)
class ArrivalOptions:
    """How requests arrive. At most one of the first three is given."""

    PANEL = "Load: at most one of the first three"

    concurrency: str | None = optional(CONCURRENCY, metavar="N,...")
    """Closed loop: N clients, each sending its next request when it has its answer."""

    rate: str | None = option(None, metavar="R,...")
    """Open loop: R requests a second on average, at times of a Poisson process."""

    burst: str | None = option(None, metavar="N,...")
    """N requests at once, and the next N when all are answered."""

    requests: str | None = optional(REQUESTS, metavar="N,...")
    """Conversations in a trial: one number, or one for each level."""

    duration: str | None = option(None, metavar="TIME")
    """In place of --requests: time in which conversations begin."""

    def loads(self) -> list[Arrivals]:
        """The loads, one for each level. Raises `typer.BadParameter`."""
        from soothsay.bench.serve.server_load import Arrivals

        kinds = {"concurrency": self.concurrency, "rate": self.rate, "burst": self.burst}
        chosen = {kind: text for kind, text in kinds.items() if text is not None}
        if len(chosen) > 1:
            raise typer.BadParameter("give one of --concurrency, --rate and --burst")
        if self.requests is not None and self.duration is not None:
            raise typer.BadParameter("give --requests or --duration, not both")
        ((name, text),) = (chosen or {"concurrency": CONCURRENCY}).items()
        kind, levels = cast("Kind", name), _numbers(text, f"--{name}")
        if self.duration is not None:
            lasting = seconds(self.duration, "--duration")
            return [Arrivals(kind, level, duration=lasting) for level in levels]
        counts = _numbers(self.requests or REQUESTS, "--requests")
        if len(counts) not in (1, len(levels)) or not all(count.is_integer() for count in counts):
            needed = f"one whole number, or one for each of {text}"
            raise typer.BadParameter(f"--requests {self.requests}: {needed}")
        pairs = zip(levels, counts * (len(levels) // len(counts)), strict=True)
        return [Arrivals(kind, level, requests=int(count)) for level, count in pairs]


@dataclass(frozen=True)
class PromptOptions:
    """What is asked."""

    PANEL = "Prompts"

    prompts: Path | None = shared(BenchOptions, "prompts", default=None, show_default="256 short requests")
    turns: int = option(1, min=1)
    """Turns of a conversation, each after the server's answer."""

    shared_prefix: int = option(0, metavar="WORDS", min=0)
    """Length of a system message for all."""

    long: float = option(0.0, metavar="SHARE", min=0, max=1)
    """Share of prompts with a long text."""

    long_words: int = option(1000, metavar="WORDS", min=1)
    """Length of a long text."""

    def mix(self, seed: int) -> Mix:
        """The prompts of a file, or the default ones."""
        from soothsay.bench.serve.server_load import Mix, default_conversations, read_conversations

        conversations = read_conversations(self.prompts) if self.prompts else default_conversations()
        return Mix(conversations, seed, self.turns, self.shared_prefix, self.long, self.long_words)


@dataclass(frozen=True)
class GoodputOptions:
    """The limits that an answer keeps if it counts as good."""

    PANEL = "Goodput"

    slo_ttft: str | None = option(None, metavar="TIME")
    """Limit to the first token, such as 500ms."""

    slo_itl: str | None = option(None, metavar="TIME")
    """Limit of an answer's mean time between tokens."""

    slo_e2e: str | None = option(None, metavar="TIME")
    """Limit to the end."""

    def slo(self) -> Slo:
        """The limits in seconds. Raises `typer.BadParameter`."""
        from soothsay.bench.serve.serve_results import Slo

        given = {"--slo-ttft": self.slo_ttft, "--slo-itl": self.slo_itl, "--slo-e2e": self.slo_e2e}
        return Slo(*(None if text is None else seconds(text, name) for name, text in given.items()))


def seconds(text: str, name: str) -> float:
    """Parse the value of option `name`, such as "500ms", to seconds. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise typer.BadParameter(f"{name} {text}: give a time above zero, such as 500ms, 1.5s or 2min")
    return float(found[1]) * _UNITS[found[2]]


def _numbers(text: str, name: str) -> list[float]:
    """Parse "1,4,16" to [1.0, 4.0, 16.0]. Raises `typer.BadParameter`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{name} {text}: give numbers with commas between them") from None


def parse_target(text: str, timeout: float, ignore_eos: bool) -> LoadTarget:
    """Parse `NAME=URL,model=...,key=...,field=JSON`. A URL without a path gets `/v1`.

    A comma ends a field only if `name=` follows, so JSON values may hold commas. Raises `typer.BadParameter`.
    """
    from soothsay.bench.chat_client import ChatClient
    from soothsay.bench.serve.serve_bench import LoadTarget

    named = re.fullmatch(r"(?:([^=/]*)=)?(https?://.*)", text, re.DOTALL)
    if named is None:
        raise typer.BadParameter(f"{text!r} is not a server: give http://HOST:PORT, or NAME=http://...")
    url, *rest = re.split(r",(?=\w+=)", named[2])
    if re.fullmatch(r"https?://[^/?#]+", url):
        url += "/v1"
    options: dict[str, str] = dict(part.split("=", 1) for part in rest)
    model, variable = options.pop("model", ""), options.pop("key", "")
    key = os.environ.get(variable, "").strip()
    if variable and not (key and key.isascii() and key.isprintable()):
        problem = "is no such environment variable" if not key else "are characters in it that no key has"
        raise typer.BadParameter(f"{url},key={variable}: there {problem}")
    optional = {"ignore_eos": True} if ignore_eos else {}
    client = ChatClient(url, model, key, timeout, optional)
    return LoadTarget(named[1] or client.place, client, {name: _json(one) for name, one in options.items()})


def _json(text: str) -> Any:
    """Parse JSON; text that is not JSON stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, kw_only=True)
class ServersUnderLoad:
    """Measure latency, throughput and goodput of servers under load, several servers in turn.

    All servers get the same conversations in the same order. No conversation comes twice before all have come
    once. Inter-token latency is given by chunk, as a reader sees it, and by token, since a chunk may have
    several. Ctrl-C keeps and shows the results so far. The exit code is 1 if a server answered no request.
    """

    server: list[str] | None = argument(default=None, metavar="[[NAME=]URL]...", show_default=False)
    """Servers, such as http://127.0.0.1:8000; with several, ratios are over the first. A URL without a
    path gets /v1. Fields may follow: ,model=NAME ,key=VARIABLE (an environment variable) and fields of
    every request as JSON, such as ,speculation=false."""

    target: list[str] | None = option(None, metavar="[NAME=]URL")
    """Another server, written in the same way; may be repeated."""

    load: ArrivalOptions
    options: ServeOptions
    asked: PromptOptions
    ignore_eos: bool = flag()
    """Ask for answers of exactly --max-tokens tokens."""

    timeout: str = option("600s", metavar="TIME")
    """Time without a byte after which a request fails."""

    goodput: GoodputOptions
    to_json: Path | None = shared(BenchOptions, "journal")
    html: Path | None = shared(BenchOptions, "html")
    png: Path | None = shared(BenchOptions, "png")

    def run(self) -> None:
        """Measure, and show the results."""
        with notice("reading prompts ..."):
            from soothsay.bench.serve.serve_bench import LoadPlan, ServeBench

            loads, slo = self.load.loads(), self.goodput.slo()
            silence, named = seconds(self.timeout, "--timeout"), (*(self.server or ()), *(self.target or ()))
            targets = [parse_target(text, silence, self.ignore_eos) for text in named]
            if not targets:
                raise typer.BadParameter("name a server, such as http://127.0.0.1:8000")
            mix, plan = self.asked.mix(self.options.seed), LoadPlan(loads, **vars(self.options))
        with progress_bar("asking", "s" if self.load.duration else "conversations") as progress:
            bench = ServeBench(targets, mix, plan, path=self.to_json, progress=progress)
            interrupted = _run(bench)
        self._show(bench.results, slo)
        if interrupted:
            raise typer.Exit(130)
        if not all(row.answered for row in bench.results.rows()):
            raise typer.Exit(1)

    def _show(self, results: LoadResults, slo: Slo) -> None:
        """Show tables and notes, and write the page and the chart that were asked for."""
        from soothsay.bench.serve.load_page import load_chart, notes, page, tables

        if not results.trials:
            print("nothing was measured")
            return
        show(*tables(results, slo), *map(Text, notes(results, slo)))
        if self.html is not None:
            write_text(self.html, page(results, slo))
        save_chart(self.png, lambda: load_chart(results), dpi=110)


def _run(bench: ServeBench) -> bool:
    """Measure. Returns whether Ctrl-C ended it."""
    gc.freeze()  # a walk through all imported objects takes 30 ms, in which nothing is sent or timed
    try:
        asyncio.run(bench.run())
    except KeyboardInterrupt:
        return True
    return False


@dataclass(frozen=True, kw_only=True)
class BusyMachine:
    """Measure how fast servers decode while other processes keep the cores of this machine busy.

    Each server answers one request at a time, alone and beside processes that compute all the time. The first
    process is pinned to a core. Share is the part that is left of the speed without them. The longest wait
    between two pieces of text is given in medians of these waits.
    """

    server: list[str] = argument(metavar="[NAME=]URL...")
    """Servers on this machine, such as http://127.0.0.1:8000. Fields may follow as in 'bench serve', such
    as ,speculation=false."""

    loops: list[int] | None = optional("1 and 2", min=1)
    """Number of busy processes; may be repeated."""

    rounds: int = option(3, min=1)
    """Number of rounds; figures are medians."""

    max_tokens: int = shared(BenchOptions, "max_tokens")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Ask the servers, and print a table."""
        from soothsay.bench.chat_client import TIMEOUT

        targets = [parse_target(text, TIMEOUT, ignore_eos=True) for text in self.server]
        if len({target.name for target in targets}) < len(targets):
            raise typer.BadParameter("give servers names of their own, as in NAME=http://127.0.0.1:8000")
        with progress_bar("asking", "answers") as progress:
            from soothsay.bench.busy import bench_busy

            loops = self.loops or [1, 2]
            found = asyncio.run(bench_busy(targets, loops, self.rounds, self.max_tokens, progress))
        numbers = {"tokens/s": "{.rate:.1f}", "share": "{.share:.2f}", "longest wait": "{.longest:.1f}"}
        table = records_table(found, {"busy processes": "{.loops}", "server": "{.server}"}, numbers)
        show(table)
        save_numbers(self.to_json, [asdict(one) for one in found])
