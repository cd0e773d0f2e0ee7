"""Directories of trained heads: read in any known layout, written for soothsay and other engines.

The configuration and the tensors' names tell the layout. A checkpoint that is not understood in full is
refused: it would load, and all its guesses would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from soothsay.drafters.base import Target
from soothsay.drafters.heads.assistant import assistant_head
from soothsay.drafters.heads.block import block_head
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.feature_views import FeatureView, view_config, view_tensors
from soothsay.drafters.heads.checkpoints.fit import MASKS, TargetFit
from soothsay.drafters.heads.checkpoints.own_layout import rounded
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, StoredHead, Written
from soothsay.drafters.heads.dflash import dflash_checkpoint
from soothsay.drafters.heads.eagle import eagle_head
from soothsay.drafters.heads.eagle3 import eagle3_checkpoint
from soothsay.drafters.heads.hydra import hydra_head
from soothsay.drafters.heads.medusa import medusa_head
from soothsay.drafters.heads.mtp import mtp_head
from soothsay.drafters.heads.peagle import peagle_head
from soothsay.drafters.heads.redrafter import redrafter_head
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError, MissingDrafterError, ModelError
from soothsay.files import user_path
from soothsay.model.writing import writing

__all__ = ["StoredHead", "open_head", "read_head", "write_head"]

FORMATS = (
    assistant_head.FORMAT,
    dflash_checkpoint.FORMAT,
    peagle_head.FORMAT,
    eagle3_checkpoint.FORMAT,
    eagle_head.FORMAT,
    medusa_head.FORMAT,
    mtp_head.FORMAT,
    hydra_head.FORMAT,
    block_head.FORMAT,
    redrafter_head.FORMAT,
)
"""All formats. The first whose tensors a checkpoint's look like is taken."""

OWN = {one.method: one for one in FORMATS if one.own}
"""Formats by `soothsay_method` in config.json."""

SPECULATORS = {name: one for one in FORMATS for name in one.speculators}
"""Formats by `speculators_model_type` in config.json."""

SUPPORTED = (
    "EAGLE-1, EAGLE-3 and P-EAGLE, Medusa, MTP, Gemma 4's assistants, DFlash and its kin, and what "
    "'soothsay train' writes"
)


def read_head(path: str | Path, target: Target) -> Head:
    """Read a head and its weights in float32, to train it or to `serve` it.

    Args:
        path: a directory with a config.json and weights.
        target: the model to draft for.

    Raises:
        DrafterError: the head is not there, damaged, of an unsupported kind, or made for another model.
    """
    with open_head(path, target) as stored:
        return stored.load()


@contextmanager
def open_head(path: str | Path, target: Target) -> Iterator[StoredHead]:
    """Check which head a directory holds and whether it fits, without reading its weights.

    Raises `DrafterError` as `read_head` does.
    """
    path = user_path(path)
    try:
        with DrafterFiles(path) as files:
            own = target.path is not None and path.resolve() == target.path.resolve()
            yield _open(files, target, own)
    except ModelError as error:
        raise DrafterError(f"{path}: {error}") from error


def write_head(
    head: Head,
    directory: str | Path,
    target_name: str,
    layout: str = "",
    view: FeatureView | None = None,
) -> None:
    """Write a head in bfloat16, with a configuration that other engines read.

    Args:
        head: a head that was not made ready to serve.
        directory: a directory that is not there yet, or empty. It appears when it is complete.
        target_name: the model that the head was trained for, for the configuration.
        layout: "" is the layout that most engines read. eagle3 and mtp may be "speculators", medusa with its
            own output heads may be "vllm". eagle3, hydra, block and redrafter may be "int8", which other
            engines do not read: half the size, and weights are off by 0.6% (norm).
        view: the part of the target's features that the head reads; None: whole features. Other engines do
            not read heads that have a view.

    Raises:
        DrafterError: the method does not have this layout, or the layout cannot express the head.
        ModelError: the directory is in use.
    """
    config, own = _written(head, target_name, layout)
    tensors = dict(own)
    if view is not None:
        config["soothsay"] = {**config.get("soothsay", {}), "view": view_config(view)}
        tensors |= view_tensors(view)
    file = "medusa_lm_head.safetensors" if head.method == "medusa" and not layout else "model.safetensors"
    with writing(Path(directory)) as writer:
        save_file(tensors, writer.directory / file, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (writer.directory / "config.json").write_text(text, encoding="utf-8")


def _open(files: DrafterFiles, target: Target, own: bool) -> StoredHead:
    """Check the head in these files. `own`: they are the target's checkpoint."""
    try:
        return _format(files, own).open(files, TargetFit.of(target, files))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, DrafterError):
            if str(files.path) in str(error):
                raise
            raise DrafterError(f"{files.path}: {error}") from error
        # sizes that fit no tensor, values of odd types: torch and Python have many errors for them
        raise DrafterError(f"{files.path} is damaged, or of an unknown kind ({error})") from error


def _format(files: DrafterFiles, own: bool) -> HeadFormat:
    """The format of these files. `own`: they are the target's checkpoint."""
    config = files.config
    for key, known in (("soothsay_method", OWN), ("speculators_model_type", SPECULATORS)):
        if key in config:
            if config[key] not in known:
                raise DrafterError(
                    f"{files.path} holds a drafter of kind {config[key]!r}, which is not supported; "
                    f"soothsay reads {SUPPORTED}"
                )
            return known[config[key]]
    for one in FORMATS:
        if one.looks_like(files):
            _check_masks(files, one)
            return one
    if own:
        raise MissingDrafterError(
            f"{files.path} has no MTP modules in its checkpoint, and no drafters/mtp beside it: train some, "
            "or name some, mtp(model=...)"
        )
    if any(name.endswith("layers.0.input_layernorm.weight") for name in files.names):
        raise DrafterError(
            f"{files.path} holds a whole model and no drafter of features: give it as "
            f"draft-model(model={files.path})"
        )
    raise DrafterError(f"{files.path} holds no drafter that soothsay knows; it reads {SUPPORTED}")


def _check_masks(files: DrafterFiles, own: HeadFormat) -> None:
    """Raise `DrafterError` if a format knows no masks, and the configuration states one."""
    masks = [key for key in MASKS if key in files.config]
    if masks and not own.fills_masks:
        raise DrafterError(
            f"{files.path} holds a drafter that fills masks ({masks[0]}), of a kind that is not supported; "
            f"soothsay reads {SUPPORTED}"
        )


def _written(head: Head, target: str, layout: str) -> Written:
    (own,) = (one for one in FORMATS if one.method == head.method)
    in_integers = layout == "int8" and own.integers
    write = own.layouts.get("" if in_integers else layout)
    if write is None:
        raise DrafterError(
            f"{head.method} has no layout {layout!r}: eagle3 and mtp may be written as 'speculators', medusa "
            "as 'vllm', eagle3, hydra, block and redrafter as 'int8', and all without a layout"
        )
    config, tensors = write(head, target)
    return config, rounded(tensors) if in_integers else tensors
