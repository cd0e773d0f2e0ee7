"""Tensors of a GGUF file by the names that Hugging Face's checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_config import Header
from soothsay.model.formats.gguf_families import CHANGES, INTERLEAVED, is_centred
from soothsay.model.formats.gguf_header import MAX_TENSORS
from soothsay.model.formats.gguf_latent import joined
from soothsay.model.formats.gguf_modules import module_names, module_number
from soothsay.model.formats.gguf_part_names import FUSED, FUSED_HALVES, block_names, outer_names
from soothsay.model.formats.gguf_tensors import KeysAndValues, Stored

HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Parts of a block whose rows may be interleaved, and the keys of their numbers of heads."""


def rename(
    header: Header, stored: Mapping[str, Stored], config: Mapping[str, Any]
) -> tuple[dict[str, Stored | KeysAndValues], dict[str, Stored | KeysAndValues]]:
    """Tensors by Hugging Face's names, with the changes that `Stored.read` has to undo.

    Those of the model, then those of its MTP modules. Raises `ModelError` for a tensor that the family does
    not have.
    """
    renaming = _Renaming(header, config)
    for name, tensor in stored.items():
        renaming.add(name, tensor)
    return joined(header, renaming.own, config), joined(header, renaming.modules, config)


@dataclass(frozen=True)
class _Name:
    """A tensor's name in GGUF, taken apart: `blk.3.attn_q.weight`, or `output.weight`."""

    full: str
    stem: str  # blk.3.attn_q
    suffix: str  # weight or bias, or empty
    block: str | None  # 3; None: outside of the blocks
    part: str  # attn_q; empty outside of the blocks

    @classmethod
    def parse(cls, full: str) -> _Name:
        stem, _, suffix = full.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = full, ""
        outer, _, inner = stem.partition(".")
        block, _, part = inner.partition(".")
        return cls(full, stem, suffix, block if outer == "blk" else None, part)


@dataclass
class _Renaming:
    """The tensors that were renamed so far."""

    header: Header
    config: Mapping[str, Any]
    own: dict[str, Stored] = field(default_factory=dict)
    modules: dict[str, Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outer_names = outer_names(self.header.family)
        self.block_names = block_names(self.header.family)

    def add(self, full: str, tensor: Stored) -> None:
        """Rename a tensor of the file."""
        name = _Name.parse(full)
        module = None if name.block is None else module_number(self.header, name.block, self.config)
        beside: Mapping[str, str] = {}
        place = f"model.layers.{name.block}"
        if module is not None and name.block is not None:
            beside, place = module_names(self.header, name.block, module)
        renamed = self.own if module is None else self.modules
        targets = self._targets(name, beside, place)
        if not targets and module is not None:  # the model runs without its modules; drafters refuse them
            renamed[f"{place}.{full}"] = tensor
            return
        if not targets:
            raise ModelError(
                f"{self.header.path}: {self.header.family} as soothsay knows it has no tensor {full!r}"
            )
        tensor = self._changed(name, tensor)
        if "{}" in targets[0]:
            self._add_experts(renamed, name, targets, tensor)
        else:
            renamed[targets[0]] = tensor

    def _targets(self, name: _Name, beside: Mapping[str, str], place: str) -> list[str]:
        """Hugging Face's names: two for `FUSED`, none for an unknown tensor, else one.

        `beside` are names of parts of a module beside its block; `place` is the prefix of others.
        """
        if name.block is None:
            target = self.outer_names.get(name.stem)
            return [f"{target}.{name.suffix}"] if target and name.suffix else []
        whole = self.block_names.get(f"{name.part}.{name.suffix}" if name.suffix else name.part)
        if name.part in beside:
            return [f"{beside[name.part]}.{name.suffix}"] if name.suffix else []
        if whole:
            return [f"{place}.{whole}"]
        is_fused = name.part == FUSED and FUSED_HALVES[0] in self.block_names
        parts = FUSED_HALVES if is_fused else (name.part,)
        found = [self.block_names[part] for part in parts if part in self.block_names]
        return [f"{place}.{target}.{name.suffix}" for target in found] if name.suffix else []

    def _changed(self, name: _Name, tensor: Stored) -> Stored:
        """A tensor with what `Stored.read` has to undo."""
        header = self.header
        if header.architecture in INTERLEAVED and name.part in HEADS:
            heads = int(self.config[HEADS[name.part]])
            if tensor.shape[0] % (2 * heads):
                raise ModelError(f"{header.path}: {name.full} has {tensor.shape[0]} rows for {heads} heads")
            tensor = replace(tensor, heads=heads)
        change = CHANGES.get(header.family, {}).get(name.part)
        return replace(tensor, centred=is_centred(header.family, name.full), change=change)

    def _add_experts(
        self, renamed: dict[str, Stored], name: _Name, targets: list[str], tensor: Stored
    ) -> None:
        """Add the matrices or vectors of all experts, or of all streams, of which a tensor is the stack."""
        outer = name.block is None
        count = self.config["altup_num_inputs"] - 1 if outer else self.config["num_local_experts"]
        path, experts = self.header.path, int(count)
        dims = 3 if name.suffix == "weight" else 2
        if len(tensor.shape) != dims or tensor.shape[0] != experts:
            what = "streams" if outer else "experts"
            raise ModelError(
                f"{path}: {name.full} {list(tensor.shape)} should have a part for each of {experts} {what}"
            )
        if len(self.own) + len(self.modules) + experts > MAX_TENSORS:
            raise ModelError(f"{path} has more than {MAX_TENSORS:,} tensors, experts counted one by one")
        for e in range(experts):
            one = tensor.expert(e)
            parts = (one,) if len(targets) == 1 else one.halves()
            renamed |= {target.format(e): part for target, part in zip(targets, parts, strict=True)}
