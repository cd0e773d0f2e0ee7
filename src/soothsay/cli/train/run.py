"""What all trainings have in common: their options, the data, the engine that judges, and what people see."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from soothsay.model.checkpoint import Checkpoint
    from soothsay.model.transformer import Transformer
    from soothsay.train.data import Example
    from soothsay.train.loop import Recipe

_TRAINING = "Training"


@dataclass(frozen=True)
class Run:
    """The options that every training has."""

    model: Annotated[
        str, typer.Argument(help="The target: a Hugging Face directory or a bundled model's name.")
    ]
    data: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="What to train on: JSON lines with 'messages' or 'text', plain text, a datasets directory.",
        ),
    ]
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The directory to write. Goes on from what it holds.")
    ]
    init: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="A drafter of the same shape to begin with."),
    ] = None
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.", rich_help_panel=_TRAINING)] = 1000
    batch_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of a step.", rich_help_panel=_TRAINING)
    ] = 8192
    parts: Annotated[
        int,
        typer.Option(
            min=1, help="Passes that a step is cut into, to save memory.", rich_help_panel=_TRAINING
        ),
    ] = 2
    learning_rate: Annotated[
        float,
        typer.Option(min=0, help="Of embeddings, norms and output matrices.", rich_help_panel=_TRAINING),
    ] = 1e-3
    matrix_learning_rate: Annotated[
        float, typer.Option(min=0, help="Of matrices within layers.", rich_help_panel=_TRAINING)
    ] = 3e-3
    decay: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the steps in which the rate falls.", rich_help_panel=_TRAINING
        ),
    ] = 0.8
    max_tokens: Annotated[
        int,
        typer.Option(
            min=8, help="Longer conversations are cut, at a turn if possible.", rich_help_panel=_TRAINING
        ),
    ] = 1024
    held_out: Annotated[
        int, typer.Option(min=1, help="Conversations to judge by, not trained on.", rich_help_panel=_TRAINING)
    ] = 32
    evaluate_every: Annotated[
        int, typer.Option(min=1, help="Steps between evaluations.", rich_help_panel=_TRAINING)
    ] = 200
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=_TRAINING)
    ] = 100
    stop_after: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop after so many steps; the next call goes on.", rich_help_panel=_TRAINING
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Of shuffling and new weights.", rich_help_panel=_TRAINING)] = 0
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=_TRAINING)] = "cpu"

    def checkpoint(self) -> Checkpoint:
        """The target's files."""
        from soothsay.model.checkpoint import open_checkpoint

        return open_checkpoint(self.model)

    def target(self) -> Transformer:
        """The target, frozen, on kernels that training can look through."""
        from soothsay.model.load import load_model
        from soothsay.train.sequences import TrainingKernels

        return load_model(self.checkpoint(), "bfloat16", self.device, TrainingKernels())

    def examples(self) -> tuple[list[Example], list[Example]]:
        """To train on, and to judge by."""
        from soothsay.errors import TrainingError
        from soothsay.train.data import read_examples, split

        tokenizer = self.checkpoint().tokenizer()
        if tokenizer is None:
            raise TrainingError(f"{self.model} has no tokenizer, so that no text can be read for it")
        with notice("reading the data ..."):
            examples, skipped = read_examples(self.data, tokenizer, self.max_tokens)
        if str(skipped):
            Console(stderr=True, highlight=False).print(str(skipped), style="yellow", soft_wrap=True)
        if len(examples) <= self.held_out:
            raise TrainingError(
                f"the data has {len(examples)} conversations, of which {self.held_out} would be held out: "
                "give more data, or a smaller --held-out"
            )
        return split(examples, self.held_out, self.seed)

    def judge(self, drafter: str, held_out: list[Example]) -> Callable[[Path], dict[str, float]]:
        """Mean accepted tokens of `drafter`, saved in a directory, on the prompts of `held_out`."""
        from soothsay import LLM
        from soothsay.train.evaluate import mean_accepted, measuring

        prompts = [example.prompt for example in held_out]
        llm: list[LLM] = []

        def evaluate(directory: Path) -> dict[str, float]:
            if not llm:
                llm.append(LLM(self.model, drafter="none", config=measuring()))
            spec = f"{drafter}(model={directory})"
            greedy, sampled = (mean_accepted(llm[0], spec, prompts, temperature=t) for t in (0.0, 1.0))
            return {
                "accepted": greedy.overall,
                "accepted_sampled": sampled.overall,
                "score": (greedy.overall + sampled.overall) / 2,
            }

        return evaluate

    def train(self, recipe: Recipe, examples: list[Example]) -> None:
        """Run `recipe` and show how it goes."""
        from soothsay.train.loop import Trainer, TrainingConfig
        from soothsay.train.plot import plot_metrics

        config = TrainingConfig(
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            parts=self.parts,
            learning_rate=self.learning_rate,
            matrix_learning_rate=self.matrix_learning_rate,
            decay=self.decay,
            evaluate_every=self.evaluate_every,
            save_every=self.save_every,
            seed=self.seed,
        )
        trainer = Trainer(recipe, examples, config, self.out)
        console = Console(highlight=False, soft_wrap=True)
        if trainer.step:
            console.print(f"going on from step {trainer.step}")
        with _bar(console) as bar:
            task = bar.add_task(recipe.name, total=config.steps, completed=trainer.step, loss="", rate="")

            def report(step: int, measured: Mapping[str, float]) -> None:
                loss, rate = f"loss {measured['loss']:.3f}", f"{measured['tokens_per_second']:,.0f} tokens/s"
                bar.update(task, completed=step, loss=loss, rate=rate)
                if "score" in measured:
                    console.print(f"step {step}: {loss}, {rate}, {_evaluated(measured)}")
                    plot_metrics(trainer.metrics, trainer.metrics.with_suffix(".png"))
                elif not console.is_terminal and step % 50 == 0:
                    console.print(f"step {step}: {loss}, {rate}")

            try:
                trainer.run(report, self.stop_after)
            except KeyboardInterrupt:
                kept = trainer.saved
                console.print(
                    f"stopped in step {trainer.step + 1}; the same command goes on from step {kept}"
                )
                raise
        console.print(f"{self.out} has the best, with a score of {trainer.best}" if trainer.best else "")


def training(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes the options of `Run` beside its own; it is given them as its first argument."""
    shared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(Run, eval_str=True).parameters.values()
    ]
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    names = [parameter.name for parameter in shared]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        common = {name: options.pop(name) for name in names}
        command(Run(**common), **options)

    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    required = [p for p in shared if p.default is p.empty]
    optional = [p for p in shared if p.default is not p.empty]
    run.__signature__ = inspect.Signature([*required, *own, *optional])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*shared, *own)}
    return run


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _evaluated(measured: Mapping[str, float]) -> str:
    if "accepted" in measured:
        return (
            f"accepted {measured['accepted']:.2f} tokens a step at temperature 0, "
            f"{measured['accepted_sampled']:.2f} at 1"
        )
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items() if "held_out" in name
    )
