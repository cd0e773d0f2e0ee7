"""A head's view of the target's features, read from the head's checkpoint and written to it.

config.json states the view's numbers at `["soothsay"]["view"]`. Its embedding, last norm and output head are
tensors among the head's own. Their names are those of speculators for copies of a target's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from soothsay.drafters.heads.checkpoints.drafter_files import WEIGHT_DTYPES, DrafterFiles
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.embedding import Embedding
from soothsay.model.kernels import Kernels, StockKernels
from soothsay.model.norm import RMSNorm
from soothsay.model.numeric_mode import NumericMode
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer

EMBEDDING = "verifier_embed_tokens.weight"
NORM = "verifier_norm.weight"
HEAD = "verifier_lm_head.weight"
"""Left out where the embedding is the output head, too."""

ENDS = frozenset({EMBEDDING, NORM, HEAD})

LARGEST = 1e30
"""Limit of a view's numbers: what float32 can hold, and its square too nearly."""

KEYS = ("target_hidden_size", "feature_size", "feature_scale", "norm_eps", "embedding_scale")


@dataclass(frozen=True, eq=False)
class FeatureView:
    """The part of the target's features that a head reads, and the ends that belong to this part.

    The head reads the first H dimensions of each feature, divided by `scale`. The target's embedding, last
    norm and output head do not fit H dimensions, so the view has its own. V is the target's vocabulary.
    """

    target_hidden_size: int
    """Dimensions of the features of the target that the head was made for."""

    scale: float

    embedding: Tensor
    """`[V, H]` in the dtype that it is stored in."""

    embedding_scale: float
    """Rows of the embedding are multiplied by this number."""

    norm: Tensor
    """`[H]` float32: the weight of the last norm."""

    norm_eps: float

    head: Tensor
    """`[V, H]`: the output head. It may be `embedding` itself."""

    @property
    def size(self) -> int:
        """H."""
        return len(self.norm)

    def cut(self, taps: Sequence[Tensor]) -> list[Tensor]:
        """The part of each feature, `[N, H_target] -> [N, H]` float32."""
        if self.scale == 1.0:
            return [tap[:, : self.size].contiguous() for tap in taps]
        return [tap[:, : self.size] / self.scale for tap in taps]

    def ends(self, target: Transformer) -> TargetEnds:
        """The view's ends, which compute in the dtype of `target`."""
        kernels = kernels_for(replace(target.config, hidden_size=self.size), target.kernels)
        mode = NumericMode(target.dtype, target.bits)
        norm = RMSNorm(self.size, self.norm_eps)
        norm.weight = nn.Parameter(self.norm)
        head = kernels.linear(mode.convert("head", self.head), None, torch.float32)
        embedding, c = Embedding(self.embedding, self.embedding_scale), target.config
        ends = TargetEnds(embedding, norm, head, kernels, c.head.scale, c.head.softcap)
        return ends.to(target.device).requires_grad_(False)


def kernels_for(config: ModelSpec, own: Kernels) -> Kernels:
    """`own`, the target's kernels, if they can compute modules of these sizes; else stock operations."""
    return own if own.fit(config) else StockKernels()


def read_view(files: DrafterFiles, target: ModelSpec) -> FeatureView | None:
    """The view that a checkpoint states, or None if it states none: then the head reads whole features.

    Raises `DrafterError` for a view that is damaged or was made for another target.
    """
    raw = (files.config.get("soothsay") or {}).get("view")
    if raw is None:
        return None
    numbers = _numbers(files, raw)
    made_for, size = int(numbers["target_hidden_size"]), int(numbers["feature_size"])
    if made_for != target.hidden_size:
        raise DrafterError(
            f"{files.path} reads features of {made_for} dimensions; the target's have {target.hidden_size}: "
            "take the drafter that was trained for this target"
        )
    if not 1 <= size <= made_for:
        raise _damaged(files, f"reads {size} of {made_for} dimensions")
    for name in (EMBEDDING, NORM):
        if name not in files.names:
            raise _damaged(files, f"has no tensor {name!r}")
    head = HEAD if HEAD in files.names else EMBEDDING
    vocab = files.rows(EMBEDDING)
    if vocab != target.vocab_size:
        raise DrafterError(
            f"{files.path} was made for a vocabulary of {vocab:,} tokens; the target's has "
            f"{target.vocab_size:,}: take the drafter that was trained for this target"
        )
    for name, expected in ((EMBEDDING, (vocab, size)), (head, (vocab, size)), (NORM, (size,))):
        if files.shape(name) != expected or files.dtype(name) not in WEIGHT_DTYPES:
            held = f"{files.dtype(name)} {list(files.shape(name))}"
            raise _damaged(files, f"needs {name} to be {list(expected)} of floating point, and it is {held}")
    embedding = files.read(EMBEDDING)
    return FeatureView(
        made_for,
        numbers["feature_scale"],
        embedding,
        numbers["embedding_scale"],
        files.read(NORM).float(),
        numbers["norm_eps"],
        embedding if head == EMBEDDING else files.read(head),
    )


def view_config(view: FeatureView) -> dict[str, Any]:
    """What config.json says of a view, to be put at `["soothsay"]["view"]`."""
    return {
        "target_hidden_size": view.target_hidden_size,
        "feature_size": view.size,
        "feature_scale": view.scale,
        "norm_eps": view.norm_eps,
        "embedding_scale": view.embedding_scale,
    }


def view_tensors(view: FeatureView) -> dict[str, Tensor]:
    """The tensors of a view's ends, in the dtypes that they have."""
    tensors = {EMBEDDING: view.embedding, NORM: view.norm}
    return tensors if view.head is view.embedding else {**tensors, HEAD: view.head}


def _numbers(files: DrafterFiles, raw: object) -> dict[str, float]:
    """The view's numbers by their keys. Raises `DrafterError` unless all are there and above 0."""
    if not isinstance(raw, Mapping) or set(raw) != set(KEYS):
        raise _damaged(files, f"should have {', '.join(KEYS)}")
    for key, value in raw.items():
        if not isinstance(value, int | float) or not 0 < value < LARGEST:
            raise _damaged(files, f"has {key}={value!r}, which should be a number above 0")
    return dict(raw)


def _damaged(files: DrafterFiles, why: str) -> DrafterError:
    return DrafterError(
        f"{files.path}: its view of the target's features {why}; it is damaged, or of another version"
    )
