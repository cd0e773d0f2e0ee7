"""`soothsay train suffix`: keeps a model's answers as texts from which `auto` drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from soothsay.cli.options import ChatTemplateOption
from soothsay.cli.whole_texts import read_whole_texts


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
        int, typer.Option(min=1, help="Limit of tokens. A token takes 4 bytes in the file, 140 in memory.")
    ] = 500_000,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Keep a model's answers, so that suffix matching drafts from them (REST, arXiv 2311.08252).

    Nothing is trained. Drafts come from what the model has answered to other prompts.
    """
    tokenizer, examples = read_whole_texts(model, files, chat_template)
    from soothsay.drafters.lookup.text_store import write_texts
    from soothsay.train.answer_texts import answer_texts

    texts = answer_texts(examples, tokens)
    size = write_texts(out, texts, tokenizer.fingerprint.hex())
    count = sum(map(len, texts))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{out}: {count:,} tokens of {len(texts):,} answers, {decimal(size)}")
    console.print(f"Try:\n  soothsay generate 'Hello!' --chat -m {model} -d 'suffix(store={out})'")
