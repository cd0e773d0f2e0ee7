"""`soothsay bench fleet`: simulates the router with more engines than there are machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import JsonOption, PngOption, check_charts
from soothsay.cli.option_groups import grouped
from soothsay.cli.options import MaxRunningOption, MaxStallOption
from soothsay.cli.terminal import notice
from soothsay.config import EngineConfig
from soothsay.files import write_json
from soothsay.plotting import save_png
from soothsay.server.server_config import MAX_STALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from soothsay.bench.fleet.fleet_bench import FleetRow
    from soothsay.bench.fleet.simulated_engine import Speculation
    from soothsay.bench.fleet.step_times import StepTimes
    from soothsay.bench.fleet.trace import Conversations

MAX_REPLICAS = 4096
"""Limit of simulated engines."""

_load = partial(typer.Option, rich_help_panel="Conversations of each engine")
_engines = partial(typer.Option, rich_help_panel="Engines")


@dataclass(frozen=True)
class ConversationOptions:
    """The conversations of each engine, as `Conversations` describes them."""

    sessions: Annotated[int, _load(min=1, help="Number of conversations.")] = 25
    turns: Annotated[int, _load(min=1, help="Questions in a conversation.")] = 8
    rate: Annotated[
        float | None,
        _load(min=0.000001, help="Sessions that begin in a second, on average.", show_default="all at once"),
    ] = None
    system: Annotated[int, _load(min=0, help="Tokens of a system prompt.")] = 500
    systems: Annotated[int, _load(min=1, help="Different system prompts, of all engines.")] = 1
    question: Annotated[float, _load(min=1, help="Tokens of a question, on average.")] = 30
    answer: Annotated[float, _load(min=1, help="Tokens of an answer, on average.")] = 32
    pause: Annotated[float, _load(min=0, help="Seconds before the next question, on average.")] = 0
    fixed: Annotated[bool, _load("--fixed", help="All lengths and pauses are their means.")] = False
    seed: Annotated[int, _load(min=0, help="Seed of the conversations.")] = 0

    def conversations(self) -> Conversations:
        """The conversations. Without a rate they begin all at once."""
        from soothsay.bench.fleet.trace import Conversations

        return Conversations(**{**asdict(self), "rate": self.rate or math.inf})


@dataclass(frozen=True)
class SimulatedEngineOptions:
    """The engines that are simulated."""

    replicas: Annotated[str, _engines(metavar="N,...", help="Numbers of engines.")] = "1,2,4,8,16"
    kv_tokens: Annotated[int, _engines(min=16, help="Tokens that a KV pool holds.")] = 65536
    max_running: MaxRunningOption = EngineConfig.max_requests
    max_stall: MaxStallOption = MAX_STALL
    tree: Annotated[int, _engines(min=1, help="Nodes of a draft tree, the root included.")] = 1
    acceptance: Annotated[float, _engines(min=1, help="Tokens that an answer gets in a step.")] = 1.0

    def counts(self) -> list[int]:
        """The numbers of engines, one after the other. Raises `typer.BadParameter`."""
        counts = [int(part) if part.isdecimal() else 0 for part in self.replicas.split(",")]
        if not all(1 <= count <= MAX_REPLICAS for count in counts):
            raise typer.BadParameter(
                f"--replicas {self.replicas}: give numbers from 1 to {MAX_REPLICAS}, such as 1,2,4"
            )
        return counts

    def config(self) -> EngineConfig:
        """The limits of an engine."""
        return EngineConfig(
            kv_tokens=self.kv_tokens,
            max_requests=self.max_running,
            max_stall=self.max_stall,
            max_tree=self.tree,
        )

    def speculation(self) -> Speculation:
        """What a draft tree costs and gains. Raises `typer.BadParameter`."""
        from soothsay.bench.fleet.simulated_engine import Speculation

        if self.acceptance > self.tree:
            raise typer.BadParameter("--acceptance cannot be above --tree, the nodes that are verified")
        return Speculation(self.tree, self.acceptance)


@grouped
def fleet(
    model: Annotated[
        str | None,
        typer.Argument(help="A model, to measure its steps; see 'generate'.", show_default="with --times"),
    ] = None,
    *,
    times: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Times of steps, in place of measuring a model's."),
    ] = None,
    save_times: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the measured times to this file.")
    ] = None,
    replica_cores: Annotated[
        int, typer.Option(min=1, help="Physical cores of the measured engine, as for 'serve'.")
    ] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A recorded trace, in place of conversations."),
    ] = None,
    load: ConversationOptions,
    engines: SimulatedEngineOptions,
    png: PngOption = None,
    to_json: JsonOption = None,
) -> None:
    """Simulate the router of 'serve --replicas' with many engines, beside round robin and least load.

    Router, scheduler and prefix cache are the server's own; passes take times that were measured. The
    requests are made-up conversations, or those of a trace: see docs/many-machines.md.
    """
    counts, config, speculation = engines.counts(), engines.config(), engines.speculation()
    if (model is None) == (times is None):
        raise typer.BadParameter("give a model to measure, or --times FILE")
    check_charts(png)
    with notice("measuring steps ..." if model else "reading ..."):
        from soothsay.bench.fleet.fleet_bench import bench_fleet, fleet_chart
        from soothsay.bench.fleet.simulation import OTHERS
        from soothsay.bench.fleet.trace import read_trace
        from soothsay.server.fleet.router import Router

        asked = load.conversations() if trace is None else read_trace(trace)
        steps = _times(model, times, replica_cores)
    if save_times is not None:
        steps.save(save_times)
    with notice("simulating ..."):
        rows = bench_fleet(asked, counts, {"router": Router[int], **OTHERS}, steps, config, speculation)
    Console(highlight=False).print(_table(rows))
    if png is not None:
        save_png(fleet_chart(rows), png, dpi=90)
    if to_json is not None:
        write_json(to_json, [asdict(row) for row in rows], indent=1)


def _times(model: str | None, file: Path | None, cores: int) -> StepTimes:
    """Read times, or measure those of a model."""
    from soothsay.bench.fleet.step_times import CONTEXTS, ROOM, StepTimes, measure_steps

    if file is not None:
        return StepTimes.read(file)
    from soothsay.server.engines.engine_process import load

    room = {"kv_tokens": ROOM, "max_context": 2 * CONTEXTS[-1]}
    return measure_steps(load(str(model), cores=cores, drafter="none", **room))


def _table(rows: Sequence[FleetRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("engines", justify="right")
    table.add_column("rule")
    for heading in ("tokens/s", "first token, s", "p99, s", "cached"):
        table.add_column(heading, justify="right")
    for place, row in enumerate(rows):
        new = place == 0 or rows[place - 1].replicas != row.replicas
        if new and place:
            table.add_section()
        latencies = f"{row.first_token:.3f}", f"{row.first_token_p99:.3f}"
        count = str(row.replicas) if new else ""
        table.add_row(count, row.rule, f"{row.throughput:,.0f}", *latencies, f"{row.hit_rate:.1%}")
    return table
