"""Drafters: guesses of what the target will say. A new one is a file here and a line in the registry."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from soothsay.drafters.base import Drafter, NoDrafter, Observation, Target
from soothsay.drafters.block import BlockDrafter
from soothsay.drafters.draft_model import DraftModel
from soothsay.drafters.eagle import Eagle, Eagle2
from soothsay.drafters.eagle3 import Eagle3
from soothsay.drafters.hydra import Hydra
from soothsay.drafters.medusa import Medusa
from soothsay.drafters.mtp import MTP
from soothsay.drafters.prompt_lookup import PromptLookup
from soothsay.errors import DrafterError

__all__ = ["REGISTRY", "Drafter", "DrafterSpec", "Observation", "Target", "build_drafter"]

DrafterSpec = str | Callable[[Target], Drafter] | Drafter
"""A name of the registry, with options if need be: `"prompt-lookup"`, `"draft-model(model=path, depth=4)"`;
or anything that makes a drafter for a target, such as a drafter's class; or a drafter made for it before."""

REGISTRY: dict[str, Callable[..., Drafter]] = {
    "none": NoDrafter,
    "prompt-lookup": PromptLookup,
    "draft-model": DraftModel,
    "eagle": Eagle,
    "eagle2": Eagle2,
    "eagle3": Eagle3,
    "mtp": MTP,
    "medusa": Medusa,
    "hydra": Hydra,
    "block": BlockDrafter,
}


def build_drafter(spec: DrafterSpec, target: Target) -> Drafter:
    """Make the drafter that `spec` describes.

    Raises `DrafterError` for an unknown name or option, or a drafter that does not fit the target.
    """
    if isinstance(spec, Drafter):
        return spec
    if not isinstance(spec, str):
        return spec(target)
    name, options = _parse(spec)
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
        if p.annotation in ("int", int) and not isinstance(value, int):
            raise DrafterError(f"drafter {name!r}: {p.name}={value!r} is not possible: it must be an integer")
    return REGISTRY[name](target, **options)


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    """`name(key=value, ...)`; values are Python literals, or else plain text such as a path."""
    matched = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if matched is None:
        raise DrafterError(f"drafter {spec!r} is not of the form name or name(key=value, ...)")
    name, inside = matched.groups()
    options: dict[str, Any] = {}
    for item in (inside or "").split(","):
        if not item.strip():
            continue
        key, equals, value = item.partition("=")
        if not equals:
            raise DrafterError(f"drafter {spec!r}: {item.strip()!r} is not of the form key=value")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    return name, options
