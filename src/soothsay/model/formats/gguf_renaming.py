"""Tensors of a GGUF file by the names that Hugging Face's checkpoints give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_architectures import Architecture
from soothsay.model.formats.gguf_header import MAX_TENSORS
from soothsay.model.formats.gguf_metadata import Metadata
from soothsay.model.formats.gguf_part_names import FUSED, FUSED_HALVES, block_names, outer_names
from soothsay.model.formats.gguf_tensors import KeysAndValues, Stored

HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Parts of a block whose rows may be interleaved, and the keys of their numbers of heads."""

NAME = re.compile(r"(?:blk\.([^.]*)(?:\.|$))?(.*?)(?:\.(weight|bias))?", re.DOTALL)
"""The name of a tensor: its block (none: it is outside of the blocks), its part, and its suffix."""

Tensors = dict[str, Stored | KeysAndValues]


class Renaming:
    """Tensors by Hugging Face's names, with the changes that `Stored.read` has to undo.

    Raises `ModelError` for a tensor that the architecture does not have.

    Attributes:
        own: those of the model.
        modules: those of its MTP modules.
    """

    def __init__(
        self, data: Metadata, kind: Architecture, stored: Mapping[str, Stored], config: Mapping[str, Any]
    ):
        self._data, self._kind, self._config = data, kind, config
        self._outer, self._block = outer_names(kind.family), block_names(kind.family, kind.blocks)
        self.own: Tensors = {}
        self.modules: Tensors = {}
        for name, tensor in stored.items():
            self._add(name, tensor)
        self._join(self.own)
        self._join(self.modules)

    def _add(self, full: str, tensor: Stored) -> None:
        """Rename a tensor of the file."""
        matched = NAME.fullmatch(full)
        block, part, suffix = ("", full, None) if matched is None else matched.groups()
        module = None if block is None else self._module(block)
        renamed = self.own if module is None else self.modules
        targets = self._targets(block, part, suffix or "", module)
        if not targets and module is not None:  # the model runs without its modules; drafters refuse them
            renamed[f"{self._place(block, module)}.{full}"] = tensor
            return
        if not targets:
            raise ModelError(
                f"{self._data.path}: {self._kind.family} as soothsay knows it has no tensor {full!r}"
            )
        if self._kind.interleaved and part in HEADS:
            heads = int(self._config[HEADS[part]])
            if tensor.shape[0] % (2 * heads):
                raise ModelError(f"{self._data.path}: {full} has {tensor.shape[0]} rows for {heads} heads")
            tensor = replace(tensor, heads=heads)
        is_norm = full.endswith("norm.weight") and not full.endswith("ssm_norm.weight")
        centred, change = self._kind.centred and is_norm, self._kind.changes.get(part)
        tensor = replace(tensor, centred=centred, change=change)
        if "{}" not in targets[0]:
            renamed[targets[0]] = tensor
            return
        for number, one in enumerate(self._unstacked(full, tensor, block is None)):
            halves = (one,) if len(targets) == 1 else one.halves()
            renamed |= {target.format(number): half for target, half in zip(targets, halves, strict=True)}

    def _module(self, block: str) -> int | None:
        """The number of a block among the MTP modules, from 0. None: the block is one of the model's own."""
        if self._kind.modules is None or not self._data.number("nextn_predict_layers", 0):
            return None
        number = int(block[:9]) - int(self._config["num_hidden_layers"]) if block.isdecimal() else -1
        return number if number >= 0 else None

    def _place(self, block: str, module: int | None) -> str:
        """The prefix of a block's tensors."""
        names = None if module is None else self._kind.modules
        return f"model.layers.{block}" if names is None else names.block.format(block, module)

    def _targets(self, block: str | None, part: str, suffix: str, module: int | None) -> list[str]:
        """Hugging Face's names: two for `FUSED`, none for an unknown tensor, else one."""
        if block is None:
            names = [self._outer.get(part)]
        elif module is not None and self._kind.modules is not None and part in self._kind.modules.beside:
            names = [self._kind.modules.beside[part].format(block)]
        elif whole := self._block.get(f"{part}.{suffix}" if suffix else part):
            return [f"{self._place(block, module)}.{whole}"]
        else:
            is_fused = part == FUSED and FUSED_HALVES[0] in self._block
            found = [self._block.get(one) for one in (FUSED_HALVES if is_fused else (part,))]
            names = [name and f"{self._place(block, module)}.{name}" for name in found]
        return [f"{name}.{suffix}" for name in names if name and suffix]

    def _unstacked(self, full: str, tensor: Stored, is_outer: bool) -> list[Stored]:
        """The matrices or vectors of all experts, or of all streams, of which a tensor is the stack."""
        path, what = self._data.path, "streams" if is_outer else "experts"
        count = int(self._config["altup_num_inputs"] - 1 if is_outer else self._config["num_local_experts"])
        dims = 3 if full.endswith(".weight") else 2
        if len(tensor.shape) != dims or tensor.shape[0] != count:
            raise ModelError(
                f"{path}: {full} {list(tensor.shape)} should have a part for each of {count} {what}"
            )
        if len(self.own) + len(self.modules) + count > MAX_TENSORS:
            raise ModelError(f"{path} has more than {MAX_TENSORS:,} tensors, experts counted one by one")
        return [tensor.expert(number) for number in range(count)]

    def _join(self, tensors: Tensors) -> None:
        """Make one matrix of the two parts of a matrix of keys and values, which newer files have.

        Raises `ModelError` for parts that do not fit each other.
        """
        for name in [*tensors]:
            place = name.removesuffix("self_attn.k_b_proj.weight")
            values, whole = f"{place}self_attn.v_b_proj.weight", f"{place}self_attn.kv_b_proj.weight"
            if place == name or values not in tensors or whole in tensors:
                continue
            c, heads = self._config, self._config["num_attention_heads"]
            expected = {
                name: (heads, c["kv_lora_rank"], c["qk_nope_head_dim"]),
                values: (heads, c["v_head_dim"], c["kv_lora_rank"]),
            }
            found = {part: stored for part in expected if isinstance(stored := tensors[part], Stored)}
            for part, shape in expected.items():
                if tuple(found[part].shape) != shape:
                    raise ModelError(
                        f"{self._data.path}: {part} {list(found[part].shape)} should be {list(shape)} by the "
                        "metadata; the file is damaged"
                    )
            tensors[whole] = KeysAndValues(found[name], found[values])
            del tensors[name], tensors[values]
