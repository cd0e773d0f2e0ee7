"""The parts of DFlash2, DSpark and xPress that correct guesses by their path, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.stored_head import Names
from soothsay.drafters.heads.dflash.path_heads import (
    CandidateSelector,
    CausalRefiner,
    MarkovHead,
    MarkovKind,
    PathHead,
)
from soothsay.errors import DrafterError
from soothsay.model.specs.model_spec import ModelSpec

Options = Mapping[str, Any]

REFINERS: Mapping[str, Names] = {
    "refiner_head.": {
        "tokens": ("token_embed",),
        "gate_up": ("mlp_gate", "mlp_up"),
        "down": ("mlp_down",),
        "next": ("readout",),
        "mix": ("mix_l",),
    },
    "xpress_head.": {
        "tokens": ("w1",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "next": ("w2",),
        "mix": ("mix.L",),
    },
}
"""xPress's names by their prefix: in speculators, and in its authors' checkpoints."""


@dataclass(frozen=True)
class StoredPathHead:
    """A path head in a checkpoint, or none."""

    method: str = ""
    """The method that it belongs to; empty: none."""

    begins_at_root: bool = False
    """Whether the first row of a block guesses."""

    make: Callable[[int], PathHead | None] = lambda size: None
    """Makes a path head for blocks of this size, with any weights."""

    names: Names = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of parameters that are not in the files as we need them."""


def path_head_of(files: DrafterFiles, options: Options, block: ModelSpec, guessed: int) -> StoredPathHead:
    """The path head that a checkpoint's tensors are for.

    Args:
        files: the checkpoint.
        options: its configuration.
        block: that of the decoder blocks.
        guessed: number of tokens that can be guessed.

    Raises:
        DrafterError: it does not fit the vocabulary.
    """
    begins = bool(options.get("sample_from_anchor", False))
    if "markov_head.markov_w1.weight" in files.names:
        return _markov(files, options, block, guessed)
    if "candidate_selector.hidden_projection.weight" in files.names:
        return _selector(files, options, block, begins)
    for prefix, theirs in REFINERS.items():
        if f"{prefix}in_proj.weight" in files.names:
            return _refiner(files, prefix, theirs, block, guessed, begins)
    return StoredPathHead(begins_at_root=begins)


def _markov(files: DrafterFiles, options: Options, block: ModelSpec, guessed: int) -> StoredPathHead:
    prefix = "markov_head."
    kind = "gated" if f"{prefix}gate_proj.weight" in files.names else "vanilla"
    kind = "rnn" if f"{prefix}joint_proj.weight" in files.names else kind
    begins = bool(options.get("sample_from_anchor", not options.get("dspark_bonus_anchor", False)))
    rank = _columns(files, f"{prefix}markov_w1.weight")
    sizes = rank, block.hidden_size, block.vocab_size, guessed
    return StoredPathHead(
        "DSpark",
        begins,
        lambda size: MarkovHead(cast(MarkovKind, kind), *sizes, begins),
        {
            "path_head.tokens": (f"{prefix}markov_w1",),
            "path_head.next": (f"{prefix}markov_w2",),
            "path_head.gate": (f"{prefix}gate_proj",),
            "path_head.joint": (f"{prefix}joint_proj",),
        },
        _cut(files, f"{prefix}markov_w2.weight", guessed),
    )


def _selector(files: DrafterFiles, options: Options, block: ModelSpec, begins: bool) -> StoredPathHead:
    prefix = "candidate_selector."
    if "d2t" in files.names:
        raise DrafterError(f"{files.path} is DFlash2 for a part of the vocabulary, which is not supported")
    tables = [f"{prefix}{name}_codebook" for name in ("predecessor", "successor")]
    tables = [table if table in files.names else f"{table}.weight" for table in tables]
    rank = _columns(files, f"{prefix}hidden_projection.weight", 0)
    count = int(options.get("selector_top_k", 16))
    return StoredPathHead(
        "DFlash2",
        begins,
        lambda size: CandidateSelector(rank, count, block.hidden_size, block.vocab_size),
        {
            "path_head.before.weight": (tables[0],),
            "path_head.after.weight": (tables[1],),
            "path_head.projection": (f"{prefix}hidden_projection",),
        },
    )


def _refiner(
    files: DrafterFiles, prefix: str, theirs: Names, block: ModelSpec, guessed: int, begins: bool
) -> StoredPathHead:
    rank = _columns(files, f"{prefix}in_proj.weight", 0)
    inner = _columns(files, f"{prefix}{theirs['down'][0]}.weight")
    own = {"own": ("down_h",), "mean": ("down_g",), "fuse": ("in_proj",), **theirs}
    names = {f"path_head.{ours}": tuple(prefix + name for name in names) for ours, names in own.items()}
    sizes = block.hidden_size, block.vocab_size, guessed
    return StoredPathHead(
        "xPress",
        begins,
        lambda size: CausalRefiner(rank, inner, size, *sizes, begins),
        names,
        _cut(files, f"{prefix}{theirs['next'][0]}.weight", guessed),
    )


def _cut(files: DrafterFiles, name: str, guessed: int) -> dict[str, Tensor]:
    """Without rows for padding of the vocabulary that the target does not have."""
    if "d2t" in files.names or name not in files.names or files.rows(name) <= guessed:
        return {}
    return {"path_head.next.weight": files.read(name)[:guessed]}


def _columns(files: DrafterFiles, name: str, axis: int = 1) -> int:
    """A size of a matrix. Raises `DrafterError` for other tensors."""
    shape = files.shape(name) if name in files.names else ()
    if len(shape) != 2:
        raise DrafterError(f"{files.path}: {name} is not a matrix; the file is damaged")
    return shape[axis]
