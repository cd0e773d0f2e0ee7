"""Tokens of a head: those that its own output head is for, and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from soothsay.config import ModelConfig
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import Fit
from soothsay.errors import DrafterError

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


def draft_vocabulary(files: DrafterFiles, block: ModelConfig, fit: Fit) -> tuple[dict[str, Tensor], int]:
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
