"""Tensors of GGUF files: their places, and the names and numbers that Hugging Face's checkpoints have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_architectures import CHANGES, Architecture, Change
from soothsay.model.formats.gguf_blocks import DECODERS, BlockRows
from soothsay.model.formats.gguf_header import MAX_TENSORS, TensorPlace
from soothsay.model.formats.gguf_metadata import Metadata
from soothsay.model.formats.gguf_part_names import FUSED, FUSED_HALVES, block_names, outer_names
from soothsay.model.weights.hf_names import names_of
from soothsay.model.weights.quantized import dequantized

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Files = Callable[[Path], npt.NDArray[np.uint8]]
"""From a path to the bytes of the file."""


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of the file. Copy on write, since torch warns about read-only memory."""
    return np.memmap(path, dtype=np.uint8, mode="c")


@dataclass(frozen=True)
class Stored(TensorPlace):
    """A tensor's place in a file, and its differences from the tensor that Hugging Face stores."""

    heads: int = 0  # number of heads whose rows are interleaved for llama.cpp's rotation; 0: none
    centred: bool = False  # a norm's weight w, stored as 1 + w
    change: Change | None = None  # from the stored numbers to those of Hugging Face
    factors: tuple[float, ...] = (1.0,)  # of the scales of blocks, one for all or for each expert

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The tensors of the file that make this one."""
        return (self,)

    def expert(self, index: int) -> Stored:
        """One matrix of a stack `[E, out, in]`, or one vector."""
        size = self.size // self.shape[0]
        factors = self.factors[index:][:1] or self.factors
        offset = self.offset + index * size
        return replace(self, shape=self.shape[1:], offset=offset, size=size, factors=factors)

    def halves(self) -> tuple[Stored, Stored]:
        """The upper and the lower rows of a matrix."""
        rows, size = self.shape[0] // 2, self.size // 2
        upper = replace(self, shape=(rows, *self.shape[1:]), size=size)
        return upper, replace(upper, offset=self.offset + size)

    def shape_read(self) -> tuple[int, ...]:
        """The shape of what `read` returns."""
        return self.shape if self.change is None else tuple(self.read(map_file).shape)

    def read(self, files: Files) -> Tensor:
        """The tensor: a view of the file where possible."""
        if self.kind in DECODERS:
            tensor = dequantized(self.blocks(files), torch.float32).view(self.shape)
        else:
            data = files(self.path)[self.offset : self.offset + self.size]
            tensor = torch.from_numpy(data).view(DTYPES[self.kind]).view(self.shape)
            if self.heads:  # rows (head, d/2, 2) -> (head, 2, d/2)
                tensor = tensor.view(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        tensor = tensor if self.change is None else self.change(tensor)
        return tensor.float() - 1 if self.centred else tensor

    def blocks(self, files: Files) -> BlockRows:
        """The tensor in integers."""
        rows = math.prod(self.shape[:-1])
        data = files(self.path)[self.offset : self.offset + self.size].reshape(rows, -1)
        return BlockRows(self.kind, torch.Size((rows, self.shape[-1])), data, self.heads, self.factors[0])


def with_factors(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Tensors in NVFP4 with the factors beside them, `NAME.scale`. Those of activations are left out.

    Raises `ModelError` if there is neither one factor nor one for each expert.
    """
    made = dict(stored)
    for name, tensor in stored.items():
        stem = name.removesuffix(".weight")
        factors = made.get(f"{stem}.scale") if tensor.kind == "NVFP4" else None
        if factors is None:
            continue
        count = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if factors.kind != "F32" or math.prod(factors.shape) not in (1, count):
            raise ModelError(
                f"{factors.path}: {stem}.scale {list(factors.shape)} of type {factors.kind} should be a "
                f"number or {count} of them, in F32; the file is damaged"
            )
        del made[f"{stem}.scale"]
        made.pop(f"{stem}.input_scale", None)
        made[name] = replace(tensor, factors=tuple(factors.read(map_file).flatten().tolist()))
    return made


@dataclass(frozen=True)
class KeysAndValues:
    """The matrix that makes keys and values of latent states, `[H * (plain + value), rank]`, head by head.

    llama.cpp's converter cuts it into one tensor for keys, transposed, and one for values. Blocks of integers
    run along different dimensions in the two, so the whole is floats.
    """

    keys: Stored  # [H, rank, plain]
    values: Stored  # [H, value, rank]

    @property
    def kind(self) -> str:
        """GGML's name of the type of the elements that `read` returns."""
        return self.keys.kind if self.keys.kind == self.values.kind in DTYPES else "F32"

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See `Stored`."""
        return self.keys, self.values

    def shape_read(self) -> tuple[int, ...]:
        """See `Stored`."""
        heads, rank, plain = self.keys.shape
        return heads * (plain + self.values.shape[1]), rank

    def read(self, files: Files) -> Tensor:
        """The matrix, a copy."""
        keys, values = self.keys.read(files).transpose(1, 2), self.values.read(files)
        return torch.cat([keys, values], 1).flatten(0, 1).to(DTYPES[self.kind])


@dataclass(frozen=True)
class Numbers:
    """A small tensor of Hugging Face's whose number is in the metadata. The file has no place for it."""

    value: float
    kind = "F32"
    parts: tuple[Stored, ...] = ()

    def shape_read(self) -> tuple[int, ...]:
        """See `Stored`."""
        return (1,)

    def read(self, files: Files) -> Tensor:
        """See `Stored`."""
        return torch.tensor([self.value])


HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Parts of a block whose rows may be interleaved, and the keys of their numbers of heads."""

NAME = re.compile(r"(?:blk\.([^.]*)(?:\.|$))?(.*?)(?:\.(weight|bias))?", re.DOTALL)
"""The name of a tensor: its block (none: it is outside of the blocks), its part, and its suffix."""

Tensors = dict[str, Stored | KeysAndValues | Numbers]


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
        self._blocks = f"model.{names_of(kind.family)['layers'][0]}"
        self.own: Tensors = {}
        self.modules: Tensors = {}
        for name, tensor in stored.items():
            if not name.startswith(tuple(kind.stacks)):
                self._add(name, tensor)
        for start, own in kind.stacks.items():
            inside = {name.removeprefix(start): stored[name] for name in stored if name.startswith(start)}
            self.own |= Renaming(data, own, inside, config).own
        self._join(self.own)
        self._join(self.modules)
        self._add_numbers()

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
        centred, change = self._kind.centred and is_norm, CHANGES.get(part)
        tensor = replace(tensor, centred=centred, change=change)
        if "{}" not in targets[0]:
            renamed[targets[0]] = tensor
            return
        for number, one in enumerate(self._unstacked(full, tensor, block is None)):
            halves = (one,) if len(targets) == 1 else one.halves()
            renamed |= {target.format(number): half for target, half in zip(targets, halves, strict=True)}

    def _add_numbers(self) -> None:
        """Add the tensors whose numbers are in the metadata, one for each layer."""
        layers = int(self._config["num_hidden_layers"])
        for key, part in self._kind.numbers.items():
            found = np.asarray(self._data.values.get(key, ()))
            if found.shape != (layers,) or found.dtype.kind != "f" or not np.isfinite(found).all():
                raise ModelError(f"{self._data.path}: {key} should have a number for each of {layers} layers")
            for layer, value in enumerate(found.tolist()):
                self.own[f"{self._blocks}.{layer}.{part}"] = Numbers(value)

    def _module(self, block: str) -> int | None:
        """The number of a block among the MTP modules, from 0. None: the block is one of the model's own."""
        if self._kind.modules is None or not self._data.number("nextn_predict_layers", 0):
            return None
        number = int(block[:9]) - int(self._config["num_hidden_layers"]) if block.isdecimal() else -1
        return number if number >= 0 else None

    def _place(self, block: str, module: int | None) -> str:
        """The prefix of a block's tensors."""
        names = None if module is None else self._kind.modules
        return f"{self._blocks}.{block}" if names is None else names.block.format(block, module)

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
