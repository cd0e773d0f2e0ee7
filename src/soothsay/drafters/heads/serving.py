"""Loads the trained head that a drafter names, and makes it ready to draft.

Linear layers are converted to the kinds that the target's kernels are fast at. A head usually reads whole
features, and shares the target's embedding, last norm and output head. A head with a `FeatureView` reads a
part of each feature, and brings its own embedding, last norm and output head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.feature_views import FeatureView
from soothsay.drafters.heads.checkpoints.head_directory import open_head
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.drafters.places import drafter_directory
from soothsay.errors import DrafterError
from soothsay.model.blocks import record
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.numeric_mode import BITS, DTYPES, NumericMode

AnyHead = TypeVar("AnyHead", bound=Head)
ServedHead = TypeVar("ServedHead", bound=Head, covariant=True)


def serve(
    head: AnyHead,
    kernels: Kernels,
    dtype: torch.dtype,
    bits: int | None = None,
    output_bits: int | None = None,
) -> AnyHead:
    """Make a head ready to draft: convert its linear layers to the kinds that `kernels` are fast at.

    Args:
        head: is changed in place; it can no longer be trained or written.
        kernels: the target's.
        dtype: what the linear layers compute in.
        bits: round their weights to integers of this size; None: do not round.
        output_bits: the same for its output head, which a draft reads most; None: as for the others.

    Returns:
        `head`.
    """
    inner, output = NumericMode(dtype, bits), NumericMode(dtype, output_bits or bits, coarse=True)
    for name, module in list(head.named_modules()):
        if isinstance(module, Dense):
            is_output = name.split(".")[-1] == "head"
            weight = (output if is_output else inner).convert(name, module.weight.detach())
            bias = None if module.bias is None else module.bias.detach().to(dtype)
            out = torch.float32 if is_output else dtype
            head.set_submodule(name, kernels.linear(weight, bias, out))
    record(head)
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Served(Generic[ServedHead]):
    """A head that is ready to draft for a target."""

    head: ServedHead
    shared: TargetEnds
    """The embedding, last norm and output head that the head works with."""

    view: FeatureView | None = None
    """None: the head reads whole features."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose input the head reads."""
        return self.head.taps

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The part of the target's features to keep: `[N, H_target]` for each tap -> `[N, H]` float32."""
        return self.head.fuse(taps if self.view is None else self.view.cut(taps), self.shared)


def load_head(
    kind: type[AnyHead], model: str | Path | Head, target: Target, dtype: DType = "auto"
) -> Served[AnyHead]:
    """Load a head and make it ready to draft for `target`.

    Args:
        kind: the class of the method's heads.
        model: see `find_head`. A head that is given as an object is changed, see `serve`.
        target: the model to draft for.
        dtype: what the head's linear layers compute in. "auto" is the target's dtype. If the target's weights
            are integers of any size, "auto" is int8: a head is small, and better guesses are worth 8 bits. A
            draft reads its output matrix again for each level, so this has 4 bits: drafts are up to 1% worse,
            and take 6 to 12% less time (docs/log.md).

    Raises:
        DrafterError: the dtype is unknown, or as `find_head` raises.
    """
    known = ("auto", *DTYPES, *BITS)
    if dtype not in known:
        raise DrafterError(f"{kind.method}(dtype={dtype}) is unknown; choose {', '.join(known)}")
    head, view = find_head(kind, model, target)
    verifier = target.model
    bits, output_bits = BITS.get(dtype), None
    if dtype == "auto" and verifier.bits is not None:
        bits, output_bits = 8, 4
    shared = TargetEnds.of(verifier) if view is None else view.ends(verifier)
    with torch.no_grad():
        head.to(verifier.device).borrow(shared)
    return Served(
        serve(head, verifier.kernels, DTYPES.get(dtype, verifier.dtype), bits, output_bits), shared, view
    )


def find_head(
    kind: type[AnyHead], model: str | Path | Head, target: Target
) -> tuple[AnyHead, FeatureView | None]:
    """Read the trained head that `model` names, and its view of the target's features if it has one.

    Args:
        kind: the class of the method's heads.
        model: a checkpoint's directory, or a head; empty: the directory `drafters/METHOD` beside the target's
            weights. For MTP modules the target's own checkpoint is the second choice.
        target: the model to draft for.

    Raises:
        DrafterError: the head is not there, damaged, another method's, or does not fit the target.
    """
    if isinstance(model, Head):
        head, view = model, None
    else:
        with open_head(drafter_directory(kind.method, str(model), target), target) as stored:
            head, view = stored.load(), stored.fit.view
    if not isinstance(head, kind):
        raise DrafterError(
            f"{model} is a head of {head.method}, not of {kind.method}: choose drafter {head.method}"
        )
    return head, view
