"""Directories of trained heads: read in any known layout, written for soothsay and other engines.

The configuration and the tensors' names tell the layout. A checkpoint that is not understood in full is
refused: it would load, and all its guesses would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from soothsay.drafters.base import Target
from soothsay.drafters.heads.assistant.assistant_checkpoint import is_assistant, open_assistant
from soothsay.drafters.heads.block.block_head import BlockHead
from soothsay.drafters.heads.checkpoints.draft_vocabulary import MASKS
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.feature_views import view_config, view_tensors
from soothsay.drafters.heads.checkpoints.fit import Fit
from soothsay.drafters.heads.checkpoints.own_layout import (
    open_block,
    open_hydra,
    open_redrafter,
    rounded,
    write_own,
)
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.dflash.dflash_checkpoint import is_dflash, open_dflash
from soothsay.drafters.heads.eagle.eagle_head import EagleHead
from soothsay.drafters.heads.eagle3.eagle3_checkpoint import (
    is_eagle,
    is_eagle3,
    open_eagle,
    open_eagle3,
    write_eagle,
    write_eagle3,
    write_speculators_eagle3,
)
from soothsay.drafters.heads.eagle3.eagle3_head import Eagle3Head
from soothsay.drafters.heads.hydra.hydra_head import HydraHead
from soothsay.drafters.heads.medusa.medusa_checkpoint import (
    is_medusa,
    open_medusa,
    write_medusa,
    write_vllm_medusa,
)
from soothsay.drafters.heads.medusa.medusa_head import MedusaHead
from soothsay.drafters.heads.mtp.mtp_checkpoint import is_mtp, open_mtp, write_mtp, write_speculators_mtp
from soothsay.drafters.heads.mtp.mtp_head import MTPHead
from soothsay.drafters.heads.peagle.peagle_checkpoint import is_peagle, open_peagle
from soothsay.drafters.heads.redrafter.redrafter_head import RedrafterHead
from soothsay.drafters.heads.serving import FeatureView
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError, MissingDrafterError, ModelError
from soothsay.files import user_path
from soothsay.model.writing import writing

__all__ = ["StoredHead", "open_head", "read_head", "write_head"]

Opened = Callable[[DrafterFiles, Fit], StoredHead]
Written = tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]

OWN: dict[str, Opened] = {"hydra": open_hydra, "block": open_block, "redrafter": open_redrafter}
"""Readers by `soothsay_method` in config.json."""

SPECULATORS: dict[str, Opened] = {
    "eagle3": open_eagle3,
    "peagle": open_peagle,
    "mtp": open_mtp,
    **dict.fromkeys(("dflash", "dflash2", "dspark", "xpress"), open_dflash),
}
"""Readers by `speculators_model_type` in config.json."""

READERS: tuple[tuple[Callable[[DrafterFiles], bool], Opened], ...] = (
    (is_assistant, open_assistant),
    (is_dflash, open_dflash),
    (is_peagle, open_peagle),
    (is_eagle3, open_eagle3),
    (is_eagle, open_eagle),
    (is_medusa, open_medusa),
    (is_mtp, open_mtp),
)
"""Readers by what the tensors look like; the first that fits is taken."""

FILL_MASKS = (open_dflash, open_peagle)

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
        return _opener(files, own)(files, Fit.of(target, files))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, DrafterError):
            if str(files.path) in str(error):
                raise
            raise DrafterError(f"{files.path}: {error}") from error
        # sizes that fit no tensor, values of odd types: torch and Python have many errors for them
        raise DrafterError(f"{files.path} is damaged, or of an unknown kind ({error})") from error


def _opener(files: DrafterFiles, own: bool) -> Opened:
    """The reader for these files. `own`: they are the target's checkpoint."""
    config = files.config
    for key, known in (("soothsay_method", OWN), ("speculators_model_type", SPECULATORS)):
        if key in config:
            if config[key] not in known:
                raise DrafterError(
                    f"{files.path} holds a drafter of kind {config[key]!r}, which is not supported; "
                    f"soothsay reads {SUPPORTED}"
                )
            return known[config[key]]
    for found, opened in READERS:
        if found(files):
            return _unmasked(files, opened)
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


def _unmasked(files: DrafterFiles, opened: Opened) -> Opened:
    """`opened`. Raises `DrafterError` if it knows no masks, and the configuration states one."""
    masks = [key for key in MASKS if key in files.config]
    if masks and opened not in FILL_MASKS:
        raise DrafterError(
            f"{files.path} holds a drafter that fills masks ({masks[0]}), of a kind that is not supported; "
            f"soothsay reads {SUPPORTED}"
        )
    return opened


def _written(head: Head, target: str, layout: str) -> Written:
    match head, layout:
        case EagleHead(), "":
            return write_eagle(head)
        case Eagle3Head(), "":
            return write_eagle3(head)
        case Eagle3Head(), "int8":
            config, tensors = write_eagle3(head)
            return config, rounded(tensors)
        case Eagle3Head(), "speculators":
            return write_speculators_eagle3(head, target)
        case MedusaHead(), "":
            return write_medusa(head, target)
        case MedusaHead(), "vllm":
            return write_vllm_medusa(head)
        case MTPHead(), "":
            return write_mtp(head)
        case MTPHead(), "speculators":
            return write_speculators_mtp(head, target)
        case ((HydraHead() | BlockHead() | RedrafterHead()), ("" | "int8")):
            return write_own(head, target, integers=layout == "int8")
        case _:
            raise DrafterError(
                f"{head.method} has no layout {layout!r}: eagle3 and mtp may be written as 'speculators', "
                "medusa as 'vllm', eagle3, hydra, block and redrafter as 'int8', and all without a layout"
            )
