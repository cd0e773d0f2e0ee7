"""P-EAGLE, as vLLM and speculators write it: EAGLE-3's tensors, a learned state of masks, and more blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soothsay.drafters.heads.checkpoints.block_configs import check_block
from soothsay.drafters.heads.checkpoints.draft_vocabulary import mask_token
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import Fit
from soothsay.drafters.heads.checkpoints.module_names import block_names
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.eagle3.eagle3_checkpoint import EAGLE3_IGNORED, eagle3_parts
from soothsay.drafters.heads.peagle.peagle_head import PEagleConfig, PEagleHead
from soothsay.errors import DrafterError

DEPTH = 8
"""Guesses in one pass, where the configuration states none: what P-EAGLE's heads are trained for."""


def is_peagle(files: DrafterFiles) -> bool:
    """Whether the tensors are P-EAGLE's."""
    return "mask_hidden" in files.names


def open_peagle(files: DrafterFiles, fit: Fit) -> StoredHead:
    """Open P-EAGLE. Its blocks after the first are numbered on, or from 0 beside a `midlayer`."""
    if "mask_hidden" not in files.names:
        raise DrafterError(f"{files.path} has no mask_hidden, P-EAGLE's state of masks: it is incomplete")
    numbers = {int(n) for name in files.names for n in re.findall(r"^layers\.(\d{1,5})\.", name)}
    if not any(name.startswith("midlayer.") for name in files.names):
        numbers -= {0}
    parts = eagle3_parts(files, fit, 1 + len(numbers), residual=False)
    names = {f"first.{ours}": theirs for ours, theirs in parts.names.items()}
    names |= {"first.d2t": ("d2t",), "first.input_norm": ("input_norm",)}
    names |= {f"first.fc_norm.{i}": (f"fc_norm.{i}",) for i in range(len(parts.config.taps))}
    for place, number in enumerate(sorted(numbers)):
        check_block(files, files.config, f"layers.{number}.")
        names |= block_names(f"more.{place}.", f"layers.{number}.")
    given = {f"first.{ours}": value for ours, value in parts.given.items()}
    width = len(parts.config.taps) * parts.config.target_hidden_size
    if files.read("mask_hidden").numel() != width:
        raise DrafterError(
            f"{files.path}: mask_hidden is {list(files.shape('mask_hidden'))} and should have {width:,} "
            "numbers: it is damaged, or another target's"
        )
    given["mask_hidden"] = files.read("mask_hidden").reshape(-1)
    config = PEagleConfig(
        replace(parts.config, norm_output=False), mask_token(files, files.config), _depth(files.config)
    )
    return StoredHead(
        files,
        fit,
        f"P-EAGLE ({parts.layout})",
        lambda: PEagleHead(config, fit.kernels_for(config.first.block)),
        names,
        given,
        ignored=EAGLE3_IGNORED,
    )


def _depth(config: Mapping[str, Any]) -> int:
    """Guesses in one pass: what speculators' configuration proposes."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens", DEPTH))
