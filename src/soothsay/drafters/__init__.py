"""Drafters: guesses of what the target will say. A new one is a file here and a line in the registry."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence

from soothsay.drafters.auto import Auto
from soothsay.drafters.base import Drafter, NoDrafter, Observation, Target
from soothsay.drafters.block import BlockDrafter
from soothsay.drafters.compose import Cascade, Composite, Merged
from soothsay.drafters.draft_model import draft_model
from soothsay.drafters.eagle import Eagle, Eagle2
from soothsay.drafters.eagle3 import Eagle3
from soothsay.drafters.head import drafter_directory
from soothsay.drafters.hydra import Hydra
from soothsay.drafters.layer_skip import LayerSkip
from soothsay.drafters.lookahead import Lookahead
from soothsay.drafters.medusa import Medusa
from soothsay.drafters.mtp import MTP
from soothsay.drafters.ngram import NGram
from soothsay.drafters.prompt_lookup import PromptLookup
from soothsay.drafters.recycling import Recycling
from soothsay.drafters.rest import Rest
from soothsay.drafters.spec import Composed, Named, parse
from soothsay.drafters.suffix import Suffix
from soothsay.errors import DrafterError

__all__ = ["REGISTRY", "Drafter", "DrafterSpec", "Observation", "Target", "build_drafter"]

DrafterSpec = str | Callable[[Target], Drafter] | Drafter
"""A name of the registry, with options if need be: `"prompt-lookup"`, `"draft-model(model=path, depth=4)"`.
Several of them composed: `"suffix > eagle3"` asks the second where the first finds little, with `+` between,
the guesses of both are one tree, with `|` a controller chooses. Or anything that makes a drafter for a
target, like a drafter's class; or a drafter made for it before."""

TRAINED = {
    "mtp": "mtp",
    "eagle3": "eagle3",
    "block": "block",
    "eagle2": "eagle",
    "hydra": "hydra",
    "medusa": "medusa",
    "draft-model": "draft-model",
}
"""Trained drafters and what their directories are called, those first that usually accept most."""


def automatic(target: Target) -> Auto:
    """Suffix matching and the first of `TRAINED` that there is for the target, whichever pays.

    One that is there and cannot be read is left out, with a warning.
    """
    parts = [build_drafter("suffix", target)]
    for name, directory in TRAINED.items():
        try:
            place = drafter_directory(directory, "", target)
        except DrafterError:
            continue
        try:
            parts.append(build_drafter(name, target))
            break
        except DrafterError as error:
            if place.parent.name == "drafters":  # and not the target's own directory
                warnings.warn(f"drafter auto goes without {place}: {error}", stacklevel=2)
    return Auto(target, parts)


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
    "medusa": Medusa,
    "hydra": Hydra,
    "block": BlockDrafter,
    "suffix": Suffix,
    "ngram": NGram,
}

COMPOSITIONS: dict[str, Callable[[Target, Sequence[Drafter]], Composite]] = {
    "|": Auto,
    ">": Cascade,
    "+": Merged,
}


def build_drafter(spec: DrafterSpec, target: Target) -> Drafter:
    """Make the drafter that `spec` describes.

    Raises `DrafterError` for an unknown name or option, or a drafter that does not fit the target.
    """
    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        return spec(target)
    return _build(parse(spec), target)


def _build(spec: Named | Composed, target: Target) -> Drafter:
    if isinstance(spec, Composed):
        parts = [_build(part, target) for part in spec.parts]
        drafter: Drafter = COMPOSITIONS[spec.operator](target, parts)
        drafter.name = f" {spec.operator} ".join(part.name for part in parts)
        return drafter
    name, options = spec.name, spec.options
    if name not in REGISTRY:
        raise DrafterError(f"drafter {name!r} is unknown; choose from {', '.join(REGISTRY)}")
    known = [p for p in inspect.signature(REGISTRY[name]).parameters.values() if p.name != "target"]
    names = [p.name for p in known]
    for option in options:
        if option not in names:
            choices = f"its options are {', '.join(names)}" if names else "it has no options"
            raise DrafterError(f"drafter {name!r} has no option {option!r}; {choices}")
    missing = [p.name for p in known if p.default is p.empty and p.name not in options]
    if missing:
        raise DrafterError(f"drafter {name!r} needs {missing[0]}: write {name}({missing[0]}=...)")
    for p in known:
        value = options.get(p.name, 0)
        if p.annotation in ("int", int, "int | None") and not isinstance(value, int):
            raise DrafterError(f"drafter {name!r}: {p.name}={value!r} is not possible: it must be an integer")
    drafter = REGISTRY[name](target, **options)
    drafter.name = name
    return drafter
