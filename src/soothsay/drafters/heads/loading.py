"""Load the trained head that a drafter names, from a checkpoint of any known layout."""

from __future__ import annotations

from pathlib import Path

import torch

from soothsay.config import DType
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.head_directory import open_head
from soothsay.drafters.heads.serving import AnyHead, FeatureView, Served, serve
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.drafters.places import drafter_directory
from soothsay.errors import DrafterError
from soothsay.model.numeric_mode import BITS, DTYPES


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
