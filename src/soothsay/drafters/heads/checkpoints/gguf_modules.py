"""MTP modules in the GGUF file of their target."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from soothsay.model.formats.gguf_file import GGUFCheckpoint

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
