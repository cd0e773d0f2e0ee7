"""Texts of files in the tokens of a model, for the commands that keep texts to draft from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from soothsay.cli.terminal import notice

if TYPE_CHECKING:
    from soothsay.tokenizer import Tokenizer
    from soothsay.train.examples import Example

_NO_LIMIT = 2**62
"""Limit of tokens in a text: none."""


def read_whole_texts(
    model: str, files: Sequence[Path], chat_template: Path | None
) -> tuple[Tokenizer, list[Example]]:
    """Open a model's tokenizer and read texts with it. Messages on stderr say what is read and skipped.

    Raises `SoothsayError` if the model has no tokenizer, or the files cannot be read.
    """
    with notice(f"opening {model} ..."):
        from soothsay.errors import RequestError
        from soothsay.model.checkpoint import open_checkpoint
        from soothsay.tokenizer import with_layout
        from soothsay.train.examples import read_examples

        tokenizer = with_layout(open_checkpoint(model).tokenizer(), chat_template)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer, so texts cannot be encoded for it")
    with notice("reading the texts ..."):
        examples, skipped = read_examples(files, tokenizer, _NO_LIMIT)
    if str(skipped):
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(skipped)
    return tokenizer, examples
