"""A drafter's directory: config.json and tensors, in safetensors or in PyTorch's pickles. Or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from soothsay.errors import DrafterError, ModelError
from soothsay.files import read_json_object
from soothsay.model.families.fields import checked_fields
from soothsay.model.formats.gguf_file import GGUFCheckpoint
from soothsay.model.formats.gguf_names import is_gguf
from soothsay.model.formats.pickles import unpickled
from soothsay.model.formats.stacked_experts import Slice, unstacked

MODEL_TYPES = {"qwen3_next_gguf": "qwen3_next"}
"""Families whose modules are stored as those of another one."""


class GGUFModules:
    """The configuration of a GGUF file, and the tensors of its MTP modules. Raises `ModelError`."""

    def __init__(self, path: Path):
        self._checkpoint = GGUFCheckpoint(path)
        config = self._checkpoint.config
        family = config["model_type"]
        self.config = {**config, "model_type": MODEL_TYPES.get(family, family)}
        self.tensors = self._checkpoint.modules()
        """By name, the shape and the dtype of the values. Integers are read as float32."""

    def read(self, name: str) -> Tensor:
        """The values of a tensor."""
        with self._checkpoint.open() as read:
            return read(name)


PICKLED = ("*.bin", "*.pt")
"""Files that are read if a directory has no safetensors. Only tensors are taken: no code in them is run."""

NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")
"""Files that trainers leave beside the weights."""


WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that weights may be stored in. All others are quantized weights, which are not read, except ours."""

GROUP = 32
"""Inputs that share a scale, of weights that soothsay has written as int8."""


class DrafterFiles:
    """Names, shapes and values of the tensors in all weight files of a directory.

    A GGUF file gives the tensors of the MTP modules after the model's own layers. A context manager: leaving
    it closes the files. Raises `DrafterError` for a directory, a configuration or a weight file that is not
    there or damaged, and `ModelError` for impossible stacks of experts.
    """

    def __init__(self, path: Path):
        self.path = path
        self._opened = ExitStack()
        self._experts: dict[str, Slice] = {}
        self._mapped: dict[str, Any] = {}  # tensor -> the safetensors file it is in
        self._pickled: dict[str, Tensor] = {}
        self._in_gguf = GGUFModules(path) if is_gguf(path) else None
        if self._in_gguf is not None:
            self.config = self._in_gguf.config
            return
        self.config = _read_config(path)
        files = sorted(path.glob("*.safetensors"))
        for file in files:
            opened = self._open(file)
            self._mapped |= dict.fromkeys(opened.keys(), opened)
        pickled = [] if files else sorted(file for pattern in PICKLED for file in path.glob(pattern))
        for file in pickled:
            if file.name not in NOT_WEIGHTS:
                self._pickled |= _unpickled(file)
        self._experts = unstacked(self.config, self._mapped, self._shapes)
        if not self._mapped and not self._pickled:
            raise DrafterError(f"{path} has a config.json, but no weights in .safetensors, .bin or .pt files")

    def __enter__(self) -> DrafterFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors. Experts that are stacked in one tensor are named one by one."""
        if self._in_gguf is not None:
            return frozenset(self._in_gguf.tensors)
        stacks = {part.stack for part in self._experts.values()}
        scales = {scales_of(name) for name in self._mapped if self._has_scales(name)}
        return frozenset([*(self._mapped.keys() - stacks - scales), *self._pickled, *self._experts])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        if self._in_gguf is not None:
            return self._in_gguf.tensors[name][0]
        if name in self._pickled:
            return tuple(self._pickled[name].shape)
        part = self._experts.get(name)
        if part is not None:
            return part.shape_of(self.shape(part.stack)[1:])
        return tuple(self._mapped[name].get_slice(name).get_shape())

    def _shapes(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        return {name: self.shape(name) for name in names}

    def check_count(self, count: int, what: str) -> None:
        """Raise `DrafterError` if config.json promises more modules than there are tensors.

        `what` is what they are, in the plural.
        """
        if count > len(self.names):
            raise DrafterError(
                f"{self.path / 'config.json'} promises {count:,} {what}, and there are {len(self.names):,} "
                "tensors: the download is incomplete"
            )

    def rows(self, name: str) -> int:
        """First size of a tensor. Raises `DrafterError` for a tensor without sizes."""
        shape = self.shape(name)
        if not shape:
            raise DrafterError(f"{self.path}: {name} is a number and should be a table; it is damaged")
        return shape[0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor. A tensor of a safetensors file is mapped for it, not copied."""
        if self._in_gguf is not None:
            return self._in_gguf.tensors[name][1]
        return self.read(name).dtype

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored. It may be a view of the file."""
        if self._in_gguf is not None:
            return self._in_gguf.read(name)
        if name in self._pickled:
            return self._pickled[name]
        part = self._experts.get(name)
        try:
            if part is not None:
                return part.of(self._mapped[part.stack].get_slice(part.stack)[part.expert])
            tensor: Tensor = self._mapped[name].get_tensor(name)
            if self._has_scales(name):
                scales = scales_of(name)
                return self._scaled(name, tensor, self._mapped[scales].get_tensor(scales))
        except SafetensorError as error:
            raise DrafterError(f"{self.path} does not give {name!r} ({error}); download it again") from error
        return tensor

    def _has_scales(self, name: str) -> bool:
        """Whether a tensor of a safetensors file is int8 as soothsay writes it."""
        there = scales_of(name) in self._mapped
        return there and self._mapped[name].get_slice(name).get_dtype() == "I8"

    def _scaled(self, name: str, integers: Tensor, scales: Tensor) -> Tensor:
        """A matrix in float32, of integers `[out, in]` and scales `[out, in / GROUP]` of their groups."""
        rows, inputs = tuple(integers.shape) if integers.dim() == 2 else (0, 0)
        if not rows or inputs % GROUP or scales.shape != (rows, inputs // GROUP):
            raise DrafterError(
                f"{self.path}: {name} is {list(integers.shape)} with scales {list(scales.shape)}; each "
                f"{GROUP} numbers of a row should have one: it is damaged"
            )
        return (integers.float().view(rows, -1, GROUP) * scales.float()[:, :, None]).view(rows, inputs)

    def _open(self, file: Path) -> Any:
        try:
            return self._opened.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise DrafterError(f"{file} is damaged or cut short ({error}); download it again") from error


def scales_of(name: str) -> str:
    """The name of the scales of a weight that soothsay has written as int8."""
    return f"{name.removesuffix('.weight')}.scales"


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise DrafterError(
            f"no drafter at {path}: give a directory with a config.json and weights; "
            "'hf download OWNER/NAME --local-dir DIRECTORY' fetches one from the Hugging Face hub"
        )
    file = path / "config.json"
    if not file.is_file():
        adapter = (path / "adapter_config.json").is_file()
        what = "holds a LoRA adapter, which is no drafter" if adapter else "has no config.json"
        raise DrafterError(f"{path} {what}: give a drafter's directory")
    try:
        return checked_fields(read_json_object(file), str(file))
    except ModelError as error:
        raise DrafterError(str(error)) from error


def _unpickled(file: Path) -> Mapping[str, Tensor]:
    try:
        return unpickled(file)
    except ModelError as error:
        raise DrafterError(str(error)) from error
