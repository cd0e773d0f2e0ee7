"""`soothsay train layer-skip`: finds the layers that a model can leave out when it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from soothsay.cli.options import DTypeOption, ModelArgument
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import numbers_table
from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from soothsay.drafters.models.skip_set import SkipSet


def layer_skip(
    model: ModelArgument,
    text: Annotated[
        Path | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            show_default="the model writes its own",
            help="Text to measure with: plain text, or .jsonl with 'messages' or 'text'; may be .gz.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", show_default="drafters/layer-skip beside the model", help="The directory to write."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of text.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in a piece.")] = 128,
    dtype: DTypeOption = "auto",
) -> None:
    """Find the layers that the drafter 'layer-skip' leaves out of the model (arXiv 2309.08168).

    Nothing is trained. Layers are left out one after the other: each time the one whose loss costs least.
    """
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
        target, tokenizer = load_model(checkpoint, dtype), checkpoint.tokenizer()
    with notice("reading text ..." if text else f"{model} writes text to measure with ..."):
        if text:
            pieces = read_samples(text, tokenizer, samples, tokens)
        else:
            pieces = write_samples(target, tokenizer, samples, tokens, lambda *_: None)
    with progress_bar("leaving out", "layers") as progress:
        found = search(target, pieces, progress)
    best = max(found, key=lambda one: one.speedup)
    directory = out or skip_directory(checkpoint.path)
    best.save(directory, target.config.num_layers)
    _show(found, best, directory)


def _show(found: list[SkipSet], best: SkipSet, directory: Path) -> None:
    headings = "tokens kept", "cost of a draft token", "draft tokens", "best speed-up"
    table = numbers_table(("layers left out",), headings)
    for one in found:
        table.add_row(
            ", ".join(map(str, one.skip)),
            f"{one.agreement:.1%}",
            f"{one.cost:.2f}",
            str(one.depth),
            f"{one.speedup:.2f}",
            style="bold" if one is best else "",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{directory} has the best of them.", soft_wrap=True)
    if best.speedup <= 1:
        console.print("None of them is expected to be faster than plain decoding.")
