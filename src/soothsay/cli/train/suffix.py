"""`soothsay train suffix`: keeps a model's answers as texts from which `auto` drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from soothsay.cli.terminal import notice


def suffix(
    model: Annotated[str, typer.Argument(help="The model to draft for. Its tokenizer encodes the answers.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="Answers of the model, from 'soothsay train data': JSON lines with 'messages' or 'text'.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="The file to write. As drafters/suffix.store beside the model's weights, 'auto' finds it.",
        ),
    ],
    tokens: Annotated[
        int, typer.Option(min=1, help="Limit of tokens. A token takes 4 bytes in the file, 100 in memory.")
    ] = 500_000,
) -> None:
    """Keep a model's answers, so that suffix matching drafts from them (REST, arXiv 2311.08252).

    Nothing is trained. Drafts come from what the model has answered to other prompts.
    """
    with notice(f"opening {model} ..."):
        from soothsay.drafters.lookup.suffix import write_texts
        from soothsay.errors import RequestError
        from soothsay.model.checkpoint import open_checkpoint
        from soothsay.train.answer_texts import answer_texts
        from soothsay.train.examples import read_examples

        tokenizer = open_checkpoint(model).tokenizer()
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer, so answers cannot be encoded for it")
    with notice("reading the answers ..."):
        examples, skipped = read_examples(files, tokenizer, _NO_LIMIT)
        texts = answer_texts(examples, tokens)
    if str(skipped):
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(skipped)
    size = write_texts(out, texts, tokenizer.fingerprint.hex())
    count = sum(map(len, texts))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{out}: {count:,} tokens of {len(texts):,} answers, {decimal(size)}")
    console.print(f"Try:\n  soothsay generate 'Hello!' --chat -m {model} -d 'suffix(store={out})'")


_NO_LIMIT = 2**62
"""Limit of tokens in an example: none."""
