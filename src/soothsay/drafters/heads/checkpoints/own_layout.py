"""Our own layout, for heads that no other engine reads: our own names, config.json says the method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch
from torch import Tensor

from soothsay.drafters.heads.block.block_head import BlockConfig, BlockHead
from soothsay.drafters.heads.checkpoints.block_configs import block_config, hf_config
from soothsay.drafters.heads.checkpoints.drafter_files import GROUP, DrafterFiles, scales_of
from soothsay.drafters.heads.checkpoints.fit import Fit
from soothsay.drafters.heads.checkpoints.module_names import split
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.drafters.heads.hydra.hydra_head import HydraConfig, HydraHead
from soothsay.drafters.heads.redrafter.redrafter_head import RedrafterConfig, RedrafterHead
from soothsay.errors import DrafterError


def open_hydra(files: DrafterFiles, fit: Fit) -> StoredHead:
    """Open Hydra heads that `soothsay train` has written."""
    config = HydraConfig(**_values(HydraConfig, files))
    files.check_count(config.num_heads * (1 + config.num_layers), "modules")
    fit.check(hidden=config.hidden_size, vocab=int(files.config.get("vocab_size", fit.config.vocab_size)))
    fit.check_layers(config.target_layers)
    return StoredHead(files, fit, "Hydra (soothsay)", lambda: HydraHead(config), {})


def open_block(files: DrafterFiles, fit: Fit) -> StoredHead:
    """Open a one-pass head that `soothsay train` has written."""
    raw = {"num_hidden_layers": 0, **_required(files, "block")}
    block = block_config(files, raw, {}, "blocks.0.", int(raw["num_hidden_layers"]))
    files.check_count(block.num_layers, "modules")
    config = BlockConfig(**{**_values(BlockConfig, files), "block": block})
    fit.check(hidden=config.target_hidden_size, vocab=block.vocab_size)
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_taps(config.taps)
    fit.check_context(block.max_positions)
    if config.shortlist_size:
        _check_shortlist(files, config.shortlist_size, block.vocab_size)
    return StoredHead(files, fit, "block (soothsay)", lambda: BlockHead(config, fit.kernels_for(block)), {})


def open_redrafter(files: DrafterFiles, fit: Fit) -> StoredHead:
    """Open a recurrent head that `soothsay train` has written."""
    config = RedrafterConfig(**_values(RedrafterConfig, files))
    fit.check(hidden=config.target_hidden_size, vocab=config.vocab_size)
    fit.check_taps(config.taps)
    if config.shortlist_size:
        _check_shortlist(files, config.shortlist_size, config.vocab_size)
    return StoredHead(files, fit, "redrafter (soothsay)", lambda: RedrafterHead(config), {})


def write_own(
    head: HydraHead | BlockHead | RedrafterHead, target: str, *, integers: bool = False
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Make config.json and tensors for soothsay. `integers`: matrices as int8, which takes half the space."""
    config = {"soothsay_method": head.method, "target": target, **asdict(head.config)}
    if isinstance(head, BlockHead):
        config["block"] = hf_config(head.config.block)
    own = ((name, value) for name, value in split(head, {}) if name != "head.weight")  # the target has it
    return config, rounded(own) if integers else own


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


def _values(kind: type[HydraConfig | BlockConfig | RedrafterConfig], files: DrafterFiles) -> dict[str, Any]:
    """The fields of `kind` from config.json. Raises `DrafterError` if one is missing."""
    values = {
        field.name: _required(files, field.name) if field.default is MISSING else files.config.get(field.name)
        for field in fields(kind)
    }
    values = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_shortlist(files: DrafterFiles, size: int, vocabulary: int) -> None:
    """Raise `DrafterError` unless the shortlist has the target's tokens in order."""
    known = files.read("shortlist") if "shortlist" in files.names else torch.empty(0)
    good = known.dtype == torch.int64 and known.shape == (size,)
    if not good or int(known[0]) < 0 or int(known[-1]) >= vocabulary or (known.diff() < 1).any():
        raise DrafterError(
            f"{files.path}: shortlist is {known.dtype} {list(known.shape)} and should be "
            f"{size:,} tokens of {vocabulary:,}, in order; it is damaged"
        )


def _required(files: DrafterFiles, key: str) -> Any:
    config: Mapping[str, Any] = files.config
    if key not in config:
        raise DrafterError(
            f"{files.path / 'config.json'} has no {key!r}; it is damaged, or of another version"
        )
    return config[key]
