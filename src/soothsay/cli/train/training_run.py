"""What the training commands share: options, data, evaluation by the engine, and the display of progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from soothsay.cli.options import ChatTemplateOption
from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from soothsay.model.checkpoint import Checkpoint
    from soothsay.model.transformer import Transformer
    from soothsay.train.examples import Example
    from soothsay.train.trainer import Recipe


def _option(explanation: str, **limits: Any) -> Any:
    """An option in the help's panel "Training"."""
    return typer.Option(help=explanation, rich_help_panel="Training", **limits)


@dataclass(frozen=True)
class TrainingRun:
    """The options that every training command has, and the work that all of them do."""

    model: Annotated[
        str, typer.Argument(help="The target: a Hugging Face directory or a bundled model's name.")
    ]
    data: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="Training data: JSON lines with 'messages' or 'text', plain text, a directory that was "
            "saved by 'datasets', or a folder that 'train data --features' has written.",
        ),
    ]
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The directory to write. A training that was interrupted resumes."),
    ]
    init: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Begin with the weights of this drafter."),
    ] = None
    steps: Annotated[int, _option("Optimizer steps.", min=1)] = 1000
    batch_tokens: Annotated[int, _option("Tokens of a step.", min=16)] = 8192
    parts: Annotated[int, _option("Passes of a step. More passes need less memory.", min=1)] = 2
    learning_rate: Annotated[
        float, _option("Learning rate of embeddings, norms and output matrices.", min=0)
    ] = 1e-3
    matrix_learning_rate: Annotated[float, _option("Learning rate of matrices within layers.", min=0)] = 3e-3
    decay: Annotated[
        float, _option("Share of the steps, at the end, in which the learning rates fall.", min=0, max=1)
    ] = 0.8
    max_tokens: Annotated[int, _option("Longer conversations are cut, at a turn if possible.", min=8)] = 1024
    held_out: Annotated[int, _option("Number of conversations that are kept for evaluation.", min=1)] = 32
    evaluate_every: Annotated[int, _option("Steps between evaluations.", min=1)] = 200
    save_every: Annotated[int, _option("Steps between checkpoints.", min=1)] = 100
    stop_after: Annotated[
        int | None, _option("Stop after this number of steps. The same command resumes.", min=1)
    ] = None
    keep_features: Annotated[
        float,
        _option(
            "GiB of memory for what the target computes, so that later epochs need not run it. Heads only. A "
            "run that is interrupted and resumed then differs in the last bits.",
            min=0,
        ),
    ] = 0.0
    seed: Annotated[int, _option("Seed of shuffling and of new weights.")] = 0
    device: Annotated[str, _option("Where to train: cpu or cuda.")] = "cpu"
    chat_template: ChatTemplateOption = None

    def checkpoint(self) -> Checkpoint:
        """Open the target's files."""
        from soothsay.model.checkpoint import open_checkpoint

        return open_checkpoint(self.model)

    def target(self) -> Transformer:
        """Load the target on kernels that have gradients."""
        from soothsay.model.load import load_model
        from soothsay.train.sequences import TrainingKernels

        return load_model(self.checkpoint(), "bfloat16", self.device, TrainingKernels())

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Read the data. Returns the examples to train on, and those to evaluate on."""
        from soothsay.errors import TrainingError
        from soothsay.tokenizer import with_layout
        from soothsay.train.examples import read_examples, split
        from soothsay.train.recorded import is_feature_folder, recorded_examples

        tokenizer = with_layout(self.checkpoint().tokenizer(), self.chat_template)
        if tokenizer is None:
            raise TrainingError(f"{self.model} has no tokenizer, so no text can be encoded for it")
        folders = [path for path in self.data if is_feature_folder(path)]
        files = [path for path in self.data if path not in folders]
        with notice("reading the data ..."):
            examples = [one for path in folders for one in recorded_examples(path, self.max_tokens)]
            if files:
                texts, skipped = read_examples(files, tokenizer, self.max_tokens)
                examples += texts
        if files and str(skipped):
            Console(stderr=True, highlight=False).print(str(skipped), style="yellow", soft_wrap=True)
        if len(examples) <= self.held_out:
            raise TrainingError(
                f"the data has {len(examples)} conversations, and {self.held_out} are kept for evaluation: "
                "give more data, or a smaller --held-out"
            )
        return split(examples, self.held_out, self.seed)

    def judge(self, drafter: str, held_out: list[Example]) -> Callable[[Path], dict[str, float]]:
        """Return a function that measures `drafter`, saved in a directory, on the prompts of `held_out`.

        It measures the mean number of tokens a step, at temperatures 0 and 1.
        """
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
        from soothsay.plotting import require_matplotlib
        from soothsay.train.metrics_chart import plot_metrics
        from soothsay.train.trainer import Trainer, TrainingConfig

        require_matplotlib()  # every evaluation draws a chart
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
            console.print(f"resuming after step {trainer.step}")
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
                    f"stopped in step {trainer.step + 1}; the same command resumes after step {kept}"
                )
                raise
        console.print(
            f"{self.out} has the best checkpoint, with a score of {trainer.best}" if trainer.best else ""
        )


def _bar(console: Console) -> Progress:
    """A progress bar, shown in a terminal only."""
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
    """The results of an evaluation in words."""
    if "accepted" in measured:
        return (
            f"accepted {measured['accepted']:.2f} tokens a step at temperature 0, "
            f"{measured['accepted_sampled']:.2f} at 1"
        )
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.3f}" for name, value in measured.items() if "held_out" in name
    )
