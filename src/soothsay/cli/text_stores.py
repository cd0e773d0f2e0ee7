"""`soothsay datastore build | info` and `soothsay train suffix`: files of texts to draft from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.filesize import decimal
from rich.progress import TextColumn

from soothsay.cli.command_classes import add_commands
from soothsay.cli.terminal import facts_table, notice, say, work_bar
from soothsay.options import ModelOptions, argument, option, required, shared

if TYPE_CHECKING:
    from soothsay.tokenizer import Tokenizer
    from soothsay.train.examples import Example

_NO_LIMIT = 2**62
"""Limit of tokens in a text: none."""


@dataclass(frozen=True, kw_only=True)
class BuildDatastore:
    """Build a datastore from texts. Conversations are formatted by the model's chat template."""

    model: str = argument()
    """The model to draft for. Its tokenizer encodes the texts."""

    files: list[Path] = argument(exists=True)
    """JSON lines with 'messages' or 'text' (optionally .gz), text, or a datasets directory. Best are
    answers of the model itself, see 'soothsay train data'."""

    out: Path = required("-o", dir_okay=False)
    """The file to write. As drafters/rest.store in the model's directory, it is found without a path."""

    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Read the texts, and write the datastore."""
        tokenizer, examples = read_texts(self.model, self.files, self.chat_template)
        from soothsay.drafters.lookup.text_store import write_datastore

        out, measure = self.out, TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens,")
        with work_bar("sorting", measure) as progress:
            write_datastore(out, (example.tokens for example in examples), tokenizer, progress=progress)
        tokens, size = sum(len(example.tokens) for example in examples), decimal(out.stat().st_size)
        say(
            f"{out}: {tokens:,} tokens in {len(examples):,} documents, {size}",
            f"Try:\n  soothsay generate --raw 'Once upon a time' -m {self.model} -d 'rest(store={out})'",
        )


@dataclass(frozen=True, kw_only=True)
class ShowDatastore:
    """Show what a datastore holds."""

    file: Path = argument()
    """A datastore."""

    model: str | None = option(None, "-m")
    """Check whether the datastore fits this model."""

    def run(self) -> None:
        """Print the facts."""
        from soothsay.drafters.lookup.text_store import Datastore, check_tokenizer
        from soothsay.model.weights.checkpoint import open_checkpoint

        store = Datastore(self.file)
        facts = {
            "store": f"{self.file}, version {store.version}",
            "holds": f"{store.num_tokens:,} tokens in {store.num_documents:,} documents, "
            f"{decimal(store.num_bytes)}",
            "vocabulary": f"{store.vocab_size:,} tokens, {store.num_distinct:,} of which occur",
            "tokenizer": store.identity,
        }
        if self.model is not None:
            check_tokenizer(store, open_checkpoint(self.model).tokenizer(), self.model)
            facts["fits"] = f"✓ {self.model}: --drafter 'rest(store={self.file})'"
        say(facts_table(facts.items()))


@dataclass(frozen=True, kw_only=True)
class KeepAnswers:
    """Keep a model's answers, so that suffix matching drafts from them (REST, arXiv 2311.08252).

    Nothing is trained. Drafts come from what the model has answered to other prompts.
    """

    model: str = argument()
    """The model to draft for. Its tokenizer encodes the answers."""

    files: list[Path] = argument(exists=True)
    """Answers of the model, from 'soothsay train data': JSON lines with 'messages' or 'text'."""

    out: Path = required("-o", dir_okay=False)
    """The file to write. As drafters/suffix.store beside the model's weights, 'auto' finds it."""

    tokens: int = option(500_000, min=1)
    """Limit of tokens. A token takes 4 bytes in the file, 140 in memory."""

    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Read the answers, and write them."""
        tokenizer, examples = read_texts(self.model, self.files, self.chat_template)
        from soothsay.drafters.lookup.text_store import write_texts
        from soothsay.train.examples import answer_texts

        texts = answer_texts(examples, self.tokens)
        size = write_texts(self.out, texts, tokenizer.fingerprint.hex())
        count = sum(map(len, texts))
        say(
            f"{self.out}: {count:,} tokens of {len(texts):,} answers, {decimal(size)}",
            f"Try:\n  soothsay generate 'Hello!' --chat -m {self.model} -d 'suffix(store={self.out})'",
        )


def read_texts(
    model: str, files: list[Path], template: Path | None, max_tokens: int = _NO_LIMIT
) -> tuple[Tokenizer, list[Example]]:
    """Open a model's tokenizer and read texts with it. Messages on stderr say what is read and skipped.

    Raises `SoothsayError` if the model has no tokenizer, or the files cannot be read.
    """
    with notice(f"opening {model} ..."):
        from soothsay.errors import RequestError
        from soothsay.model.weights.checkpoint import open_checkpoint
        from soothsay.tokenizer import with_layout
        from soothsay.train.examples import read_examples

        tokenizer = with_layout(open_checkpoint(model).tokenizer(), template)
    if tokenizer is None:
        raise RequestError(f"{model} has no tokenizer, so texts cannot be encoded for it")
    with notice("reading the texts ..."):
        examples, skipped = read_examples(files, tokenizer, max_tokens)
    if str(skipped):
        say(str(skipped), stderr=True, style="yellow")
    return tokenizer, examples


datastore = typer.Typer(help="Datastores for the drafter 'rest'.", no_args_is_help=True)
add_commands(datastore, {"build": BuildDatastore, "info": ShowDatastore})
