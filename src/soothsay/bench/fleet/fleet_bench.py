"""Compares rules over numbers of simulated engines, and draws the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soothsay.bench.fleet.simulated_engine import Speculation
from soothsay.bench.fleet.simulation import MakeRule, simulate
from soothsay.bench.fleet.step_times import StepTimes
from soothsay.bench.fleet.trace import Conversations, TracedRequest
from soothsay.config import EngineConfig
from soothsay.plotting import new_figure, series_style, tidy


@dataclass(frozen=True, slots=True)
class FleetRow:
    """The results of one rule with one number of engines."""

    replicas: int
    rule: str  # name of the rule
    throughput: float  # tokens of answers in a second
    first_token: float  # seconds, median
    first_token_p99: float  # seconds
    hit_rate: float  # share of the prompts' tokens


def bench_fleet(
    load: Conversations | Sequence[TracedRequest],
    replicas: Sequence[int],
    rules: Mapping[str, MakeRule],
    times: StepTimes,
    config: EngineConfig,
    speculation: Speculation,
) -> list[FleetRow]:
    """Simulate all rules with each number of engines.

    Args:
        load: conversations for one engine, which grow with the number of engines; or a trace, which does not.
        replicas: numbers of engines.
        rules: by name.
        times: of an engine's steps.
        config: of the engines, with `kv_tokens` filled in.
        speculation: what draft trees bring.

    Raises `RequestError` if a request does not fit into an engine's KV pool.
    """
    rows = []
    for count in replicas:
        for name, rule in rules.items():
            trace = load.times(count) if isinstance(load, Conversations) else load
            outcome = simulate(trace, count, rule, times, config, speculation)
            first, last = outcome.first_token(), outcome.first_token(0.99)
            rows.append(FleetRow(count, name, outcome.throughput, first, last, outcome.hit_rate))
    return rows


def fleet_chart(rows: Sequence[FleetRow]) -> Any:
    """Draw throughput, first-token latency and hit rate over the number of engines, by rule.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    panels: tuple[tuple[str, Callable[[FleetRow], float]], ...] = (
        ("tokens a second, per engine", lambda row: row.throughput / row.replicas),
        ("first token, median, s", lambda row: row.first_token),
        ("first token, p99, s", lambda row: row.first_token_p99),
        ("prompt tokens from the cache, %", lambda row: 100 * row.hit_rate),
    )
    figure = new_figure(figsize=(13, 3), layout="constrained")
    for panel, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for number, name in enumerate(dict.fromkeys(row.rule for row in rows)):
            own = [row for row in rows if row.rule == name]
            colour, _ = series_style(number)
            panel.plot(
                [row.replicas for row in own], list(map(value, own)), color=colour, marker=".", label=name
            )
        counts = sorted({row.replicas for row in rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("engines")
        panel.set_title(title, fontsize=10)
        tidy(panel)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure
