"""`soothsay datastore build | info`: files of texts in which the drafter `rest` looks up continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import TextColumn

from soothsay.cli.command_classes import add_commands
from soothsay.cli.progress import work_bar
from soothsay.cli.tables import facts_table
from soothsay.cli.whole_texts import read_whole_texts
from soothsay.options import REQUIRED, ModelOptions, argument, option, shared


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build a datastore from texts. Conversations are formatted by the model's chat template."""

    model: str = argument(REQUIRED, "The model to draft for. Its tokenizer encodes the texts.")
    files: list[Path] = argument(
        REQUIRED,
        "JSON lines with 'messages' or 'text' (optionally .gz), text, or a datasets directory. "
        "Best are answers of the model itself, see 'soothsay train data'.",
        exists=True,
    )
    out: Path = option(
        REQUIRED,
        "The file to write. As drafters/rest.store in the model's directory, it is found without a path.",
        "-o",
        dir_okay=False,
    )
    chat_template: Path | None = shared(ModelOptions, "chat_template")

    def run(self) -> None:
        """Read the texts, and write the datastore."""
        tokenizer, examples = read_whole_texts(self.model, self.files, self.chat_template)
        from soothsay.drafters.lookup.datastore import write_datastore

        out, measure = self.out, TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens,")
        with work_bar("sorting", measure) as progress:
            write_datastore(out, (example.tokens for example in examples), tokenizer, progress=progress)
        console = Console(highlight=False, markup=False, soft_wrap=True)
        tokens = sum(len(example.tokens) for example in examples)
        console.print(
            f"{out}: {tokens:,} tokens in {len(examples):,} documents, {decimal(out.stat().st_size)}"
        )
        console.print(f"Try:\n  soothsay generate 'Once upon a time' -m {self.model} -d 'rest(store={out})'")


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show what a datastore holds."""

    file: Path = argument(REQUIRED, "A datastore.")
    model: str | None = option(None, "Check whether the datastore fits this model.", "-m")

    def run(self) -> None:
        """Print the facts."""
        from soothsay.drafters.lookup.datastore import Datastore, check_tokenizer
        from soothsay.model.checkpoint import open_checkpoint

        store = Datastore(self.file)
        facts = {
            "store": f"{self.file}, version {store.version}",
            "holds": f"{store.num_tokens:,} tokens in {store.num_documents:,} documents, "
            f"{decimal(store.num_bytes)}",
            "vocabulary": f"{store.vocab_size:,} tokens, {store.num_distinct:,} of which occur",
            "tokenizer": store.fingerprint.hex(),
        }
        if self.model is not None:
            check_tokenizer(store, open_checkpoint(self.model).tokenizer(), self.model)
            facts["fits"] = f"✓ {self.model}: --drafter 'rest(store={self.file})'"
        Console(highlight=False, soft_wrap=True).print(facts_table(facts.items()))


datastore = typer.Typer(help="Datastores for the drafter 'rest'.", no_args_is_help=True)
add_commands(datastore, {"build": Build, "info": Info})
