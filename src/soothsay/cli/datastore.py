"""`soothsay datastore build | info`: files of texts in which the drafter `rest` looks up continuations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import TextColumn

from soothsay.cli.options import ChatTemplateOption
from soothsay.cli.progress import work_bar
from soothsay.cli.tables import facts_table
from soothsay.cli.whole_texts import read_whole_texts

datastore = typer.Typer(help="Datastores for the drafter 'rest'.", no_args_is_help=True)


@datastore.command()
def build(
    model: Annotated[str, typer.Argument(help="The model to draft for. Its tokenizer encodes the texts.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help="JSON lines with 'messages' or 'text' (optionally .gz), text, or a datasets directory. "
            "Best are answers of the model itself, see 'soothsay train data'.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            help="The file to write. As drafters/rest.store in the model's directory, it is found without a "
            "path.",
        ),
    ],
    chat_template: ChatTemplateOption = None,
) -> None:
    """Build a datastore from texts. Conversations are formatted by the model's chat template."""
    tokenizer, examples = read_whole_texts(model, files, chat_template)
    from soothsay.drafters.lookup.text_store import write_datastore

    measure = TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens,")
    with work_bar("sorting", measure) as progress:
        write_datastore(out, (example.tokens for example in examples), tokenizer, progress=progress)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    tokens = sum(len(example.tokens) for example in examples)
    console.print(f"{out}: {tokens:,} tokens in {len(examples):,} documents, {decimal(out.stat().st_size)}")
    console.print(f"Try:\n  soothsay generate 'Once upon a time' -m {model} -d 'rest(store={out})'")


@datastore.command()
def info(
    file: Annotated[Path, typer.Argument(help="A datastore.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Check whether the datastore fits this model.")
    ] = None,
) -> None:
    """Show what a datastore holds."""
    from soothsay.drafters.lookup.text_store import Datastore, check_tokenizer
    from soothsay.model.checkpoint import open_checkpoint

    store = Datastore(file)
    facts = {
        "store": f"{file}, version {store.version}",
        "holds": f"{store.num_tokens:,} tokens in {store.num_documents:,} documents, "
        f"{decimal(store.num_bytes)}",
        "vocabulary": f"{store.vocab_size:,} tokens, {store.num_distinct:,} of which occur",
        "tokenizer": store.identity,
    }
    if model is not None:
        check_tokenizer(store, open_checkpoint(model).tokenizer(), model)
        facts["fits"] = f"✓ {model}: --drafter 'rest(store={file})'"
    Console(highlight=False, soft_wrap=True).print(facts_table(facts.items()))
