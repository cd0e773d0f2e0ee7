"""A drafter's directory: config.json and tensors, in safetensors or in PyTorch's pickles. Or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from soothsay.errors import DrafterError, ModelError
from soothsay.files import read_json_object
from soothsay.model.families.fields import checked_fields
from soothsay.model.formats.gguf_file import GGUFCheckpoint
from soothsay.model.formats.gguf_names import is_gguf
from soothsay.model.formats.stacked_experts import Slice, unstacked
from soothsay.model.weights.checkpoint import open_weights

MODEL_TYPES = {"qwen3_next_gguf": "qwen3_next"}
"""Families whose modules are stored as those of another one."""


PICKLED = ("*.bin", "*.pt")
"""Files that are read if a directory has no safetensors. Only tensors are taken: no code in them is run."""

NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")
"""Files that trainers leave beside the weights."""


WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that weights may be stored in. All others are quantized weights, which are not read, except ours."""

GROUP = 32
"""Inputs that share a scale, of weights that soothsay has written in integers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns it as it is stored. It may be a view of the file."""
    kind: torch.dtype | None = None  # None: that of what is read, which is not copied for it
    bits: int | None = None  # of the integers that soothsay wrote; None: it is plain


class DrafterFiles:
    """Names, shapes and values of the tensors in all weight files of a directory.

    A GGUF file gives the tensors of the MTP modules after the model's own layers. A context manager: leaving
    it closes the files. Raises `DrafterError` for a directory, a configuration or a weight file that is not
    there or damaged, and `ModelError` for impossible stacks of experts.
    """

    def __init__(self, path: Path):
        self.path, self._opened = path, ExitStack()
        if is_gguf(path):
            checkpoint = GGUFCheckpoint(path)
            family = checkpoint.config["model_type"]
            self.config = {**checkpoint.config, "model_type": MODEL_TYPES.get(family, family)}
            self._tensors = _in_gguf(checkpoint)
            return
        self.config = _read_config(path)
        pickled = (file for pattern in PICKLED for file in path.glob(pattern))
        weights = [*path.glob("*.safetensors")] or [one for one in pickled if one.name not in NOT_WEIGHTS]
        self._tensors = _in_files(self.config, [self._open(file) for file in sorted(weights)])
        if not self._tensors:
            raise DrafterError(f"{path} has a config.json, but no weights in .safetensors, .bin or .pt files")

    def __enter__(self) -> DrafterFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors. Experts that are stacked in one tensor are named one by one."""
        return frozenset(self._tensors)

    @property
    def bits(self) -> int | None:
        """Bits of the integers that soothsay wrote; None: there are none."""
        return min((one.bits for one in self._tensors.values() if one.bits is not None), default=None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._tensors[name].shape

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
        return self._tensors[name].kind or self.read(name).dtype

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored. It may be a view of the file."""
        try:
            return self._tensors[name].read()
        except SafetensorError as error:
            raise DrafterError(f"{self.path} does not give {name!r} ({error}); download it again") from error
        except DrafterError as error:
            raise DrafterError(f"{self.path}: {name} {error}") from None

    def _open(self, file: Path) -> Any:
        try:
            return self._opened.enter_context(open_weights(file))
        except ModelError as error:
            raise DrafterError(str(error)) from error


def _in_gguf(checkpoint: GGUFCheckpoint) -> dict[str, StoredTensor]:
    """The tensors of MTP modules. Integers are read as float32."""

    def read(name: str) -> Tensor:
        with checkpoint.open() as opened:
            return opened(name)

    return {
        name: StoredTensor(own[0], partial(read, name), own[1]) for name, own in checkpoint.modules().items()
    }


def _in_files(config: Mapping[str, Any], files: Sequence[Any]) -> dict[str, StoredTensor]:
    """The tensors of opened files: plain ones, parts of stacked experts, and integers that we wrote."""
    mapped = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def shape(name: str) -> tuple[int, ...]:
        return tuple(mapped[name].get_slice(name).get_shape())

    def part_of(part: Slice) -> Tensor:
        return part.of(mapped[part.stack].get_slice(part.stack)[part.expert])

    def plain(name: str) -> Tensor:
        tensor: Tensor = mapped[name].get_tensor(name)
        return tensor

    def scaled(name: str, scales: str) -> Tensor:
        return _scaled(_whole(plain(name)), plain(scales))

    experts = unstacked(config, mapped, lambda names: {name: shape(name) for name in names})
    found = {n: StoredTensor(p.shape_of(shape(p.stack)), partial(part_of, p)) for n, p in experts.items()}
    left_out = {part.stack for part in experts.values()}
    for name, file in mapped.items():
        read, scales = partial(plain, name), scales_of(name)
        size, bits = shape(name), None
        if scales in mapped and (kind := file.get_slice(name).get_dtype()) in ("I8", "U8"):
            left_out.add(scales)
            read = partial(scaled, name, scales)
            bits = 8 if kind == "I8" else 4
            size = (*size[:-1], size[-1] * 8 // bits)
        found.setdefault(name, StoredTensor(size, read, bits=bits))
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def _whole(integers: Tensor) -> Tensor:
    """Integers of 8 bits as they are, those of 4 bits from the bytes that have two of them."""
    if integers.dtype == torch.int8:
        return integers
    return torch.stack([integers & 15, integers >> 4], -1).flatten(-2).to(torch.int8) - 8


def _scaled(integers: Tensor, scales: Tensor) -> Tensor:
    """A matrix in float32, of integers `[out, in]` and scales `[out, in / GROUP]` of their groups."""
    rows, inputs = tuple(integers.shape) if integers.dim() == 2 else (0, 0)
    if not rows or inputs % GROUP or scales.shape != (rows, inputs // GROUP):
        raise DrafterError(
            f"is {list(integers.shape)} with scales {list(scales.shape)}; each {GROUP} numbers of a row "
            "should have one: it is damaged"
        )
    return (integers.float().view(rows, -1, GROUP) * scales.float()[:, :, None]).view(rows, inputs)


def scales_of(name: str) -> str:
    """The name of the scales of a weight that soothsay has written in integers."""
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
