"""Checks that a head was made for the target that it is loaded for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.feature_views import FeatureView, kernels_for, read_view
from soothsay.errors import DrafterError
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels
from soothsay.model.specs.model_spec import ModelSpec

PADDING = 1024
"""Two vocabularies are the same, with other padding, if their sizes differ by fewer rows than this. (Qwen has
151,936 and 152,064.)"""


@dataclass(frozen=True)
class TargetFit:
    """The target that a head is checked against, as the head sees it."""

    config: ModelSpec
    """The target's."""

    embedding: Embedding
    """The target's, whatever the view."""

    context: int
    """The longest request, in tokens."""

    kernels: Kernels

    name: str
    """The directory that is read, for messages."""

    view: FeatureView | None
    """The part of the target's features that the head reads; None: whole features."""

    @classmethod
    def of(cls, target: Target, files: DrafterFiles) -> TargetFit:
        """Read the head's view, if it has one. Raises `DrafterError` if the view does not fit the target."""
        model = target.model
        context = target.config.max_context or model.config.max_positions
        view = read_view(files, model.config)
        return cls(model.config, model.embedding, context, model.kernels, str(files.path), view)

    @property
    def hidden_size(self) -> int:
        """Dimensions of the features that the head reads."""
        return self.config.hidden_size if self.view is None else self.view.size

    def kernels_for(self, block: ModelSpec) -> Kernels:
        """The target's kernels if they can compute this block, else stock operations."""
        return kernels_for(block, self.kernels)

    def has_embedding(self, table: Tensor) -> bool:
        """Whether `table` is a copy of the embedding that the head shares, so that it can be left out."""
        if self.view is not None:
            own, scale = self.view.embedding, self.view.embedding_scale
        else:
            own, scale = self.embedding.weight, self.embedding.scale
        same = scale == 1.0 and own.shape == table.shape and not own.is_meta
        return same and torch.equal(own.cpu(), table.to(own.dtype))

    def check(self, *, hidden: int, vocab: int) -> None:
        """Raises `DrafterError` unless the hidden size is that of the features, and the vocabulary is the
        target's. Padding of the vocabulary may differ.
        """
        if hidden != self.hidden_size:
            own = "the target's is" if self.view is None else "its view of the target's has"
            self.refuse(f"was made for a model of hidden size {hidden}; {own} {self.hidden_size}")
        if abs(vocab - self.config.vocab_size) >= PADDING:
            self.refuse(
                f"was made for a vocabulary of {vocab:,} tokens; the target's has {self.config.vocab_size:,}"
            )

    def check_layers(self, layers: int) -> None:
        """Raises `DrafterError` for a target with another number of layers."""
        if layers != self.config.num_layers:
            self.refuse(f"was made for a model of {layers} layers; the target has {self.config.num_layers}")

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises `DrafterError` for layers that the target does not have."""
        if not taps or min(taps) < 0 or max(taps) > self.config.num_layers:
            self.refuse(f"reads layers {list(taps)}; the target has {self.config.num_layers}")

    def check_context(self, positions: int) -> None:
        """Warns if requests may be longer than the contexts that the head was made for."""
        if positions < self.context:
            warnings.warn(
                f"{self.name} was made for contexts of {positions:,} tokens, requests may have "
                f"{self.context:,}: beyond the former its guesses may be poor (never the answers)",
                stacklevel=2,
            )

    def refuse(self, why: str) -> None:
        """Raises `DrafterError`: the head is another model's."""
        raise DrafterError(f"{self.name} {why}: take the drafter that was trained for this target")


MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys that state which token is the mask."""


def mask_token(files: DrafterFiles, options: Mapping[str, Any]) -> int:
    """The token of the rows whose tokens are guessed. Raises `DrafterError` if `options` state none."""
    for key in MASKS:
        if key in options:
            return int(options[key])
    raise DrafterError(
        f"{files.path / 'config.json'} does not say which token is the mask ({', '.join(MASKS)})"
    )


def draft_vocabulary(files: DrafterFiles, block: ModelSpec, fit: TargetFit) -> tuple[dict[str, Tensor], int]:
    """Read which of the target's tokens the output head in the files is for.

    Returns:
        Values of the parameters `d2t` and `head.weight` that are not in the files as we need them, and the
        number of tokens.

    Raises:
        DrafterError: there is no output head, or it does not fit.
    """
    if "lm_head.weight" not in files.names:
        raise DrafterError(f"{files.path} has no lm_head.weight, its output head: it is incomplete")
    draft, target = files.rows("lm_head.weight"), fit.config.vocab_size
    if "d2t" in files.names:
        offsets = files.read("d2t")
        if offsets.dim() != 1 or not len(offsets) or offsets.dtype not in (torch.int64, torch.int32):
            raise DrafterError(
                f"{files.path}: d2t is {offsets.dtype} {list(offsets.shape)} and should be a list of "
                "integers; it is damaged"
            )
        ids = offsets + torch.arange(len(offsets))
        if len(ids) != draft or int(ids.min()) < 0 or int(ids.max()) >= target:
            raise DrafterError(
                f"{files.path}: d2t maps {len(ids):,} tokens to ids up to {int(ids.max()):,}; the output "
                f"head has {draft:,} rows and the target {target:,} tokens: take the drafter of this target"
            )
        return {}, draft
    if draft != block.vocab_size:
        raise DrafterError(
            f"{files.path} has an output head of {draft:,} tokens of {block.vocab_size:,}, and no d2t that "
            "says which: the download is incomplete"
        )
    kept = min(draft, target)  # rows beyond are padding
    given = {"d2t": torch.zeros(kept, dtype=torch.int64)}
    if kept < draft:
        given["head.weight"] = files.read("lm_head.weight")[:kept]
    return given, kept
