"""`soothsay train layer-skip`: finds the layers that a model can leave out when it drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import records_table
from soothsay.cli.terminal import notice
from soothsay.config import DType
from soothsay.options import FILE, CommonOptions, ModelOptions, argument, option, shared

if TYPE_CHECKING:
    from soothsay.drafters.models.layer_skipping import SkipSet


@dataclass(frozen=True, kw_only=True)
class FindSkippedLayers:
    """Find the layers that the drafter 'layer-skip' leaves out of the model (arXiv 2309.08168).

    Nothing is trained. Layers are left out one after the other: each time the one whose loss costs least.
    """

    model: str = shared(CommonOptions, "model")
    text: Path | None = argument(
        None,
        "Text to measure with: plain text, or .jsonl with 'messages' or 'text'; may be .gz.",
        **FILE,
        show_default="the model writes its own",
    )
    out: Path | None = option(
        None, "The directory to write.", "-o", show_default="drafters/layer-skip beside the model"
    )
    samples: int = option(16, "Pieces of text.", min=1)
    tokens: int = option(128, "Tokens in a piece.", min=2)
    dtype: DType = shared(ModelOptions, "dtype")

    def run(self) -> None:
        """Search, and write the best set of layers."""
        model, out, text = self.model, self.out, self.text
        with notice(f"loading {model} ..."):
            from soothsay.drafters.models.layer_skipping import skip_directory
            from soothsay.errors import DrafterError
            from soothsay.model.checkpoint import open_checkpoint
            from soothsay.model.load import load_model
            from soothsay.quantizing.samples import read_samples, write_samples
            from soothsay.train.skip_search import search

            checkpoint = open_checkpoint(model)
            if out is None and not checkpoint.path.is_dir():
                raise DrafterError(
                    f"{checkpoint.path} is a single file, not a directory that can hold a drafter: give --out"
                )
            target, tokenizer = load_model(checkpoint, self.dtype), checkpoint.tokenizer()
        with notice("reading text ..." if text else f"{model} writes text to measure with ..."):
            if text:
                pieces = read_samples(text, tokenizer, self.samples, self.tokens)
            else:
                pieces = write_samples(target, tokenizer, self.samples, self.tokens, lambda *_: None)
        with progress_bar("leaving out", "layers") as progress:
            found = search(target, pieces, progress)
        best = max(found, key=lambda one: one.speedup)
        directory = out or skip_directory(checkpoint.path)
        best.save(directory, target.config.num_layers)
        _show(found, best, directory)


def _show(found: list[SkipSet], best: SkipSet, directory: Path) -> None:
    table = records_table(
        found,
        {"layers left out": lambda one: ", ".join(map(str, one.skip))},
        {
            "tokens kept": "{.agreement:.1%}",
            "cost of a draft token": "{.cost:.2f}",
            "draft tokens": "{.depth}",
            "best speed-up": "{.speedup:.2f}",
        },
        style=lambda one: "bold" if one is best else "",
    )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{directory} has the best of them.", soft_wrap=True)
    if best.speedup <= 1:
        console.print("None of them is expected to be faster than plain decoding.")
