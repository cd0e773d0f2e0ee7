"""Trained drafters as directories: those that others publish and ours, read; and ours, written for others.

What a directory holds is told by its configuration and its tensors' names. What is not understood in full is
refused: a head that is half understood would load, and guess nothing right.
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
from soothsay.drafters.block import BlockHead
from soothsay.drafters.checkpoints.eagle import (
    is_eagle,
    is_eagle3,
    open_eagle,
    open_eagle3,
    write_eagle,
    write_eagle3,
    write_speculators_eagle3,
)
from soothsay.drafters.checkpoints.files import DrafterFiles
from soothsay.drafters.checkpoints.fit import Fit
from soothsay.drafters.checkpoints.medusa import is_medusa, open_medusa, write_medusa, write_vllm_medusa
from soothsay.drafters.checkpoints.mtp import is_mtp, open_mtp, write_mtp, write_speculators_mtp
from soothsay.drafters.checkpoints.own import open_block, open_hydra, write_own
from soothsay.drafters.checkpoints.stored import StoredHead
from soothsay.drafters.eagle import EagleHead
from soothsay.drafters.eagle3 import Eagle3Head
from soothsay.drafters.head import Head
from soothsay.drafters.hydra import HydraHead
from soothsay.drafters.medusa import MedusaHead
from soothsay.drafters.mtp import MTPHead
from soothsay.errors import DrafterError, ModelError
from soothsay.model.writing import writing

__all__ = ["StoredHead", "open_head", "read_head", "write_head"]

Opened = Callable[[DrafterFiles, Fit], StoredHead]
Written = tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]

OWN: dict[str, Opened] = {"hydra": open_hydra, "block": open_block}
"""By `soothsay_method`."""

SPECULATORS: dict[str, Opened] = {"eagle3": open_eagle3, "mtp": open_mtp}
"""By `speculators_model_type`."""

SUPPORTED = "EAGLE-1 and EAGLE-3, Medusa, MTP modules, and what 'soothsay train' writes"


def read_head(path: str | Path, target: Target) -> Head:
    """Read a drafter's weights, float32, to train or to `serve`.

    Args:
        path: a directory with a config.json and weights.
        target: the model it is to draft for.

    Raises:
        DrafterError: there is none, it is damaged, of no supported kind, or it was made for another model.
    """
    with open_head(path, target) as stored:
        return stored.load()


@contextmanager
def open_head(path: str | Path, target: Target) -> Iterator[StoredHead]:
    """Find out what a directory holds and whether it fits, without reading its weights.

    Raises `DrafterError` as `read_head` does.
    """
    path = Path(path).expanduser()
    try:
        with DrafterFiles(path) as files:
            own = target.path is not None and path.resolve() == target.path.resolve()
            yield _opener(files, own)(files, Fit.of(target, str(path)))
    except ModelError as error:
        raise DrafterError(f"{path}: {error}") from error


def write_head(head: Head, directory: str | Path, target_name: str, layout: str = "") -> None:
    """Write a head in bfloat16, with a configuration that other engines read.

    Args:
        head: as it trains; one that was made ready to serve cannot be written.
        directory: a directory that is not there yet, or empty; it appears when it is complete.
        target_name: the model it was trained for, to be noted beside it.
        layout: "" is the one in which most engines know the method. eagle3 and mtp may be "speculators",
            medusa with output heads of its own "vllm".

    Raises:
        DrafterError: the method has no such layout, or the layout has no place for what the head computes.
        ModelError: the directory is in use.
    """
    config, tensors = _written(head, target_name, layout)
    file = "medusa_lm_head.safetensors" if head.method == "medusa" and not layout else "model.safetensors"
    with writing(Path(directory)) as writer:
        save_file(dict(tensors), writer.directory / file, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (writer.directory / "config.json").write_text(text, encoding="utf-8")


def _opener(files: DrafterFiles, own: bool) -> Opened:
    """What understands these files. `own`: they are the target's."""
    config = files.config
    for key, known in (("soothsay_method", OWN), ("speculators_model_type", SPECULATORS)):
        if key in config:
            if config[key] not in known:
                raise DrafterError(
                    f"{files.path} holds a drafter of kind {config[key]!r}, which is not supported; "
                    f"soothsay reads {SUPPORTED}"
                )
            return known[config[key]]
    if any(key in config for key in ("dflash_config", "mask_token_id")):
        raise DrafterError(
            f"{files.path} holds a drafter that fills masks (DFlash and its kin), which is not supported; "
            f"soothsay reads {SUPPORTED}"
        )
    for found, opened in ((is_eagle3, open_eagle3), (is_eagle, open_eagle), (is_medusa, open_medusa)):
        if found(files):
            return opened
    if is_mtp(files):
        return open_mtp
    if own:
        raise DrafterError(
            f"{files.path} has no MTP modules in its checkpoint, and no drafters/mtp beside it: train some, "
            "or name some, mtp(model=...)"
        )
    if any(name.endswith("layers.0.input_layernorm.weight") for name in files.names):
        raise DrafterError(
            f"{files.path} holds a whole model and no drafter of features: give it as "
            f"draft-model(model={files.path})"
        )
    raise DrafterError(f"{files.path} holds no drafter that soothsay knows; it reads {SUPPORTED}")


def _written(head: Head, target: str, layout: str) -> Written:
    match head, layout:
        case EagleHead(), "":
            return write_eagle(head)
        case Eagle3Head(), "":
            return write_eagle3(head)
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
        case ((HydraHead() | BlockHead()), ""):
            return write_own(head, target)
        case _:
            raise DrafterError(
                f"{head.method} has no layout {layout!r}: eagle3 and mtp may be written as 'speculators', "
                "medusa as 'vllm', and all of them with the layout left out"
            )
