"""Where the drafters of a target are kept on disk: in `drafters/NAME` beside its weights."""

from importlib import resources
from pathlib import Path

from soothsay.drafters.base import Target
from soothsay.errors import MissingDrafterError
from soothsay.files import user_path

SUFFIX_STORE = "suffix.store"
"""File name of the texts from which `auto` drafts besides those of the requests."""

SHIPPED = {"34693f9b4d4f3de390259f3beb839ccb": "smollm2", "09385509cd28a4dda001dcd6026e3158": "qwen2.5"}
"""Folders of the package with what was learnt from a model, by its vocabulary (`Target.vocabulary`)."""

HEADS_FOR = {"smollm2": (30, 576), "qwen2.5": (28, 1536)}
"""Layers and hidden size of the model that the heads in a folder of the package are for."""


def drafters_beside(target: Target) -> Path | None:
    """The directory for a target's drafters, which may not be there. None if the target has no path.

    A target that is one file, as GGUF models are, has its drafters in the folder of this file.
    """
    if target.path is None:
        return None
    return (target.path.parent if target.path.is_file() else target.path) / "drafters"


def _shipped_folder(target: Target) -> Path | None:
    """The folder of the package with what was learnt from a model with the target's vocabulary."""
    folder = SHIPPED.get(target.vocabulary)
    return None if folder is None else Path(str(resources.files("soothsay"))) / "bundled" / folder


def shipped_heads(target: Target) -> Path | None:
    """The folder of the package with the heads that fit a target; None if there are none."""
    folder, config = _shipped_folder(target), target.model.spec
    if folder is None or HEADS_FOR.get(folder.name) != (config.num_layers, config.hidden_size):
        return None
    return folder / "drafters"


def drafter_directory(method: str, model: str, target: Target) -> Path:
    """The directory of one drafter, or the GGUF file of its target.

    Args:
        method: its name in `drafters`.
        model: a path that a user named; empty: `drafters/METHOD` beside the target's weights. The second
            choice is a head that comes with the package, and for mtp the target's own directory or GGUF file,
            since it may hold MTP modules.
        target: the model to draft for.

    Raises:
        MissingDrafterError: no path is named and there is no drafter beside the target.
    """
    if model:
        return user_path(model)
    drafters = drafters_beside(target)
    for folder in (drafters, shipped_heads(target)):
        if folder is not None and (folder / method).is_dir():
            return folder / method
    if drafters is None:
        raise MissingDrafterError(
            f"no model is named for {method}, and the target has no directory to look in: write "
            f"{method}(model=...)"
        )
    if method == "mtp" and target.path is not None and target.path.is_file():
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
    folder = _shipped_folder(target)
    return None if folder is None else folder / SUFFIX_STORE
