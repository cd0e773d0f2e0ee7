"""GGUF files, llama.cpp's format, as a Hugging Face checkpoint: its keys, names, shapes and row order.

A tensor means what llama.cpp's converter writes and its runtime computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.config_fields import checked_fields
from soothsay.model.formats.gguf_blocks import DECODERS, BlockRows, GGUFFormat
from soothsay.model.formats.gguf_config import (
    LONGROPE_FACTORS,
    ROPE_DIVISORS,
    Header,
    read_config,
    read_rope_scaling,
)
from soothsay.model.formats.gguf_families import (
    BLOCK_NAMES,
    CHANGES,
    FAMILY_NAMES,
    FUSED,
    FUSED_HALVES,
    INTERLEAVED,
    OUTER_NAMES,
    Change,
    is_centred,
    own_config,
)
from soothsay.model.formats.gguf_gemma4 import rope_parameters
from soothsay.model.formats.gguf_header import MAX_TENSORS
from soothsay.model.formats.gguf_modules import module_names, module_number
from soothsay.model.formats.gguf_parts import read_parts
from soothsay.model.formats.gguf_tokenizer import build_tokenizer, check_types, stop_ids
from soothsay.model.formats.weight_format import Reader, WeightFormat
from soothsay.model.generation_config import sampling_in_gguf
from soothsay.model.quantized import dequantized
from soothsay.tokenizer import Tokenizer

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFCheckpoint:
    """A `.gguf` file with floats or blocks of integers, or one in parts. `path` is any of the parts.

    Raises `ModelError` if a file is missing or damaged, or if soothsay cannot compute its model.
    """

    def __init__(self, path: Path):
        self.files, self._metadata, stored = _read(path)
        self.path = path = self.files[0]
        check_types(self._metadata, path)
        header = Header(path, self._metadata)
        divisors = stored.pop(ROPE_DIVISORS, None)
        factors = {LONGROPE_FACTORS[name]: stored.pop(name) for name in LONGROPE_FACTORS if name in stored}
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        config = read_config(header, shapes)
        self.config: dict[str, Any] = checked_fields(config | own_config(header, config, shapes), str(path))
        divided_by = None if divisors is None else divisors.read(_map(divisors.path))
        longrope = {key: tensor.read(_map(tensor.path)) for key, tensor in factors.items()}
        if header.family == "gemma4_text":
            self.config["rope_parameters"] = rope_parameters(header, divided_by)
        elif scaling := read_rope_scaling(header, divided_by, longrope, self.config):
            self.config["rope_scaling"] = scaling
        self._tensors, self._modules = _rename(header, stored, self.config)
        self.eos_ids = stop_ids(self._metadata)

    def names(self) -> frozenset[str]:
        """Names of all tensors, as Hugging Face writes them."""
        return frozenset(self._tensors)

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """A function from a name to its tensor `[out, in]`, a view of the mapped file where possible.

        It is a copy if values are computed (blocks, Gemma's norms) or rows are reordered (q and k of Llama).
        """
        mapped: dict[Path, npt.NDArray[np.uint8]] = {}

        def read(name: str) -> Tensor:
            tensor = self._tensors.get(name) or self._modules[name]
            if tensor.path not in mapped:
                mapped[tensor.path] = _map(tensor.path)
            return tensor.read(mapped[tensor.path])

        try:
            yield read
        finally:
            mapped.clear()  # a caller may keep `read`, which must not keep files mapped

    def modules(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of MTP modules, as Hugging Face names them: their shapes, and dtypes of their values.

        `open` reads them too.
        """
        found = {}
        for name, tensor in self._modules.items():
            shape = tensor.shape if tensor.change is None else tuple(tensor.read(_map(tensor.path)).shape)
            found[name] = shape, DTYPES.get(tensor.kind, torch.float32)
        return found

    def stored(self) -> Iterator[tuple[str, int]]:
        """For each tensor, GGML's name of its element type and its number of elements."""
        for tensor in self._tensors.values():
            yield tensor.kind, math.prod(tensor.shape)

    def weight_format(self) -> WeightFormat | None:
        """See `Checkpoint`."""
        blocks = {name: tensor for name, tensor in self._tensors.items() if tensor.kind in DECODERS}
        if not blocks:
            return None
        types = {name: tensor.kind for name, tensor in blocks.items()}
        size = sum(tensor.size for tensor in blocks.values())
        return GGUFFormat(types, lambda name: blocks[name].blocks(_map(blocks[name].path)), size)

    def num_bytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer inside the file, if any."""
        return build_tokenizer(self._metadata, self.path)

    def sampling_defaults(self) -> dict[str, float]:
        """See `Checkpoint`."""
        return sampling_in_gguf(self._metadata, self.path)


@dataclass(frozen=True)
class _Stored:
    """A tensor's place in the file, and how to turn it into the tensor that Hugging Face stores."""

    kind: str  # GGML's name of the element type
    shape: tuple[int, ...]  # [out, in]
    offset: int  # bytes
    size: int  # bytes
    path: Path
    heads: int = 0  # number of heads whose rows are interleaved for llama.cpp's rotation; 0: none
    centred: bool = False  # a norm's weight w, stored as 1 + w
    change: Change | None = None  # from the stored numbers to those of Hugging Face

    def expert(self, index: int) -> _Stored:
        """One matrix of a stack `[E, out, in]`, or one vector."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, size=size)

    def halves(self) -> tuple[_Stored, _Stored]:
        """The upper and the lower rows of a matrix."""
        rows, size = self.shape[0] // 2, self.size // 2
        upper = replace(self, shape=(rows, *self.shape[1:]), size=size)
        return upper, replace(upper, offset=self.offset + size)

    def read(self, file: npt.NDArray[np.uint8]) -> Tensor:
        """The tensor, from the bytes of the whole file."""
        if self.kind in DECODERS:
            tensor = dequantized(self.blocks(file), torch.float32).view(self.shape)
        else:
            data = file[self.offset : self.offset + self.size]
            tensor = torch.from_numpy(data).view(DTYPES[self.kind]).view(self.shape)
            if self.heads:  # rows (head, d/2, 2) -> (head, 2, d/2)
                tensor = tensor.view(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        tensor = tensor if self.change is None else self.change(tensor)
        return tensor.float() - 1 if self.centred else tensor

    def blocks(self, file: npt.NDArray[np.uint8]) -> BlockRows:
        """The tensor in integers, from the bytes of the whole file."""
        rows = math.prod(self.shape[:-1])
        data = file[self.offset : self.offset + self.size].reshape(rows, -1)
        return BlockRows(self.kind, torch.Size((rows, self.shape[-1])), data, self.heads)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of the file. Copy on write, since torch warns about read-only memory."""
    return np.memmap(path, dtype=np.uint8, mode="c")


def _read(path: Path) -> tuple[tuple[Path, ...], dict[str, Any], dict[str, _Stored]]:
    """The files, the metadata, and places of the tensors by GGUF's names."""
    files, metadata, tensors = read_parts(path)
    for name, place in tensors.items():
        if place.kind not in DTYPES and place.kind not in DECODERS:
            raise ModelError(
                f"{path}: tensor {name!r} is of type {place.kind}, which soothsay does not compute; take "
                "this model's file in Q4_K_M or Q8_0, or make one from its F16 file with llama-quantize. The "
                f"types that are computed: {', '.join((*DTYPES, *DECODERS))}"
            )
    return files, metadata, {name: _Stored(*place) for name, place in tensors.items()}


def _rename(
    header: Header, stored: Mapping[str, _Stored], config: Mapping[str, Any]
) -> tuple[dict[str, _Stored], dict[str, _Stored]]:
    """Tensors by Hugging Face's names, with the changes that `_Stored.read` has to undo.

    Those of the model, then those of its MTP modules.
    """
    block_names = BLOCK_NAMES | FAMILY_NAMES.get(header.family, {})
    interleaved = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    own: dict[str, _Stored] = {}
    modules: dict[str, _Stored] = {}
    for name, tensor in stored.items():
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, ""
        outer, _, inner = stem.partition(".")
        layer, _, part = inner.partition(".")
        module = module_number(header, layer, config) if outer == "blk" else None
        beside, place = (
            ({}, f"model.layers.{layer}") if module is None else module_names(header, layer, module)
        )
        renamed = own if module is None else modules
        whole = block_names.get(f"{part}.{suffix}" if suffix else part) if outer == "blk" else None
        fused = part == FUSED and FUSED_HALVES[0] in block_names
        part = FUSED_HALVES[0] if fused else part
        target = whole or (block_names.get(part) if outer == "blk" else OUTER_NAMES.get(stem))
        target = beside.get(part, target)
        if target is None and module is not None:  # the model runs without its modules; drafters refuse them
            modules[f"{place}.{name}"] = tensor
            continue
        if target is None or not (suffix or whole):
            raise ModelError(f"{header.path}: {header.family} as soothsay knows it has no tensor {name!r}")
        if header.architecture in INTERLEAVED and part in interleaved:
            heads = int(config[interleaved[part]])
            if tensor.shape[0] % (2 * heads):
                raise ModelError(f"{header.path}: {name} has {tensor.shape[0]} rows for {heads} heads")
            tensor = replace(tensor, heads=heads)
        if is_centred(header.family, name):
            tensor = replace(tensor, centred=True)
        if (change := CHANGES.get(header.family, {}).get(part)) is not None:
            tensor = replace(tensor, change=change)
        target = f"{place}.{target}" if outer == "blk" and part not in beside else target
        full = target if whole else f"{target}.{suffix}"
        if "{}" in full:
            if (
                len(tensor.shape) != (3 if suffix == "weight" else 2)
                or tensor.shape[0] != config["num_local_experts"]
            ):
                raise ModelError(
                    f"{header.path}: {name} {list(tensor.shape)} should have a part for each of "
                    f"{config['num_local_experts']} experts"
                )
            if len(own) + len(modules) + tensor.shape[0] > MAX_TENSORS:
                raise ModelError(
                    f"{header.path} has more than {MAX_TENSORS:,} tensors, experts counted one by one"
                )
            for e in range(tensor.shape[0]):
                if fused:
                    targets = [f"{place}.{block_names[half]}.{suffix}" for half in FUSED_HALVES]
                    renamed |= {
                        t.format(e): half for t, half in zip(targets, tensor.expert(e).halves(), strict=True)
                    }
                else:
                    renamed[full.format(e)] = tensor.expert(e)
        else:
            renamed[full] = tensor
    return own, modules
