"""GGUF files, llama.cpp's format, as a Hugging Face checkpoint: its keys, names, shapes and row order.

A tensor means what llama.cpp's converter writes and its runtime computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.families.fields import checked_fields
from soothsay.model.formats.gguf_architectures import architecture_of, read_config
from soothsay.model.formats.gguf_blocks import DECODERS, gguf_format, loaded
from soothsay.model.formats.gguf_gemma_keys import gemma4_rotations
from soothsay.model.formats.gguf_header import TensorPlace, read_parts
from soothsay.model.formats.gguf_metadata import LONGROPE_FACTORS, ROPE_DIVISORS, Metadata, read_rope_scaling
from soothsay.model.formats.gguf_tensors import DTYPES, Renaming, Stored, map_file, with_factors
from soothsay.model.formats.gguf_tokenizer import build_tokenizer, check_types, stop_ids
from soothsay.model.formats.weight_format import Reader, WeightFormat
from soothsay.model.weights.generation_config import recommended, sampling_in_gguf
from soothsay.tokenizer import Tokenizer


class GGUFCheckpoint:
    """A `.gguf` file with floats or blocks of integers, or one in parts. `path` is any of the parts.

    Raises `ModelError` if a file is missing or damaged, or if soothsay cannot compute its model.
    """

    def __init__(self, path: Path):
        header = read_parts(path)
        stored = with_factors(_places(path, header.tensors))
        self.files, self._metadata = header.files, header.metadata
        self.path = path = self.files[0]
        check_types(self._metadata, path)
        data = Metadata(path, self._metadata)
        kind = architecture_of(data, stored)
        divisors = stored.pop(ROPE_DIVISORS, None)
        factors = {LONGROPE_FACTORS[name]: stored.pop(name) for name in LONGROPE_FACTORS if name in stored}
        config = read_config(data, kind, {name: tensor.shape for name, tensor in stored.items()})
        self.config: dict[str, Any] = checked_fields(config, str(path))
        divided_by = None if divisors is None else divisors.read(map_file)
        longrope = {key: tensor.read(map_file) for key, tensor in factors.items()}
        if kind.family == "gemma4_text":
            self.config["rope_parameters"] = gemma4_rotations(data, divided_by)
        elif scaling := read_rope_scaling(data, divided_by, longrope, self.config["rope_theta"], kind.yarn):
            self.config["rope_scaling"] = scaling
        renamed = Renaming(data, kind, stored, self.config)
        self._tensors, self._modules = renamed.own, renamed.modules
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

        def file(path: Path) -> npt.NDArray[np.uint8]:
            if path not in mapped:
                mapped[path] = map_file(path)
            return mapped[path]

        def read(name: str) -> Tensor:
            return (self._tensors.get(name) or self._modules[name]).read(file)

        try:
            yield read
        finally:
            mapped.clear()  # a caller may keep `read`, which must not keep files mapped

    def modules(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of MTP modules, as Hugging Face names them: their shapes, and dtypes of their values.

        `open` reads them too.
        """
        return {
            name: (tensor.shape_read(), DTYPES.get(tensor.kind, torch.float32))
            for name, tensor in self._modules.items()
        }

    def stored(self) -> Iterator[tuple[str, int]]:
        """For each tensor, GGML's name of its element type and its number of elements."""
        for tensor in self._tensors.values():
            yield from ((part.kind, math.prod(part.shape)) for part in tensor.parts)

    def weight_format(self) -> WeightFormat | None:
        """See `Checkpoint`."""
        blocks = {
            name: tensor
            for name, tensor in self._tensors.items()
            if isinstance(tensor, Stored) and tensor.kind in DECODERS
        }
        if not blocks:
            return None
        types = {name: tensor.kind for name, tensor in blocks.items()}
        counts = {name: math.prod(tensor.shape) for name, tensor in blocks.items()}
        each = sum(loaded(types[name])[1] * count for name, count in counts.items()) / sum(counts.values())
        return gguf_format(types, lambda name: blocks[name].blocks(map_file), each)

    def num_bytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def most_weights(self) -> int:
        """See `Checkpoint`."""
        return sum(count for _, count in self.stored())

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer inside the file, if any."""
        return build_tokenizer(self._metadata, self.path)

    def sampling_defaults(self) -> dict[str, float]:
        """See `Checkpoint`."""
        stated, names = sampling_in_gguf(self._metadata, self.path), ("general.basename", "general.name")
        return stated or recommended(*map(self._metadata.get, names), self.path.name)


def _places(path: Path, tensors: Mapping[str, TensorPlace]) -> dict[str, Stored]:
    """Places of the tensors by GGUF's names. Raises `ModelError` for a type that is not computed."""
    for name, place in tensors.items():
        if place.kind not in DTYPES and place.kind not in DECODERS:
            raise ModelError(
                f"{path}: tensor {name!r} is of type {place.kind}, which soothsay does not compute; take "
                "this model's file in Q4_K_M or Q8_0, or make one from its F16 file with llama-quantize. The "
                f"types that are computed: {', '.join((*DTYPES, *DECODERS))}"
            )
    return {name: Stored(**vars(place)) for name, place in tensors.items()}
