"""Directories of trained heads: read in any known layout, written for soothsay and other engines.

The configuration and the tensors' names tell the layout. A checkpoint that is not understood in full is
refused: it would load, and all its guesses would be wrong. Heads that no other engine reads have our own
layout: our own names, and config.json says the method.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.block_configs import hf_config
from soothsay.drafters.heads.checkpoints.drafter_files import GROUP, DrafterFiles, scales_of
from soothsay.drafters.heads.checkpoints.fit import (
    MASKS,
    TARGET_HEAD,
    FeatureView,
    TargetFit,
    view_config,
    view_tensors,
)
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, Opener, StoredHead, Written, split
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError, MissingDrafterError, ModelError
from soothsay.files import user_path
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.numeric_mode import BITS
from soothsay.model.weights.writing import write_settings, writing

METHODS = ("assistant", "dflash", "peagle", "eagle3", "eagle", "medusa", "mtp", "hydra", "block", "redrafter")
"""Modules of `soothsay.drafters.heads` with a `FORMAT`. The first whose tensors a checkpoint's look like is
taken."""

SUPPORTED = (
    "EAGLE-1, EAGLE-3 and P-EAGLE, Medusa, MTP, Gemma 4's assistants, DFlash and its kin, and what "
    "'soothsay train' writes"
)


@cache
def formats() -> dict[str, HeadFormat]:
    """The formats by method. They are imported late: their modules need this one to open directories."""
    return {method: import_module(f"soothsay.drafters.heads.{method}").FORMAT for method in METHODS}


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
    head: Head, directory: str | Path, target_name: str, layout: str = "", view: FeatureView | None = None
) -> None:
    """Write a head in bfloat16, with a configuration that other engines read.

    Args:
        head: a head that was not made ready to serve.
        directory: a directory that is not there yet, or empty. It appears when it is complete.
        target_name: the model that the head was trained for, for the configuration.
        layout: "" is the layout that most engines read. eagle3 and mtp may be "speculators", medusa with its
            own output heads may be "vllm". eagle3, hydra, block and redrafter may be "int8" or "int4", which
            other engines do not read. They take half the size and 28% of it, weights are off by 0.6% and 10%
            (norm), and rows of the target's output matrix are left out.
        view: the part of the target's features that the head reads; None: whole features. Other engines do
            not read heads that have a view.

    Raises:
        DrafterError: the method does not have this layout, or the layout cannot express the head.
        ModelError: the directory is in use.
    """
    own = formats()[head.method]
    bits = BITS.get(layout) if own.integers else None
    write = own.layouts.get(layout if bits is None else "")
    if write is None:
        raise DrafterError(
            f"{head.method} has no layout {layout!r}: eagle3 and mtp may be written as 'speculators', medusa "
            "as 'vllm', eagle3, hydra, block and redrafter as 'int8' or 'int4', and all without a layout"
        )
    config, parts = write(head, target_name)
    if bits is not None and config.get(TARGET_HEAD):
        parts = ((name, value) for name, value in parts if name != "lm_head.weight")
    tensors = dict(parts if bits is None else rounded(parts, bits))
    if view is not None:
        config["soothsay"] = {**config.get("soothsay", {}), "view": view_config(view)}
        tensors |= view_tensors(view)
    file = "medusa_lm_head.safetensors" if head.method == "medusa" and not layout else "model.safetensors"
    with writing(Path(directory)) as writer:
        save_file(tensors, writer.directory / file, metadata={"format": "pt"})
        write_settings(writer.directory / "config.json", config)


def _open(files: DrafterFiles, target: Target, own: bool) -> StoredHead:
    """Check the head in these files. `own`: they are the target's checkpoint."""
    try:
        chosen = _format(files, own)
        if target.model.spec.source is not None and not chosen.reads_last:
            raise DrafterError(
                f"{files.path} reads features of a decoder, and cannot draft for an encoder-decoder: choose "
                "suffix, prompt-lookup, ngram, layer-skip, medusa, hydra or a draft model"
            )
        return chosen.open(files, TargetFit(target, files))
    except ModelError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, DrafterError):
            if str(files.path) in str(error):
                raise
            raise DrafterError(f"{files.path}: {error}") from error
        # sizes that fit no tensor, values of odd types: torch and Python have many errors for them
        raise DrafterError(f"{files.path} is damaged, or of an unknown kind ({error})") from error


def _format(files: DrafterFiles, own: bool) -> HeadFormat:
    """The format of these files. `own`: they are the target's checkpoint."""
    config, found = files.config, formats()
    own_heads = {method: one for method, one in found.items() if one.own}
    speculators = {name: one for one in found.values() for name in one.speculators}
    for key, known in (("soothsay_method", own_heads), ("speculators_model_type", speculators)):
        if key in config:
            if config[key] not in known:
                raise DrafterError(
                    f"{files.path} holds a drafter of kind {config[key]!r}, which is not supported; "
                    f"soothsay reads {SUPPORTED}"
                )
            return known[config[key]]
    for one in found.values():
        if one.looks_like(files):
            masks = [key for key in MASKS if key in config]
            if masks and not one.fills_masks:
                raise DrafterError(
                    f"{files.path} holds a drafter that fills masks ({masks[0]}), of a kind that is not "
                    f"supported; soothsay reads {SUPPORTED}"
                )
            return one
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


# our own layout


def own_format(opener: Opener) -> HeadFormat:
    """The format of heads of a method that no other engine reads."""
    return HeadFormat(opener, own=True, layouts={"": write_own}, integers=True)


def write_own(head: Head, target: str) -> Written:
    """Make config.json and tensors for soothsay. `head.config` is a dataclass."""
    own = {field.name: getattr(head.config, field.name) for field in fields(head.config)}
    own = {name: hf_config(one) if isinstance(one, ModelSpec) else one for name, one in own.items()}
    tensors = ((name, value) for name, value in split(head, {}) if name != "head.weight")  # the target has it
    return {"soothsay_method": head.method, "target": target, **own}, tensors


def rounded(tensors: Iterable[tuple[str, Tensor]], bits: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices in integers, with a scale in float16 for each `GROUP` numbers of a row; all else as it is.

    Integers of 8 bits are int8. Those of 4 bits plus 8 are uint8, two in a byte, the first in its lower half.
    """
    end = 2 ** (bits - 1) - 1
    for name, value in tensors:
        if value.dim() != 2 or value.shape[1] % GROUP:
            yield name, value
            continue
        groups = value.float().view(len(value), -1, GROUP)
        scales = (groups.abs().amax(-1) / end).half()
        whole = groups / scales.float().clamp(min=torch.finfo(torch.float16).tiny)[:, :, None]
        whole = whole.round().clamp(-end, end).to(torch.int8).flatten(1)
        if bits == 4:
            low, high = (whole + 8).to(torch.uint8).view(len(value), -1, 2).unbind(-1)
            whole = low | high << 4
        yield name, whole
        yield scales_of(name), scales


def values_of(kind: type[Any], files: DrafterFiles) -> dict[str, Any]:
    """The fields of `kind` from config.json. Raises `DrafterError` if one is missing."""
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    values = {name: required(files, name) for name in needed}
    values |= {field.name: files.config.get(field.name) for field in fields(kind) if field.name not in needed}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items() if v is not None}


def check_shortlist(files: DrafterFiles, size: int, vocabulary: int) -> None:
    """Raise `DrafterError` unless the shortlist has the target's tokens in order."""
    known = files.read("shortlist") if "shortlist" in files.names else torch.empty(0)
    good = known.dtype == torch.int64 and known.shape == (size,)
    if not good or int(known[0]) < 0 or int(known[-1]) >= vocabulary or (known.diff() < 1).any():
        raise DrafterError(
            f"{files.path}: shortlist is {known.dtype} {list(known.shape)} and should be "
            f"{size:,} tokens of {vocabulary:,}, in order; it is damaged"
        )


def required(files: DrafterFiles, key: str) -> Any:
    """A value of config.json. Raises `DrafterError` if it is missing."""
    if key not in files.config:
        raise DrafterError(
            f"{files.path / 'config.json'} has no {key!r}; it is damaged, or of another version"
        )
    return files.config[key]
