"""What the training commands share: options, data, evaluation by the engine, and the display of progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from soothsay.cli.terminal import bars, notice
from soothsay.cli.text_stores import read_texts
from soothsay.options import ModelOptions, argument, common, option, required, shared
from soothsay.train.training_config import TrainingConfig, training_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from soothsay.model.transformer import Transformer
    from soothsay.model.weights.checkpoint import Checkpoint
    from soothsay.train.examples import Example
    from soothsay.train.trainer import Recipe


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The options that every training command has, and the work that all of them do."""

    model: str = common("model")

    data: list[Path] = argument(exists=True)
    """Training data: JSON lines with 'messages' or 'text', plain text, a directory that was saved by
    'datasets', or a folder that 'train data --features' has written."""

    out: Path = required("-o")
    """The directory to write. A training that was interrupted resumes."""

    init: Path | None = option(None, exists=True, file_okay=False)
    """Begin with the weights of this drafter."""

    config: TrainingConfig
    max_tokens: int = training_option(1024, min=8)
    """Longer conversations are cut, at a turn if possible."""

    held_out: int = training_option(32, min=1)
    """Number of conversations that are kept for evaluation."""

    stop_after: int | None = training_option(None, min=1)
    """Stop after this number of steps. The same command resumes."""

    keep_features: float = training_option(0.0, min=0)
    """GiB of memory for what the target computes, so that later epochs need not run it. Heads only. A run
    that is interrupted and resumed then differs in the last bits."""

    device: str = training_option("cpu")
    """Where to train: cpu or cuda."""

    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def checkpoint(self) -> Checkpoint:
        """Open the target's files."""
        from soothsay.model.weights.checkpoint import open_checkpoint

        return open_checkpoint(self.model)

    def target(self) -> Transformer:
        """Load the target on kernels that have gradients."""
        from soothsay.model.weights.load import load_model
        from soothsay.train.sequences import TrainingKernels

        return load_model(self.checkpoint(), "bfloat16", self.device, TrainingKernels())

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Read the data. Returns the examples to train on, and those to evaluate on."""
        from soothsay.train.examples import split

        return split(self.read(self.data), self.held_out, self.config.seed)

    def read(self, data: list[Path]) -> list[Example]:
        """Read conversations, texts and folders of features."""
        from soothsay.train.features import is_feature_folder, recorded_examples

        folders = [path for path in data if is_feature_folder(path)]
        with notice("reading the features ..."):
            examples = [one for path in folders for one in recorded_examples(path, self.max_tokens)]
        if files := [path for path in data if path not in folders]:
            examples += read_texts(self.model, files, self.chat_template, self.max_tokens)[1]
        return examples

    def judge(self, drafter: str, held_out: list[Example]) -> Callable[[Path], dict[str, float]]:
        """Return a function that measures `drafter`, saved in a directory, on the prompts of `held_out`.

        It measures the mean number of tokens a step, at temperatures 0 and 1.
        """
        from soothsay import LLM
        from soothsay.model.weights.checkpoint import read_model_config
        from soothsay.train.evaluate import mean_accepted, measuring

        source = read_model_config(self.checkpoint()).source
        begun = 0 if source is None else len(source.start)  # tokens that a request adds to its source
        prompts = [example.prompt[: len(example.prompt) - begun] for example in held_out]
        llm: list[LLM] = []

        def evaluate(directory: Path) -> dict[str, float]:
            if not llm:
                llm.append(LLM(self.model, drafter="none", device=self.device, config=measuring()))
            spec = f"{drafter}(model={str(directory)!r})"
            greedy, sampled = (mean_accepted(llm[0], spec, prompts, temperature=t) for t in (0.0, 1.0))
            return {"accepted": greedy, "accepted_sampled": sampled, "score": (greedy + sampled) / 2}

        return evaluate

    def train(self, recipe: Recipe, examples: list[Example]) -> None:
        """Run `recipe` and show how it goes."""
        from soothsay.plotting import require_matplotlib
        from soothsay.train.trainer import Trainer, plot_metrics

        require_matplotlib()  # every evaluation draws a chart
        trainer = Trainer(recipe, examples, self.config, self.out)
        console = Console(highlight=False, markup=False, soft_wrap=True)
        if trainer.step:
            console.print(f"resuming after step {trainer.step}")
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()),
        )
        with bars(*columns, console=console) as bar:
            task = bar.add_task(
                recipe.name, total=self.config.steps, completed=trainer.step, loss="", rate=""
            )

            def report(step: int, measured: Mapping[str, float]) -> None:
                loss, rate = f"loss {measured['loss']:.3f}", f"{measured['tokens_per_second']:,.0f} tokens/s"
                bar.update(task, completed=step, loss=loss, rate=rate)
                if "score" in measured:
                    console.print(f"step {step}: {loss}, {rate}, {_evaluated(measured)}")
                    plot_metrics(trainer.metrics, trainer.metrics.with_suffix(".png"))

            try:
                trainer.run(report, self.stop_after)
            except KeyboardInterrupt:
                resumes = f"the same command resumes after step {trainer.saved}"
                console.print(f"stopped in step {trainer.step + 1}; {resumes}")
                raise
        done, steps = trainer.step, self.config.steps
        further = "the same command goes on" if done < steps else f"--steps above {done} goes on"
        where = f"step {done} of {steps} is done, and {further}"
        if trainer.best is None:
            console.print(f"{where}; {self.out} has nothing to use yet: an evaluation writes it")
        else:
            console.print(f"{self.out} has the best checkpoint, with a score of {trainer.best}; {where}")


def _evaluated(measured: Mapping[str, float]) -> str:
    """The results of an evaluation in words."""
    if "accepted" in measured:
        greedy, sampled = measured["accepted"], measured["accepted_sampled"]
        return f"accepted {greedy:.2f} tokens a step at temperature 0, {sampled:.2f} at 1"
    losses = {name.replace("_", " "): value for name, value in measured.items() if "held_out" in name}
    return ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
