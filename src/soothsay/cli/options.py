"""Options that several commands share, one by one and in groups. Each command sets its own defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from soothsay.config import DType

LIMITS = "Limits"

_sampling = partial(typer.Option, rich_help_panel="Sampling")
_limit = partial(typer.Option, rich_help_panel=LIMITS)

MODEL_HELP = (
    "A Hugging Face directory, a .gguf file, sibyl, smollm2, or a name on the hub, OWNER/NAME. "
    "DIRECTORY:TYPE and OWNER/NAME:TYPE choose a GGUF file by its type, such as Q4_K_M."
)

PROMPTS_HELP = "A .txt file with one prompt a line, or JSON lines with messages, turns or a prompt."

ModelOption = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
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
        help="What proposes draft tokens: a name, name(key=value, ...), FILE.py:CLASS, or several with |, > "
        "or + between. 'auto' chooses the fastest, 'none' decodes plainly. No drafter changes the answer. "
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
ChatTemplateOption = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        exists=True,
        dir_okay=False,
        show_default="the model's",
        help="A file with a Jinja template for conversations, in place of the model's own ones.",
    ),
]
MaxRunningOption = Annotated[int, _limit("--max-running", min=1, help="Limit of answers in one step.")]
MaxStallOption = Annotated[
    float,
    _limit(
        "--max-stall",
        min=0.01,
        help="Limit of seconds for a step that reads prompts. With a smaller limit, running answers "
        "flow more evenly and short prompts wait less, but reading a long prompt takes longer.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Limit of tokens in an answer.")]
AnswerTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, help="Limit of tokens in an answer.")
]
"""As `MaxTokensOption`, but an answer has a token: nothing else can be measured."""
TemperatureOption = Annotated[
    float, _sampling("--temperature", "-t", help="0: always the most likely token.")
]
AnswerSeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of all answers.")]
SeedOption = Annotated[
    int | None, _sampling("--seed", show_default="random", help="The same seed gives the same answer.")
]


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs, as `LLM` takes it."""

    drafter: DrafterOption = "auto"
    dtype: DTypeOption = "auto"
    max_context: MaxContextOption = None
    chat_template: ChatTemplateOption = None
    generation_config: Annotated[
        str,
        _sampling(
            "--generation-config",
            help="Where defaults of sampling parameters are from: 'auto', the model's own files; a folder "
            "with a generation_config.json; or 'none'.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. Where an option is not given, the model's files say it."""

    temperature: Annotated[
        float | None,
        _sampling("--temperature", "-t", show_default="the model's", help="0: always the most likely token."),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling(
            "--top-p",
            show_default="the model's",
            help="Keep the most likely tokens, up to this total probability.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        _sampling(
            "--top-k", show_default="the model's", help="Keep this many of the most likely tokens; 0: all."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(
            "--min-p",
            show_default="the model's",
            help="Keep tokens that are at least this likely, relative to the most likely one.",
        ),
    ] = None
    seed: SeedOption = None

    def given(self, **others: Any) -> dict[str, Any]:
        """The parameters that were given, and `others`. Raises `RequestError` for an impossible value.

        Commands call this before they load a model, which takes time.
        """
        from soothsay.core.params import SamplingParams

        given = {name: value for name, value in asdict(self).items() if value is not None}
        SamplingParams(**given, **others)
        return {**given, **others}
