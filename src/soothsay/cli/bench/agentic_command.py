"""`soothsay bench agentic`: makes questions as coding agents ask them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from soothsay.cli.bench.bench_options import BenchOptions
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice
from soothsay.options import FILE, REQUIRED, argument, option, shared

if TYPE_CHECKING:
    from soothsay.bench.agentic import Episode


@dataclass(frozen=True, kw_only=True)
class Agentic:
    """Make questions as coding agents ask them: repeat code with a name changed, call a tool again.

    The file is for 'bench spec'. With --replay, lookup drafters are also tried on exact answers, without
    running the model.
    """

    data: Path = argument(
        REQUIRED, "Conversations with code: JSON lines with 'messages' (may be .gz).", **FILE
    )
    out: Path = option(REQUIRED, "The file to write, for 'bench spec'.", "-o", dir_okay=False)
    per_task: int = option(20, "Number of episodes of each task.", min=1)
    seed: int = option(0, "Seed of the choice of episodes.", min=0)
    model: str | None = option(
        None, "Also count the steps that drafters would need for this model.", "--replay", metavar="MODEL"
    )
    drafter: list[str] | None = option(
        None, "Drafter to count; may be repeated.", "-d", show_default="suffix"
    )
    nodes: int = shared(BenchOptions, "nodes")

    def run(self) -> None:
        """Write the questions, and replay the episodes if a model is given."""
        from soothsay.bench.agentic import make_episodes, write_questions

        with notice(f"reading {self.data} ..."):
            episodes = make_episodes(self.data, self.per_task, self.seed)
        write_questions(self.out, episodes)
        console = Console(highlight=False, markup=False, soft_wrap=True)
        tasks = len({episode.task for episode in episodes})
        console.print(f"{self.out}: {len(episodes)} episodes of {tasks} tasks")
        if self.model is None:
            console.print(f"Try:\n  soothsay bench spec sibyl --spec-bench {self.out} -d suffix")
        else:
            table = _replayed(episodes, self.model, self.drafter or ["suffix"], self.nodes)
            console.print(table, soft_wrap=False)


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
