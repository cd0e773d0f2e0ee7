"""The registry: parses the specification of a drafter, and builds it. A new drafter is a file and a line in
`REGISTRY`.

Specifications are `"eagle3"`, `"draft-model(model=path, depth=4)"`, `"suffix > eagle3"`, `"suffix + mtp"`,
`"suffix | mtp"`, `"path/to/file.py:Class(size=2)"`.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any

from soothsay.core.request import Observation
from soothsay.drafters.base import Drafter, NoDrafter, Target
from soothsay.drafters.control.compose import Cascade, Composite, Merged
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.heads.assistant import Assistant
from soothsay.drafters.heads.block import BlockDrafter
from soothsay.drafters.heads.checkpoints.head_directory import open_head
from soothsay.drafters.heads.dflash import DFlash
from soothsay.drafters.heads.eagle import Eagle, Eagle2
from soothsay.drafters.heads.eagle3 import Eagle3
from soothsay.drafters.heads.hydra import Hydra
from soothsay.drafters.heads.medusa import Medusa
from soothsay.drafters.heads.mtp import MTP
from soothsay.drafters.heads.peagle import PEagle
from soothsay.drafters.heads.redrafter import Redrafter
from soothsay.drafters.learning.learning_drafter import Learning, can_learn
from soothsay.drafters.lookup.exact_matches import PromptLookup, Rest, open_store
from soothsay.drafters.lookup.ngram import NGram
from soothsay.drafters.lookup.recycling import Recycling
from soothsay.drafters.lookup.suffix_matching import Suffix
from soothsay.drafters.models.draft_model import draft_model
from soothsay.drafters.models.layer_skipping import LayerSkip
from soothsay.drafters.models.lookahead import Lookahead
from soothsay.drafters.places import drafter_directory, suffix_store
from soothsay.errors import DrafterError, did_you_mean, shown, type_of
from soothsay.own_files import named_in_file

OPERATORS = ("|", ">", "+")
"""Operators between drafters, in rising order of precedence: `a > b + c` is `a > (b + c)`."""


@dataclass(frozen=True, slots=True)
class Named:
    """One drafter, with its options."""

    name: str  # in the registry, or FILE.py:CLASS
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Composed:
    """Several specifications, composed by one operator."""

    operator: str  # one of OPERATORS
    parts: tuple[Named | Composed, ...]


def parse(spec: str) -> Named | Composed:
    """Parse a specification. Raises `DrafterError` if it is malformed."""
    for operator in OPERATORS:
        parts = list(_split(spec, operator))
        if len(parts) > 1:
            if not all(part.strip() for part in parts):
                raise DrafterError(f"drafter {spec.strip()!r}: a drafter is missing beside {operator!r}")
            return Composed(operator, tuple(parse(part) for part in parts))
    return _named(spec)


def _named(spec: str) -> Named:
    """Parse `name(key=value, ...)`. A value that is no Python literal is plain text, such as a path."""
    matched = re.fullmatch(r"\s*+((?:[^():]+\.py:)?[\w-]++)\s*+(?:\((.*)\)\s*+)?", spec, re.DOTALL)
    if matched is None:
        raise DrafterError(
            f"drafter {spec!r} is not of the form name or name(key=value, ...), or several of them with |, > "
            "or + between; a class of your own is FILE.py:CLASS"
        )
    name, inside = matched.groups()
    options: dict[str, Any] = {}
    for item in _split(inside or "", ","):
        if not item.strip():
            continue
        key, equals, value = item.partition("=")
        if not equals:
            raise DrafterError(f"drafter {spec!r}: {item.strip()!r} is not of the form key=value")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    return Named(name, options)


def _split(text: str, separator: str) -> Iterator[str]:
    """Split `text` at each separator that is outside brackets and quoted values."""
    begin, depth, quote, last = 0, 0, "", ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and last in ("=", "(", ",", "["):  # elsewhere it is an apostrophe
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == separator and depth == 0:
            yield text[begin:i]
            begin = i + 1
        last = last if character.isspace() else character
    yield text[begin:]


__all__ = ["REGISTRY", "Drafter", "DrafterSpec", "Observation", "Target", "build_drafter"]

DrafterSpec = str | Callable[[Target], Drafter] | Drafter
"""What a user may give as a drafter:

- a name in the registry, with options: `"prompt-lookup"`, `"draft-model(model=path, depth=4)"`;
- a class in a Python file, with options: `"path/to/file.py:Class(size=2)"`;
- a composition: `"a > b"` asks b where a finds little, `"a + b"` merges the drafts of both, `"a | b"` lets a
  controller choose;
- a function or a class that makes a drafter for a target;
- a drafter that was made for the target before."""

TRAINED = (
    *("mtp", "assistant", "dflash", "eagle3", "peagle", "block", "redrafter", "eagle2", "hydra", "medusa"),
    "draft-model",
)
"""Trained drafters. Those with the best acceptance come first."""


def automatic(target: Target) -> Controller:
    """A controller over suffix matching and the first of `TRAINED` that the target has.

    Suffix matching also drafts from the target's `suffix_store`. A drafter or a store that exists and cannot
    be read is left out, with a warning. If there is no trained drafter, and drafters are to learn, n-grams of
    the target's answers take its place.

    A head that does not pay on this machine is asked seldom, and soon its features are not even recorded: see
    section 5 of docs/controller.md.
    """
    parts = [_suffix_with_store(target)]
    for name in TRAINED:
        try:
            place = _directory(name, target)
        except DrafterError:
            continue
        try:
            parts.append(build_drafter(name, target))
            break
        except DrafterError as error:
            if place.parent.name == "drafters":  # the target's own directory may have no such drafter
                warnings.warn(f"drafter auto goes without {place}: {error}", stacklevel=2)
    if target.config.learn and not can_learn(parts[-1]):
        parts.append(Learning(target, build_drafter("none", target)))
        parts[-1].name = "learned"
    return Controller(target, parts)


def _suffix_with_store(target: Target) -> Drafter:
    """Suffix matching that also drafts from the target's `suffix_store`, if there is one."""
    store = suffix_store(target)
    if store is not None:
        try:
            return _build(Named("suffix", {"store": store}), target)
        except DrafterError as error:
            warnings.warn(f"drafter auto goes without {store}: {error}", stacklevel=3)
    return build_drafter("suffix", target)


REGISTRY: dict[str, Callable[..., Drafter]] = {
    "auto": automatic,
    "none": NoDrafter,
    "prompt-lookup": PromptLookup,
    "rest": Rest,
    "recycling": Recycling,
    "lookahead": Lookahead,
    "draft-model": draft_model,
    "layer-skip": LayerSkip,
    "eagle": Eagle,
    "eagle2": Eagle2,
    "eagle3": Eagle3,
    "mtp": MTP,
    "assistant": Assistant,
    "medusa": Medusa,
    "hydra": Hydra,
    "block": BlockDrafter,
    "dflash": DFlash,
    "peagle": PEagle,
    "redrafter": Redrafter,
    "suffix": Suffix,
    "ngram": NGram,
}
"""Drafters by name. What a name stands for takes a `Target`, and the options that a specification gives.

Example:
    >>> REGISTRY["mine"] = REGISTRY["suffix"]
    >>> params = SamplingParams(temperature=0, max_tokens=4)
    >>> llm.generate("one two one two", params, drafter="mine(nodes=3)").stats.emitted
    4
    >>> del REGISTRY["mine"]
"""


def drafters_with_files(target: Target) -> tuple[str, ...]:
    """Names of the registry's drafters that a target has the files for. No drafter is built.

    A head that was made for another target, or is damaged, is named too: that shows when it is built.
    """
    return tuple(name for name in REGISTRY if _has_files(name, target))


def _has_files(name: str, target: Target) -> bool:
    try:
        if name == "rest":
            open_store("", target)
        elif name in (*TRAINED, "eagle"):
            place = _directory(name, target)
            if name == "mtp":  # may be the target's own checkpoint, and that may have no modules
                with open_head(place, target):
                    pass
    except DrafterError:
        return False
    return True


def _directory(name: str, target: Target) -> Path:
    """Where the trained drafter of this name is. Raises `MissingDrafterError`."""
    return drafter_directory("eagle" if name == "eagle2" else name, "", target)


COMPOSITIONS: dict[str, Callable[[Target, Sequence[Drafter]], Composite]] = {
    "|": Controller,
    ">": Cascade,
    "+": Merged,
}


def build_drafter(spec: DrafterSpec, target: Target) -> Drafter:
    """Build the drafter that `spec` describes.

    Raises `DrafterError` if a name or an option is unknown, or the drafter does not fit the target.
    """
    drafter = _made(spec, target)
    _check_members(drafter, target)
    return drafter


def _check_members(drafter: Drafter, target: Target) -> None:
    """Raise `DrafterError` for a `max_nodes` or `taps` that the engine could not use."""
    if not isinstance(drafter.max_nodes, Integral) or drafter.max_nodes < 1:
        wrong = f"max_nodes={drafter.max_nodes!r} must be an integer, at least 1 for the root"
        raise DrafterError(f"drafter {drafter.name!r}: {wrong}")
    taps = drafter.taps
    if isinstance(taps, Sequence) and not taps:
        return
    layers = target.model.spec.num_layers
    if not isinstance(taps, Sequence) or any(tap not in range(layers + 1) for tap in taps):
        raise DrafterError(
            f"drafter {drafter.name!r}: taps={taps!r} must be a tuple of layers of the target, 0 to "
            f"{layers - 1}, or {layers} for the last layer's output"
        )


def _made(spec: DrafterSpec, target: Target) -> Drafter:
    if isinstance(spec, Drafter):
        return spec
    if isinstance(spec, str):
        return _build(parse(spec), target)
    if not callable(spec):
        raise DrafterError(
            f"drafter={shown(spec, 60)} is not possible: give a name, such as 'suffix', several in one text, "
            "such as 'a > b', a class of drafters, or a drafter"
        )
    _check_class(getattr(spec, "__qualname__", ""), spec)
    made = spec(target)
    if not isinstance(made, Drafter):
        raise DrafterError(f"drafter={shown(spec, 60)} gave {type_of(made)}, which is no Drafter")
    return made


def _check_class(name: str, made: object) -> None:
    """Raise `DrafterError` for a class that is no `Drafter`, or has not all of its methods."""
    if not inspect.isclass(made):
        return
    if not issubclass(made, Drafter):
        raise DrafterError(f"{name} is not a Drafter: inherit from soothsay.Drafter")
    for missing in getattr(made, "__abstractmethods__", ()):
        given = ", ".join([*inspect.signature(getattr(made, missing)).parameters][1:])
        raise DrafterError(f"{name} has no {missing}({given}), which a drafter must have")


def named_drafter(name: str) -> Callable[..., Drafter]:
    """What makes the drafter of this name: in the registry, or `FILE.py:CLASS`.

    Raises `DrafterError` if the name is unknown, or the file cannot be used.
    """
    if ":" in name:
        return drafter_in_file(name)
    if name not in REGISTRY:
        choices = ", ".join(REGISTRY) + did_you_mean(name, REGISTRY)
        raise DrafterError(f"drafter {name!r} is unknown; choose from {choices}")
    return REGISTRY[name]


def _build(spec: Named | Composed, target: Target) -> Drafter:
    if isinstance(spec, Composed):
        parts = [_build(part, target) for part in spec.parts]
        drafter: Drafter = COMPOSITIONS[spec.operator](target, parts)
        drafter.name = f" {spec.operator} ".join(part.name for part in parts)
        return drafter
    name, options = spec.name, spec.options
    make = named_drafter(name)
    known = [p for p in inspect.signature(make).parameters.values() if p.name != "target"]
    names = [p.name for p in known]
    for option in options:
        if option not in names:
            choices = f"its options are {', '.join(names)}" if names else "it has no options"
            raise DrafterError(f"drafter {name!r} has no option {option!r}; {choices}")
    missing = [p.name for p in known if p.default is p.empty and p.name not in options]
    if missing:
        raise DrafterError(f"drafter {name!r} needs {missing[0]}: write {name}({missing[0]}=...)")
    fitting = {p.name: _fitting(name, p, options[p.name]) for p in known if p.name in options}
    drafter = make(target, **fitting)
    if not isinstance(drafter, Drafter):
        raise DrafterError(f"drafter {name!r} gave {type_of(drafter)}, which is no Drafter")
    own_name = name.rpartition(":")[2]
    drafter.name = own_name
    if target.config.learn and drafter.trained:
        drafter = Learning(target, drafter)
        drafter.name = own_name
    return drafter


def _fitting(name: str, option: inspect.Parameter, value: object) -> object:
    """The value of a drafter's option, whose annotation says what it may be. Raises `DrafterError`."""
    kind = option.annotation
    kinds = {
        one.strip() for one in (kind if isinstance(kind, str) else inspect.formatannotation(kind)).split("|")
    }
    is_text, wanted = "str" in kinds and "int" not in kinds, ""
    if is_text and type(value) is int:
        return str(value)  # a name may read like a number
    if is_text and not isinstance(value, (str, PathLike)):
        wanted = "a text"
    elif kinds <= {"int", "None"} and not isinstance(value, int):
        wanted = "an integer"
    if wanted:
        raise DrafterError(f"drafter {name!r}: {option.name}={value!r} is not possible: it must be {wanted}")
    return value


def drafter_in_file(name: str) -> Callable[..., Drafter]:
    """The class or function that `name`, `FILE.py:CLASS`, names. The file is run when it is first named.

    Raises `DrafterError` if there is no such file or class, the class is no drafter, or the file fails.
    """
    module, made = named_in_file(name, "drafter", DrafterError)
    if not callable(made):
        file, _, wanted = name.rpartition(":")
        there = ", ".join(
            one.__name__
            for one in vars(module).values()
            if inspect.isclass(one) and issubclass(one, Drafter) and one.__module__ == module.__name__
        )
        raise DrafterError(f"{file} has no class {wanted!r}; its drafters are: {there or 'none'}")
    _check_class(name, made)
    return made  # type: ignore[no-any-return]
