"""Parses the options of `soothsay bench serve`: times, loads, targets and prompts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import typer

from soothsay.bench.chat_client import ChatClient
from soothsay.bench.serve.load import Arrivals, Kind
from soothsay.bench.serve.mix import Mix, default_conversations, read_conversations, read_spec_bench
from soothsay.bench.serve.serve_bench import LoadTarget
from soothsay.bench.serve.serve_results import Slo

CONCURRENCY = "4"
"""The load if none is given."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}


def seconds(text: str, name: str) -> float:
    """Parse the value of option `name`, such as "500ms", to seconds. Raises `typer.BadParameter`."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip())
    if not found or found[2] not in _UNITS or not float(found[1]):
        raise typer.BadParameter(f"{name} {text}: give a time above zero, such as 500ms, 1.5s or 2min")
    return float(found[1]) * _UNITS[found[2]]


def parse_slo(first: str | None, per_token: str | None, end: str | None) -> Slo:
    """Parse the limits of goodput. Raises `typer.BadParameter`."""
    options = {"--slo-ttft": first, "--slo-itl": per_token, "--slo-e2e": end}
    return Slo(*(None if text is None else seconds(text, name) for name, text in options.items()))


def parse_loads(options: dict[str, str | None], requests: str | None, duration: str | None) -> list[Arrivals]:
    """Parse the kind of load and its levels.

    Args:
        options: levels by the kind's name; at most one is given, or else `CONCURRENCY` is taken.
        requests: conversations in a trial, or a number for each level.
        duration: time in which conversations begin, in place of `requests`.

    Raises `typer.BadParameter`.
    """
    chosen = {kind: text for kind, text in options.items() if text is not None}
    if len(chosen) > 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --burst")
    if requests is not None and duration is not None:
        raise typer.BadParameter("give --requests or --duration, not both")
    ((kind, text),) = (chosen or {"concurrency": CONCURRENCY}).items()
    levels = _numbers(text, f"--{kind}")
    if duration is not None:
        lasting = seconds(duration, "--duration")
        return [Arrivals(cast("Kind", kind), level, duration=lasting) for level in levels]
    counts = _numbers(requests or "32", "--requests")
    if len(counts) not in (1, len(levels)) or not all(count.is_integer() for count in counts):
        raise typer.BadParameter(f"--requests {requests}: one whole number, or one for each of {text}")
    pairs = zip(levels, counts * (len(levels) // len(counts)), strict=True)
    return [Arrivals(cast("Kind", kind), level, requests=int(count)) for level, count in pairs]


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


def parse_mix(spec_bench: Path | None, prompts: Path | None, seed: int, **options: Any) -> Mix:
    """Read the prompts of a file, or take the default ones; see `Mix` for `options`.

    Raises `typer.BadParameter` if two files are given.
    """
    if spec_bench is not None and prompts is not None:
        raise typer.BadParameter("give --spec-bench FILE or --prompts FILE, not both")
    if spec_bench is not None:
        conversations = read_spec_bench(spec_bench)
    elif prompts is not None:
        conversations = read_conversations(prompts)
    else:
        conversations = default_conversations()
    return Mix(conversations, seed, **options)
