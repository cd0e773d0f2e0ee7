"""Options as fields of dataclasses: default, help text, names and bounds, each said once; and shared groups.

The dataclasses hold plain values, and can be made by hand.
`soothsay.cli.command_classes` makes commands of them.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, replace
from functools import cache, partial
from inspect import get_annotations, getsource
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from soothsay.config import DType, KVDType, memory_size
from soothsay.errors import ModelError, SoothsayError
from soothsay.processors import granted_processors, use_threads

if TYPE_CHECKING:
    from soothsay.llm import LLM

REQUIRED = MISSING
"""The default of an option that must be given."""

DECLARED = "soothsay option"
"""The key of a `Declaration` in the metadata of a field."""

FILE: Mapping[str, Any] = {"exists": True, "dir_okay": False}
"""Settings of a path: a file that exists."""

BUNDLED = "sibyl"
"""The model that comes with the package: a tiny one, for demonstrations."""

MAIN = ""
"""The panel of the help that comes first, with the options that matter most. It has ten at most."""

MODEL = (
    "A Hugging Face directory, a .gguf file, a name that 'soothsay models' lists, or OWNER/NAME on the hub. "
    "DIRECTORY:TYPE and OWNER/NAME:TYPE choose a GGUF file by its type, such as Q4_K_M."
)
PROMPTS = (
    "A .txt file with a user's message in each line; or JSON lines with messages, turns, or a prompt to "
    "continue. It may be compressed (.gz)."
)
"""Help texts of options that differ in the rest."""


@dataclass(frozen=True)
class Declaration:
    """What a command line has to know about a field, besides its docstring."""

    names: tuple[str, ...]  # such as "-d"; without a long one, it is "--" and the field's name
    is_argument: bool
    help: str  # the text for `--help`; empty: the docstring says it
    settings: Mapping[str, Any]  # bounds and looks, by the names of `typer.Option` and `typer.Argument`
    origin: tuple[type[Any], str] | None = None  # the class and the name of a field that this one repeats


def option(default: Any, *names: str, help: str = "", **settings: Any) -> Any:
    """A field that is an option. Its docstring is the text for `--help`, see `help_of`.

    Args:
        default: its value if it is not given, or `REQUIRED`.
        names: its names, if they are others than "--" with the field's name. A short one is added to that.
        help: the text for `--help`, if it is made of other texts.
        settings: see `Declaration`. `panel` names the part of the help in which it stands.
    """
    return _declared(default, Declaration(names, False, help, settings))


def optional(instead: str, *names: str, **settings: Any) -> Any:
    """An option that need not be given. Then it is None, and the help shows `instead` as its default."""
    return option(None, *names, show_default=instead, **settings)


def required(*names: str, **settings: Any) -> Any:
    """An option that must be given. Arguments are those of `option`."""
    return option(REQUIRED, *names, **settings)


def flag(*names: str, **settings: Any) -> Any:
    """An option without a value, which is False if it is not given. Arguments are those of `option`."""
    return option(False, *names, **settings)


def argument(*, default: Any = REQUIRED, help: str = "", **settings: Any) -> Any:
    """A field that is given by its place. Arguments are those of `option`."""
    return _declared(default, Declaration((), True, help, settings))


def shared(group: type[Any], name: str, **changes: Any) -> Any:
    """A field as `group` declares it, for another dataclass. `changes`: default, help or settings."""
    there = group.__dataclass_fields__[name]
    declaration: Declaration = there.metadata[DECLARED]
    default, help = changes.pop("default", there.default), changes.pop("help", "")
    settings = {"panel": getattr(group, "PANEL", None), **declaration.settings, **changes}
    return _declared(default, replace(declaration, help=help, settings=settings, origin=(group, name)))


def _declared(default: Any, declaration: Declaration) -> Any:
    return field(default=default, metadata={DECLARED: declaration})


def help_of(group: type[Any], name: str) -> str:
    """The help of an option: the first paragraph of its docstring. It may have that of its origin."""
    declaration: Declaration = group.__dataclass_fields__[name].metadata[DECLARED]
    owner = next(kind for kind in group.__mro__ if name in get_annotations(kind))
    if text := _docstrings(owner).get(name) or declaration.help:
        return text
    return "" if declaration.origin is None else help_of(*declaration.origin)


@cache
def _docstrings(owner: type[Any]) -> dict[str, str]:
    """The first paragraphs of the docstrings of a class's fields, as far as its source is there."""
    found = dict[str, str]()
    with suppress(OSError):
        (made,) = ast.parse(dedent(getsource(owner))).body
        for field, text in pairwise(made.body if isinstance(made, ast.ClassDef) else ()):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    found[name] = " ".join(doc.partition("\n\n")[0].split())
    return found


DRAFTERS = (
    *("auto", "none", "prompt-lookup", "rest", "recycling", "lookahead", "draft-model", "layer-skip"),
    *("eagle", "eagle2", "eagle3", "mtp", "assistant", "medusa", "hydra", "block", "dflash", "peagle"),
    *("redrafter", "suffix", "ngram"),
)
"""The names of the registry of drafters, whose import takes too long for a shell that completes a word."""


def drafters_like(incomplete: str) -> list[str]:
    """Names of drafters that a shell may put in place of `incomplete`."""
    return [name for name in DRAFTERS if name.startswith(incomplete)]


def models_like(incomplete: str) -> list[str]:
    """Models that a shell may put in place of `incomplete`: names, GGUF files, and directories."""
    from soothsay.model.weights.hub import known_models

    start = incomplete.rpartition("/")[2]
    folder = incomplete.removesuffix(start)
    paths = Path(folder).expanduser().glob(f"{start}*")
    files = [f"{folder}{path.name}{'/' if path.is_dir() else ''}" for path in sorted(paths)]
    names = [model.name for model in known_models() if model.name.startswith(incomplete)]
    return names + [file for file in files if file.endswith(("/", ".gguf"))]


@dataclass(frozen=True)
class CommonOptions:
    """Options of many commands, which have defaults and bounds of their own: see `shared`."""

    model: str = argument(help=MODEL, autocompletion=models_like)
    named: str | None = optional(BUNDLED, "--model", "-m", help=MODEL, autocompletion=models_like)
    max_tokens: int = option(256, "-n")
    """Limit of tokens in an answer."""

    temperature: float = option(0.0, "-t")
    """0: always the most likely token."""

    served_name: str | None = optional("the model as given, without its folder", "--served-model-name")
    """Name of the model in requests."""


common = partial(shared, CommonOptions)
"""A field as `CommonOptions` declares it; see `shared`."""


@dataclass(frozen=True)
class ModelChoice:
    """The model of a command: in its place, or by name."""

    place: str | None = common("model", default=None, metavar="MODEL", show_default=False)
    model: str | None = option(
        None, "--model", "-m", panel="Model", show_default=False, autocompletion=models_like
    )
    """The same as MODEL."""

    @property
    def given(self) -> str | None:
        """The model that was named; None: no model was. Raises `SoothsayError` if there are two."""
        if None not in (self.place, self.model) and self.place != self.model:
            raise SoothsayError(f"give one model: MODEL is {self.place!r}, but --model is {self.model!r}")
        return self.place or self.model

    @property
    def name(self) -> str:
        """The model. Raises `SoothsayError` if there is none, or if there are two."""
        if self.given:
            return self.given
        raise SoothsayError("give a model, such as smollm2; 'soothsay models' lists more")


@dataclass(frozen=True)
class ModelOrSibyl(ModelChoice):
    """The model of a command. If none is named, it is the bundled one."""

    place: str | None = common("model", default=None, metavar="MODEL", show_default=BUNDLED)

    @property
    def name(self) -> str:
        """See `ModelChoice`."""
        return self.given or BUNDLED


def checked_threads(count: int | None) -> int | None:
    """The value of --threads. Raises `ModelError` if there are fewer cores."""
    if count is not None and count > (cores := granted_processors()):
        raise ModelError(
            f"--threads {count} is more than the {cores} physical cores that this process may use"
        )
    return count


def checked_memory(size: str | None) -> str | None:
    """The value of --kv-memory. Raises `ModelError` if it is no size."""
    try:
        if size is not None:
            memory_size(size)
    except ModelError as error:
        raise ModelError(f"--kv-memory: {error}") from None
    return size


def adapters_of(lora: Sequence[str] | None) -> dict[str, str]:
    """The adapters that --lora names, as `LLM` takes them. Raises `ModelError` if one has no name or path."""
    adapters = dict[str, str]()
    for given in lora or ():
        name, _, path = given.partition("=")
        if not name or not path or name in adapters:
            raise ModelError(f"--lora {given}: give NAME=PATH, with a name of its own")
        adapters[name] = path
    return adapters


def checked_adapters(lora: list[str] | None) -> list[str] | None:
    """The value of --lora. Raises `ModelError` as `adapters_of` does."""
    adapters_of(lora)
    return lora


def only_adapter(lora: Sequence[str] | None) -> str | None:
    """The adapter of a command that answers with one at most. Raises `ModelError` if there are several."""
    names = [*adapters_of(lora)]
    if len(names) > 1:
        raise ModelError(f"one adapter answers here, and --lora gives {', '.join(names)}; give it once")
    return next(iter(names), None)


def checked_kernels(name: str) -> str:
    """The value of --kernels. Raises `ModelError` if there are none of this name here."""
    if name != "auto":
        from soothsay.model.native.library import check_kernels

        check_kernels(name)
    return name


def check_room(kv_memory: str | None = None, device: str = "auto") -> None:
    """Raise `ModelError` if a KV cache on the CPU is larger than what is free, before a model is loaded."""
    place = os.environ.get("SOOTHSAY_DEVICE", "cpu") if device == "auto" else device
    if kv_memory is None or place != "cpu":
        return
    from soothsay.machine import usable_memory

    free, whole = usable_memory()
    if memory_size(kv_memory) > free:
        raise ModelError(f"--kv-memory {kv_memory}: of {whole}, {free / 1e9:,.1f} GB are free; give less")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    PANEL = "Model"

    dtype: DType = option("auto", panel=MAIN)
    """Number format of the linear layers."""

    max_context: int | None = optional("the model's", min=2, panel=MAIN)
    """Limit of tokens in prompt and answer together."""

    threads: int | None = optional("the physical cores", min=1, callback=checked_threads, panel=MAIN)
    """Number of threads that compute."""

    kv_memory: str | None = optional("25% at most", metavar="SIZE", callback=checked_memory, panel=MAIN)
    """Memory of the KV cache: bytes, such as 4GiB, or a share of what is free, such as 50%."""

    kv_dtype: KVDType = option("auto")
    """Number format of the KV cache; 'int8' takes about half the memory."""

    device: str = option("auto")
    """Where the model runs: cpu, cuda, cuda:1. 'auto': SOOTHSAY_DEVICE, else cpu."""

    kernels: str = option("auto", callback=checked_kernels)
    """What computes: an instruction set such as avx2, or 'stock', PyTorch's operations. 'auto': the
    fastest that run here."""

    lora: list[str] | None = optional("none", metavar="NAME=PATH", callback=checked_adapters)
    """A LoRA adapter of the model: a directory as PEFT writes it, or OWNER/NAME on the hub. 'generate'
    and 'chat' answer with it, and requests to a server name it as their model. Can be repeated."""

    chat_template: Path | None = optional("the model's", **FILE)
    """A file with a Jinja template for conversations, in place of the model's own ones."""


@dataclass(frozen=True)
class ModelOptions(LoadOptions):
    """How a model is loaded and answers."""

    drafter: str = option("auto", "-d", panel=MAIN, autocompletion=drafters_like)
    """What proposes draft tokens: a name, name(key=value, ...), FILE.py:CLASS, or several with |, > or +
    between. 'auto' chooses the fastest, 'none' decodes plainly. No drafter changes the answer. 'soothsay
    inspect' lists those that fit."""

    generation_config: str = option("auto", panel="Sampling")
    """Where defaults of sampling parameters are from: 'auto', the model's own files; a folder with a
    generation_config.json; or 'none'."""


def build_llm(
    model: str, *, threads: int | None = None, lora: Sequence[str] | None = None, **options: Any
) -> LLM:
    """An `LLM` by the options of a command. `threads`: see `use_threads`. `options`: those of `LLM`.

    It imports torch only here: many processes that know these options work without torch.
    """
    use_threads(threads)
    from soothsay.llm import LLM

    return LLM(model, adapters=adapters_of(lora), **options)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. Where an option is not given, the model's files say it."""

    PANEL = "Sampling"

    temperature: float | None = common("temperature", default=None, show_default="the model's", panel=MAIN)
    top_p: float | None = optional("the model's")
    """Keep the most likely tokens, up to this total probability."""

    top_k: int | None = optional("the model's")
    """Keep this many of the most likely tokens; 0: all."""

    min_p: float | None = optional("the model's")
    """Keep tokens that are at least this likely, relative to the most likely one."""

    seed: int | None = optional("random")
    """The same seed gives the same answer."""

    def given(self, **others: Any) -> dict[str, Any]:
        """The parameters that were given, and `others`. Raises `RequestError` for an impossible value.

        Commands call this before they load a model, which takes time.
        """
        from soothsay.core.params import SamplingParams

        given = {name: value for name, value in asdict(self).items() if value is not None}
        SamplingParams(**given, **others)
        return {**given, **others}
