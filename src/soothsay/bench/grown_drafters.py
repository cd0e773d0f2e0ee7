"""The drafters of a small model, fitted to a model that was grown from it.

A grown model has the small model's hidden states in the first dimensions of its own, times a factor. So a
trained head of the small model fits the grown one with a `FeatureView` that says so, and with other numbers
for the layers that it reads.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from soothsay import DrafterError, EngineConfig, Target
from soothsay.drafters.heads.block import BlockHead
from soothsay.drafters.heads.checkpoints.fit import FeatureView
from soothsay.drafters.heads.checkpoints.head_directory import open_head, write_head
from soothsay.drafters.heads.eagle import EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Head
from soothsay.drafters.heads.hydra import HydraHead
from soothsay.drafters.heads.medusa import MedusaHead
from soothsay.drafters.heads.mtp import MTPHead
from soothsay.drafters.heads.redrafter import RedrafterHead
from soothsay.drafters.places import drafters_beside, shipped_heads
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import Checkpoint
from soothsay.model.weights.tensor_names import TensorNames

COPIED = ("draft-model", "rest.store")
"""Drafters that depend on the vocabulary alone."""

LEFT_OUT = ("layer-skip",)
"""Drafters that are about the blocks of one model: the grown model has others."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Where the small model's hidden states are in the grown model."""

    hidden_size: int
    """Hidden size of the grown model."""

    scale: float
    """The grown model's hidden states are the small model's times this number."""

    layers: Sequence[int]
    """For each layer of the small model, and for its output, the grown model's layer with the same input."""


@dataclass(frozen=True, slots=True)
class GrownDrafters:
    """What happened to the small model's drafters."""

    written: tuple[str, ...]
    """Names of those that are beside the grown model."""

    refused: tuple[str, ...]
    """For each one that could not be read, why."""


def grow_drafters(checkpoint: Checkpoint, growth: Growth, directory: Path, name: str) -> GrownDrafters:
    """Write the drafters of a small model for the model that is grown from it.

    Args:
        checkpoint: the small model. Its drafters are in `drafters` beside its weights, or else come with the
            package; MTP modules may be in its own checkpoint.
        growth: how it grew.
        directory: where the drafters are written, one directory or file each.
        name: the grown model's, for the configurations of heads.
    """
    config = parse_model_config(checkpoint.config)
    with torch.device("meta"):
        target = Target(Transformer(config), checkpoint.tokenizer(), EngineConfig(), 0, checkpoint.path)
    folders = [folder for folder in (shipped_heads(target), drafters_beside(target)) if folder]
    found = [place for folder in folders if folder.is_dir() for place in sorted(folder.iterdir())]
    places = {place.name: place for place in found}  # those beside the model come last, and stay
    if "mtp" not in places and checkpoint.path.is_dir():
        with suppress(DrafterError), open_head(checkpoint.path, target):
            places["mtp"] = checkpoint.path  # the modules are in the model's own checkpoint
    written, refused = [], []
    for drafter, place in places.items():
        if drafter in LEFT_OUT:
            continue
        try:
            if drafter in COPIED:
                directory.mkdir(exist_ok=True)
                (shutil.copytree if place.is_dir() else shutil.copyfile)(place, directory / drafter)
            else:
                _grow_head(place, target, checkpoint, growth, directory / drafter, name)
            written.append(drafter)
        except DrafterError as error:
            refused.append(str(error))
    return GrownDrafters(tuple(written), tuple(refused))


def _grow_head(
    place: Path, target: Target, checkpoint: Checkpoint, growth: Growth, out: Path, name: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of contexts: the user hears of them when the head drafts
        with open_head(place, target) as stored:
            head, view = stored.load(), stored.fit.view or whole_view(checkpoint)
            grown = replace(view, target_hidden_size=growth.hidden_size, scale=view.scale * growth.scale)
            out.parent.mkdir(exist_ok=True)
            _renumber(head, growth.layers)
            write_head(head, out, name, view=grown)


def whole_view(checkpoint: Checkpoint) -> FeatureView:
    """All of a model's features, with the model's own embedding, last norm and output head."""
    config = parse_model_config(checkpoint.config)
    names = TensorNames(config, checkpoint)
    with checkpoint.open() as read:
        embedding, norm = read(names.require("embedding")[0]), read(names.require("norm")[0]).float()
        return FeatureView(
            target_hidden_size=config.hidden_size,
            scale=1.0,
            embedding=embedding,
            embedding_scale=float(torch.tensor(config.embedding.scale, dtype=embedding.dtype)),
            norm=norm + 1 if config.zero_centred_norms else norm,
            norm_eps=config.norm.eps,
            head=embedding if config.head.tied else read(names.require("head")[0]),
        )


def _renumber(head: Any, layers: Sequence[int]) -> None:
    """Let a head read `layers[i]` of a grown model where it read layer i of the small one."""
    changes: dict[str, Any]
    match head:
        case EagleHead() | MTPHead() | MedusaHead() | HydraHead():
            changes = {"target_layers": layers[head.config.target_layers]}
        case Eagle3Head() | BlockHead() | RedrafterHead():
            changes = {"taps": tuple(layers[tap] for tap in head.config.taps)}
        case _:
            raise DrafterError(f"heads of {head.method} cannot be fitted to a grown model")
    head.config = replace(head.config, **changes)
