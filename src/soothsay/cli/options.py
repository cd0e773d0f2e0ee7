"""Options that commands share, each spelled out once. Defaults stand with the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from soothsay.config import DType

_SAMPLING = "Sampling"

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A Hugging Face directory, a .gguf file, a hub name, or a bundled model's name.",
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="Who guesses: a name, name(key=value, ...), or several with > or + between; 'auto' takes "
        "whatever pays, 'none' decodes plainly. Never changes what is said. 'soothsay inspect' lists those "
        "that fit.",
    ),
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="What linear layers compute in.")]
MaxContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        min=2,
        show_default="the model's",
        help="Tokens of prompt and answer together, at most.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of an answer, at most.")]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", "-t", help="0: always the likeliest token.", rich_help_panel=_SAMPLING),
]
TopPOption = Annotated[
    float,
    typer.Option("--top-p", help="Keep the likeliest tokens up to this share.", rich_help_panel=_SAMPLING),
]
TopKOption = Annotated[
    int, typer.Option("--top-k", help="Keep so many tokens; 0: all.", rich_help_panel=_SAMPLING)
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        help="Keep tokens at least this likely, relative to the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        show_default="a fresh one",
        help="The same seed says the same again.",
        rich_help_panel=_SAMPLING,
    ),
]
