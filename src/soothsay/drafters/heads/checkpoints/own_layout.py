"""Our own layout, for heads that no other engine reads: our own names, config.json says the method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from soothsay.drafters.heads.checkpoints.block_configs import hf_config
from soothsay.drafters.heads.checkpoints.drafter_files import GROUP, DrafterFiles, scales_of
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, Opener, Written, split
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.specs.model_spec import ModelSpec


def own_format(method: str, opener: Opener) -> HeadFormat:
    """The format of heads of a method that no other engine reads."""
    return HeadFormat(method, opener, own=True, layouts={"": write_own}, integers=True)


def write_own(head: Head, target: str) -> Written:
    """Make config.json and tensors for soothsay. `head.config` is a dataclass."""
    own = {field.name: getattr(head.config, field.name) for field in fields(head.config)}
    own = {name: hf_config(one) if isinstance(one, ModelSpec) else one for name, one in own.items()}
    tensors = ((name, value) for name, value in split(head, {}) if name != "head.weight")  # the target has it
    return {"soothsay_method": head.method, "target": target, **own}, tensors


def rounded(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Matrices as int8, with a scale in float16 for each `GROUP` numbers of a row; all else as it is."""
    for name, value in tensors:
        if value.dim() != 2 or value.shape[1] % GROUP:
            yield name, value
            continue
        groups = value.float().view(len(value), -1, GROUP)
        scales = (groups.abs().amax(-1) / 127).half()
        whole = groups / scales.float().clamp(min=torch.finfo(torch.float16).tiny)[:, :, None]
        yield name, whole.round().clamp(-127, 127).to(torch.int8).flatten(1)
        yield scales_of(name), scales


def values_of(kind: type[Any], files: DrafterFiles) -> dict[str, Any]:
    """The fields of `kind` from config.json. Raises `DrafterError` if one is missing."""
    values = {
        field.name: required(files, field.name) if field.default is MISSING else files.config.get(field.name)
        for field in fields(kind)
    }
    values = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


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
    config: Mapping[str, Any] = files.config
    if key not in config:
        raise DrafterError(
            f"{files.path / 'config.json'} has no {key!r}; it is damaged, or of another version"
        )
    return config[key]
