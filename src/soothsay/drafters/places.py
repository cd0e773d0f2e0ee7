"""Where the drafters of a target are kept on disk: in `drafters/NAME` beside its weights."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from soothsay.drafters.base import Target
from soothsay.errors import MissingDrafterError
from soothsay.files import user_path

SUFFIX_STORE = "suffix.store"
"""File name of the texts from which `auto` drafts besides those of the requests."""

SHIPPED_TEXTS = {
    "34693f9b4d4f3de390259f3beb839ccb": "smollm2",
    "09385509cd28a4dda001dcd6026e3158": "qwen2.5",
}
"""Folders of the package with answers of a model, by the vocabulary of the model (`Target.vocabulary`)."""


def drafters_beside(target: Target) -> Path | None:
    """The directory for a target's drafters, which may not be there. None if the target has no path.

    A target that is one file, as GGUF models are, has its drafters in the folder of this file.
    """
    if target.path is None:
        return None
    return (target.path.parent if target.path.is_file() else target.path) / "drafters"


def drafter_directory(method: str, model: str, target: Target) -> Path:
    """The directory of one drafter, or the GGUF file of its target.

    Args:
        method: its name in `drafters`.
        model: a path that a user named; empty: `drafters/METHOD` beside the target's weights. For mtp the
            target's own directory or GGUF file is the second choice, since it may hold MTP modules.
        target: the model to draft for.

    Raises:
        MissingDrafterError: no path is named and there is no drafter beside the target.
    """
    if model:
        return user_path(model)
    drafters = drafters_beside(target)
    if drafters is None:
        raise MissingDrafterError(
            f"no model is named for {method}, and the target has no directory to look in: write "
            f"{method}(model=...)"
        )
    if (drafters / method).is_dir():
        return drafters / method
    if method == "mtp" and target.path is not None and target.path.suffix == ".gguf":
        return target.path
    if method == "mtp" and (drafters.parent / "config.json").is_file():
        return drafters.parent
    raise MissingDrafterError(
        f"there is no drafter at {drafters / method}: train one, or name one, {method}(model=...)"
    )


def suffix_store(target: Target) -> Path | None:
    """The texts from which suffix matching may draft for a target.

    They are `drafters/suffix.store` beside its weights, or else come with the package, for the models whose
    vocabulary the target has. None if there are none.
    """
    beside = drafters_beside(target)
    if beside is not None and (beside / SUFFIX_STORE).is_file():
        return beside / SUFFIX_STORE
    folder = SHIPPED_TEXTS.get(target.vocabulary)
    if folder is None:
        return None
    return Path(str(resources.files("soothsay"))) / "bundled" / folder / SUFFIX_STORE
