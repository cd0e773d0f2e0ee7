"""Options that several commands share. Each command sets its own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from soothsay.config import DType

_SAMPLING = "Sampling"
LIMITS = "Limits"

MODEL_HELP = (
    "A Hugging Face directory, a .gguf file, sibyl, smollm2, or a name on the hub, OWNER/NAME. "
    "DIRECTORY:TYPE and OWNER/NAME:TYPE choose a GGUF file by its type, such as Q4_K_M."
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=MODEL_HELP,
    ),
]
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP)]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        show_default="the model as given, without its folder",
        help="Name of the model in requests.",
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="What proposes draft tokens: a name, name(key=value, ...), or several with > or + between. "
        "'auto' chooses the fastest, 'none' decodes plainly. No drafter changes the answer. "
        "'soothsay inspect' lists those that fit.",
    ),
]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Number format of the linear layers.")]
MaxContextOption = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        min=2,
        show_default="the model's",
        help="Limit of tokens in prompt and answer together.",
    ),
]
KvTokensOption = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens",
        min=1,
        show_default="by memory",
        help="Size of the KV cache in tokens, for all requests together.",
    ),
]
MaxRunningOption = Annotated[
    int,
    typer.Option("--max-running", min=1, help="Limit of answers in one step.", rich_help_panel=LIMITS),
]
KeepOption = Annotated[
    Path | None,
    typer.Option(
        "--keep",
        file_okay=False,
        show_default="forget it at the end",
        help="A directory that keeps what drafters learn across restarts, apart for each tenant. It holds "
        "what users wrote, readable to this user alone.",
    ),
]
LearnOption = Annotated[
    float,
    typer.Option(
        "--learn",
        min=0,
        max=1,
        help="Share of a core's time, such as 0.1, in which trained drafters learn from answers.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Limit of tokens in an answer.")]
GenerationConfigOption = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="Where defaults of sampling parameters are from: 'auto', the model's own files; a folder with a "
        "generation_config.json; or 'none'.",
        rich_help_panel=_SAMPLING,
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", "-t", help="0: always the most likely token.", rich_help_panel=_SAMPLING),
]
OptionalTemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        show_default="the model's",
        help="0: always the most likely token.",
        rich_help_panel=_SAMPLING,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        show_default="the model's",
        help="Keep the most likely tokens, up to this total probability.",
        rich_help_panel=_SAMPLING,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        show_default="the model's",
        help="Keep this many of the most likely tokens; 0: all.",
        rich_help_panel=_SAMPLING,
    ),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        show_default="the model's",
        help="Keep tokens that are at least this likely, relative to the most likely one.",
        rich_help_panel=_SAMPLING,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        show_default="random",
        help="The same seed gives the same answer.",
        rich_help_panel=_SAMPLING,
    ),
]


def given_sampling(**options: Any) -> dict[str, Any]:
    """The sampling parameters that the user gave. Raises `RequestError` for an impossible value.

    Commands call this before they load a model, which takes time, and which has defaults for the others.
    """
    from soothsay.core.params import SamplingParams

    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given)
    return given
