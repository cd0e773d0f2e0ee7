"""`soothsay bench agentic`: makes questions as coding agents ask them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import NodesOption
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.config import EngineConfig

if TYPE_CHECKING:
    from soothsay.bench.agentic import Episode


def agentic(
    data: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Conversations with code: JSON lines with 'messages' (may be .gz).",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="The file to write, for 'bench spec'.")
    ],
    per_task: Annotated[int, typer.Option(min=1, help="Number of episodes of each task.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of episodes.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            "--replay", metavar="MODEL", help="Also count the steps that drafters would need for this model."
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="Drafter to count; may be repeated.", show_default="suffix"),
    ] = None,
    nodes: NodesOption = EngineConfig.max_tree,
) -> None:
    """Make questions as coding agents ask them: repeat code with a name changed, call a tool again.

    The file is for 'bench spec'. With --replay, lookup drafters are also tried on exact answers, without
    running the model.
    """
    from soothsay.bench.agentic import make_episodes, write_questions

    with notice(f"reading {data} ..."):
        episodes = make_episodes(data, per_task, seed)
    write_questions(out, episodes)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{out}: {len(episodes)} episodes of {len({e.task for e in episodes})} tasks")
    if model is None:
        console.print(f"Try:\n  soothsay bench spec sibyl --spec-bench {out} -d suffix")
    else:
        console.print(_replayed(episodes, model, drafter or ["suffix"], nodes), soft_wrap=False)


def _replayed(episodes: list[Episode], model: str, drafters: list[str], nodes: int) -> Table:
    """Return a table of tokens a step, by drafter and task."""
    with notice(f"loading {model} ..."):
        from soothsay import LLM, RequestError
        from soothsay.bench.agentic import replay
        from soothsay.drafters.base import Drafter
        from soothsay.drafters.registry import build_drafter

        llm = LLM(model, drafter="none")
        if llm.tokenizer is None:
            raise RequestError(f"{model} has no tokenizer, and episodes are text")
        built = {name: build_drafter(name, llm.engine.target) for name in drafters}
    for name, one in built.items():
        if one.trained or type(one).observe is not Drafter.observe:
            raise RequestError(f"drafter {name} needs more than tokens, and a replay has tokens only")
    tasks = dict.fromkeys(episode.task for episode in episodes)
    table = numbers_table(("tokens a step, replayed",), tasks)
    for name, one in built.items():
        with notice(f"{name} ..."):
            counts = replay(one, episodes, llm.tokenizer, nodes)
        table.add_row(name, *(f"{count.accepted:.2f}" for count in counts.values()))
    return table
