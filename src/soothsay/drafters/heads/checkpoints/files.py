"""A drafter's directory: config.json and tensors, in safetensors or in PyTorch's pickles."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from soothsay.errors import DrafterError

PICKLED = ("*.bin", "*.pt")
"""Files that are read if a directory has no safetensors. Only tensors are taken: no code in them is run."""

NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")
"""Files that trainers leave beside the weights."""


WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that weights may be stored in. All others are quantized weights, which are not read."""


class DrafterFiles:
    """Names, shapes and values of the tensors in all weight files of a directory.

    A context manager: leaving it closes the files. Raises `DrafterError` for a directory, a configuration or
    a weight file that is not there or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = _read_config(path)
        self._opened = ExitStack()
        self._mapped: dict[str, Any] = {}  # tensor -> the safetensors file it is in
        self._pickled: dict[str, Tensor] = {}
        files = sorted(path.glob("*.safetensors"))
        for file in files:
            opened = self._open(file)
            self._mapped |= dict.fromkeys(opened.keys(), opened)
        pickled = [] if files else sorted(file for pattern in PICKLED for file in path.glob(pattern))
        for file in pickled:
            if file.name not in NOT_WEIGHTS:
                self._pickled |= _unpickled(file)
        if not self._mapped and not self._pickled:
            raise DrafterError(f"{path} has a config.json, but no weights in .safetensors, .bin or .pt files")

    def __enter__(self) -> DrafterFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset([*self._mapped, *self._pickled])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        if name in self._pickled:
            return tuple(self._pickled[name].shape)
        return tuple(self._mapped[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor. A tensor of a safetensors file is mapped for it, not copied."""
        return self.read(name).dtype

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored. It may be a view of the file."""
        if name in self._pickled:
            return self._pickled[name]
        tensor: Tensor = self._mapped[name].get_tensor(name)
        return tensor

    def _open(self, file: Path) -> Any:
        try:
            return self._opened.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise DrafterError(f"{file} is damaged or cut short ({error}); download it again") from error


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
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DrafterError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise DrafterError(f"{file} should hold a JSON object, not a {type(config).__name__}")
    return config


def _unpickled(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickled state dict. A file that holds code to run is refused."""
    try:
        content = torch.load(file, map_location="cpu", mmap=_is_zip(file), weights_only=True)
    except pickle.UnpicklingError as error:
        raise DrafterError(
            f"{file} holds more than tensors, and loading it could run anything: it is refused. Convert it "
            "to safetensors where you trust it"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DrafterError(f"{file} is damaged or cut short ({reason}); download it again") from error
    if not isinstance(content, Mapping):
        raise DrafterError(f"{file} should hold tensors by name, not a {type(content).__name__}")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _is_zip(file: Path) -> bool:
    """Whether PyTorch can map the file. Files from before PyTorch 1.6 have a format that it cannot map."""
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"
