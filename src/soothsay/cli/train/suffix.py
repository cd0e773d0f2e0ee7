"""`soothsay train suffix`: keeps a model's answers as texts from which `auto` drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from soothsay.cli.whole_texts import read_whole_texts
from soothsay.options import REQUIRED, ModelOptions, argument, option, shared


@dataclass(frozen=True, kw_only=True)
class Suffix:
    """Keep a model's answers, so that suffix matching drafts from them (REST, arXiv 2311.08252).

    Nothing is trained. Drafts come from what the model has answered to other prompts.
    """

    model: str = argument(REQUIRED, "The model to draft for. Its tokenizer encodes the answers.")
    files: list[Path] = argument(
        REQUIRED,
        "Answers of the model, from 'soothsay train data': JSON lines with 'messages' or 'text'.",
        exists=True,
    )
    out: Path = option(
        REQUIRED,
        "The file to write. As drafters/suffix.store beside the model's weights, 'auto' finds it.",
        "-o",
        dir_okay=False,
    )
    tokens: int = option(500_000, "Limit of tokens. A token takes 4 bytes in the file, 140 in memory.", min=1)
    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Read the answers, and write them."""
        tokenizer, examples = read_whole_texts(self.model, self.files, self.chat_template)
        from soothsay.drafters.lookup.suffix import write_texts
        from soothsay.train.answer_texts import answer_texts

        texts = answer_texts(examples, self.tokens)
        size = write_texts(self.out, texts, tokenizer.fingerprint.hex())
        count = sum(map(len, texts))
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(f"{self.out}: {count:,} tokens of {len(texts):,} answers, {decimal(size)}")
        console.print(
            f"Try:\n  soothsay generate 'Hello!' --chat -m {self.model} -d 'suffix(store={self.out})'"
        )
