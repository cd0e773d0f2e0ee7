"""Groups of options of `soothsay bench serve`, and their meaning: loads, prompts, promises and servers."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from soothsay.options import FILE, PROMPTS, option

if TYPE_CHECKING:
    from soothsay.bench.serve.arrivals import Arrivals, Kind
    from soothsay.bench.serve.mix import Mix
    from soothsay.bench.serve.serve_bench import LoadTarget
    from soothsay.bench.serve.serve_results import Slo

CONCURRENCY = "4"
"""The load if none is given."""

REQUESTS = "32"
"""Conversations in a trial if neither their number nor a duration is given."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


@dataclass(frozen=True)
class LoadOptions:
    """How requests arrive. At most one of the first three is given."""

    PANEL = "Load: at most one of the first three"

    concurrency: str | None = option(
        None,
        "Closed loop: N clients, each sending its next request when it has its answer.",
        metavar="N,...",
        show_default=CONCURRENCY,
    )
    rate: str | None = option(
        None, "Open loop: R requests a second on average, at times of a Poisson process.", metavar="R,..."
    )
    burst: str | None = option(
        None, "N requests at once, and the next N when all are answered.", metavar="N,..."
    )
    requests: str | None = option(
        None,
        "Conversations in a trial: one number, or one for each level.",
        metavar="N,...",
        show_default=REQUESTS,
    )
    duration: str | None = option(
        None, "In place of --requests: time in which conversations begin.", metavar="TIME"
    )

    def loads(self) -> list[Arrivals]:
        """The loads, one for each level. Raises `typer.BadParameter`."""
        from soothsay.bench.serve.arrivals import Arrivals

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
            raise typer.BadParameter(
                f"--requests {self.requests}: one whole number, or one for each of {text}"
            )
        pairs = zip(levels, counts * (len(levels) // len(counts)), strict=True)
        return [Arrivals(kind, level, requests=int(count)) for level, count in pairs]


@dataclass(frozen=True)
class PromptOptions:
    """What is asked."""

    PANEL = "Prompts"

    spec_bench: Path | None = option(None, "JSON lines with category and turns.", **FILE)
    prompts: Path | None = option(None, PROMPTS, **FILE, show_default="256 short requests")
    turns: int = option(1, "Turns of a conversation, each after the server's answer.", min=1)
    shared_prefix: int = option(0, "Length of a system message for all.", metavar="WORDS", min=0)
    long: float = option(0.0, "Share of prompts with a long text.", metavar="SHARE", min=0, max=1)
    long_words: int = option(1000, "Length of a long text.", metavar="WORDS", min=1)

    def mix(self, seed: int) -> Mix:
        """The prompts of a file, or the default ones. Raises `typer.BadParameter` if two files are given."""
        from soothsay.bench.serve.mix import Mix, default_conversations, read_conversations, read_spec_bench

        if self.spec_bench is not None and self.prompts is not None:
            raise typer.BadParameter("give --spec-bench FILE or --prompts FILE, not both")
        if self.spec_bench is not None:
            conversations = read_spec_bench(self.spec_bench)
        elif self.prompts is not None:
            conversations = read_conversations(self.prompts)
        else:
            conversations = default_conversations()
        return Mix(
            *(conversations, seed),
            turns=self.turns,
            shared_prefix=self.shared_prefix,
            long_share=self.long,
            long_words=self.long_words,
        )


@dataclass(frozen=True)
class GoodputOptions:
    """The limits that an answer keeps if it counts as good."""

    PANEL = "Goodput"

    slo_ttft: str | None = option(None, "Limit to the first token, such as 500ms.", metavar="TIME")
    slo_itl: str | None = option(None, "Limit of an answer's mean time between tokens.", metavar="TIME")
    slo_e2e: str | None = option(None, "Limit to the end.", metavar="TIME")

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
    key = os.environ.get(variable, "")
    if variable and not key:
        raise typer.BadParameter(f"{url},key={variable}: there is no such environment variable")
    optional = {"ignore_eos": True} if ignore_eos else {}
    client = ChatClient(url, model, key, timeout, optional)
    return LoadTarget(named[1] or client.place, client, {name: _json(one) for name, one in options.items()})


def _json(text: str) -> Any:
    """Parse JSON; text that is not JSON stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
