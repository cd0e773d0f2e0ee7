"""`soothsay bench quality`: measures what integers cost in quality."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from soothsay.cli.bench.bench_options import JsonOption, dtypes_option, known_dtypes
from soothsay.cli.options import ModelArgument
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import numbers_table
from soothsay.files import write_json


def quality(
    model: ModelArgument,
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT...", exists=True, dir_okay=False, help="Text files to read, in order."),
    ],
    dtype: Annotated[list[str] | None, dtypes_option("auto")] = None,
    reference: Annotated[
        str | None,
        typer.Option(show_default="MODEL", help="The model whose float32 is the reference."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to read, at most.")] = 20_000,
    chunk: Annotated[int, typer.Option(min=4, help="Tokens that are read at once.")] = 512,
    to_json: JsonOption = None,
) -> None:
    """Compare a model's distributions with those of float32, of the same weights or of a reference.

    The model reads the texts in chunks. For each token of a chunk's second half, the distribution that
    predicts it is compared: its divergence (KL) from that of float32, in nats, and whether both have the same
    best token.
    """
    dtypes = known_dtypes(dtype or ["auto"])
    text = "\n\n".join(file.read_text("utf-8", "replace") for file in texts)
    with progress_bar(f"reading with {model}", "chunks") as progress:
        from soothsay.bench.quality import bench_quality

        found = bench_quality(
            model, text, dtypes=dtypes, reference=reference, tokens=tokens, chunk=chunk, progress=progress
        )
    table = numbers_table(
        ("dtype",),
        ("bits a weight", "perplexity", "KL to float32", "equal best"),
        title=Path(model).name,
        caption=f"{found[0].tokens:,} distributions",
    )
    for one in found:
        row = f"{one.bits:.2f}", f"{one.perplexity:.3f}", f"{one.divergence:.5f}", f"{one.equal_best:.2%}"
        table.add_row(one.dtype, *row)
    Console(highlight=False).print(table)
    if to_json is not None:
        write_json(to_json, [asdict(one) for one in found], indent=1)
