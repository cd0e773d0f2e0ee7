"""Options as fields of dataclasses: default, help text, names and bounds, each said once; and shared groups.

The dataclasses hold plain values, and can be made by hand.
`soothsay.cli.command_classes` makes commands of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from soothsay.config import DType, KVDType

REQUIRED = MISSING
"""The default of an option that must be given."""

DECLARED = "soothsay option"
"""The key of a `Declaration` in the metadata of a field."""

FILE: Mapping[str, Any] = {"exists": True, "dir_okay": False}
"""Settings of a path: a file that exists."""

MODEL = (
    "A Hugging Face directory, a .gguf file, sibyl, smollm2, or a name on the hub, OWNER/NAME. "
    "DIRECTORY:TYPE and OWNER/NAME:TYPE choose a GGUF file by its type, such as Q4_K_M."
)
PROMPTS = (
    "A .txt file with a user's message in each line; or JSON lines with messages, turns, or a prompt to "
    "continue. It may be compressed (.gz)."
)
"""Help texts of options that differ in the rest."""


@dataclass(frozen=True)
class Declaration:
    """What a command line has to know about a field."""

    help: str
    names: tuple[str, ...]  # such as "-d"; without a long one, it is "--" and the field's name
    is_argument: bool
    settings: Mapping[str, Any]  # bounds and looks, by the names of `typer.Option` and `typer.Argument`


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """A field that is an option.

    Args:
        default: its value if it is not given, or `REQUIRED`.
        help: the text for `--help`.
        names: its names, if they are others than "--" with the field's name. A short one is added to that.
        settings: see `Declaration`. `panel` names the part of the help in which it stands.
    """
    return _declared(default, Declaration(help, names, False, settings))


def optional(instead: str, help: str, *names: str, **settings: Any) -> Any:
    """An option that need not be given. Then it is None, and the help shows `instead` as its default."""
    return option(None, help, *names, show_default=instead, **settings)


def required(help: str, *names: str, **settings: Any) -> Any:
    """An option that must be given. Arguments are those of `option`."""
    return option(REQUIRED, help, *names, **settings)


def flag(help: str, *names: str, **settings: Any) -> Any:
    """An option without a value, which is False if it is not given. Arguments are those of `option`."""
    return option(False, help, *names, **settings)


def argument(help: str, *, default: Any = REQUIRED, **settings: Any) -> Any:
    """A field that is given by its place. Arguments are those of `option`."""
    return _declared(default, Declaration(help, (), True, settings))


def shared(group: type[Any], name: str, **changes: Any) -> Any:
    """A field as `group` declares it, for another dataclass. `changes`: another default, or settings."""
    there = group.__dataclass_fields__[name]
    declaration: Declaration = there.metadata[DECLARED]
    default = changes.pop("default", there.default)
    settings = {"panel": getattr(group, "PANEL", None), **declaration.settings, **changes}
    return _declared(default, replace(declaration, settings=settings))


def _declared(default: Any, declaration: Declaration) -> Any:
    return field(default=default, metadata={DECLARED: declaration})


@dataclass(frozen=True)
class CommonOptions:
    """Options of many commands, which have defaults and bounds of their own: see `shared`."""

    model: str = argument(MODEL)
    max_tokens: int = option(256, "Limit of tokens in an answer.", "-n")
    temperature: float = option(0.0, "0: always the most likely token.", "-t")


common = partial(shared, CommonOptions)
"""A field as `CommonOptions` declares it; see `shared`."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs, as `LLM` takes it."""

    drafter: str = option(
        "auto",
        "What proposes draft tokens: a name, name(key=value, ...), FILE.py:CLASS, or several with |, > "
        "or + between. 'auto' chooses the fastest, 'none' decodes plainly. No drafter changes the answer. "
        "'soothsay inspect' lists those that fit.",
        "-d",
    )
    dtype: DType = option("auto", "Number format of the linear layers.")
    kv_dtype: KVDType = option("auto", "Number format of the KV cache; 'int8' takes about half the memory.")
    device: str = option(
        "auto", "Where the model runs: cpu, cuda, cuda:1. 'auto': SOOTHSAY_DEVICE, else cpu."
    )
    max_context: int | None = optional("the model's", "Limit of tokens in prompt and answer together.", min=2)
    chat_template: Path | None = optional(
        "the model's",
        "A file with a Jinja template for conversations, in place of the model's own ones.",
        **FILE,
    )
    generation_config: str = option(
        "auto",
        "Where defaults of sampling parameters are from: 'auto', the model's own files; a folder "
        "with a generation_config.json; or 'none'.",
        panel="Sampling",
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. Where an option is not given, the model's files say it."""

    PANEL = "Sampling"

    temperature: float | None = common("temperature", default=None, show_default="the model's")
    top_p: float | None = optional(
        "the model's", "Keep the most likely tokens, up to this total probability."
    )
    top_k: int | None = optional("the model's", "Keep this many of the most likely tokens; 0: all.")
    min_p: float | None = optional(
        "the model's", "Keep tokens that are at least this likely, relative to the most likely one."
    )
    seed: int | None = optional("random", "The same seed gives the same answer.")

    def given(self, **others: Any) -> dict[str, Any]:
        """The parameters that were given, and `others`. Raises `RequestError` for an impossible value.

        Commands call this before they load a model, which takes time.
        """
        from soothsay.core.params import SamplingParams

        given = {name: value for name, value in asdict(self).items() if value is not None}
        SamplingParams(**given, **others)
        return {**given, **others}
