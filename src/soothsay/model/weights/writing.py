"""Writes checkpoints: Hugging Face directories that appear when they are complete."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from soothsay.chat_layout import TEMPLATES
from soothsay.errors import ModelError
from soothsay.model.formats.declared import BESIDE
from soothsay.model.weights.checkpoint import Checkpoint
from soothsay.model.weights.generation_config import FILE as GENERATION_CONFIG
from soothsay.tokenizer import Tokenizer

SHARD_BYTES = 10**9
"""Maximum size of a file in bytes, unless a single tensor is larger."""

COPIED = ("*.json", "*.jinja", f"{TEMPLATES}/*.jinja", "*.model", "*.spm", "*.txt", "LICENSE*", "NOTICE*")
"""Files copied from the source: tokenizer, chat template, generation settings, licence."""


class CheckpointWriter:
    """Writes tensors to files of similar size with an index, and the files that belong to a checkpoint."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.total = 0
        """Size of all tensors in bytes."""
        self._files: list[list[str]] = []  # names of the tensors in each
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0  # of the waiting tensors

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors. They stay in memory until their file is full."""
        for name, tensor in tensors.items():
            if self._waiting and self._bytes + tensor.nbytes > SHARD_BYTES:
                self._write()
            self._waiting[name] = tensor
            self._bytes += tensor.nbytes

    def finish(self, source: Checkpoint, config: Mapping[str, Any]) -> None:
        """Write the waiting tensors, the files copied from `source`, and config.json.

        If `source` is one file, the tokenizer in it gets files of its own.
        """
        self._write()
        count = len(self._files)
        files: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            self._file(number).rename(self.directory / file)
            files |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": files}
            write_settings(self.directory / "model.safetensors.index.json", index)
        for pattern in COPIED:
            for path in source.path.glob(pattern):
                if path.is_file() and not path.name.endswith((".index.json", *BESIDE)):
                    copy = self.directory / path.relative_to(source.path)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
        tokenizer = source.tokenizer() if source.path.is_file() else None
        if tokenizer is not None:
            write_tokenizer(self.directory, tokenizer, source.eos_ids)
        write_settings(self.directory / "config.json", config)

    def _write(self) -> None:
        self._files.append(list(self._waiting))
        save_file(self._waiting, self._file(len(self._files)), metadata={"format": "pt"})
        self.total += self._bytes
        self._waiting, self._bytes = {}, 0

    def _file(self, number: int) -> Path:
        return self.directory / f"{number}.safetensors"


def require_free(out: Path) -> None:
    """Raises `ModelError` unless `out` is an empty directory or does not exist."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty directory; name another one")


@contextmanager
def writing(out: Path, size: int = 0) -> Iterator[CheckpointWriter]:
    """A writer of a checkpoint, which appears at `out` when it is complete. After an error nothing remains.

    Raises `ModelError` if `out` is in use, or if its disk has less than `size` bytes free.
    """
    require_free(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise ModelError(f"{out} takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of disk are left")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        directory = Path(temporary, out.name)
        directory.mkdir()
        yield CheckpointWriter(directory)
        directory.rename(out)  # which may be an empty directory


def write_tokenizer(directory: Path, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
    """Write what `Tokenizer.from_directory` reads, and the tokens that end an answer.

    The files are tokenizer.json, tokenizer_config.json with the chat templates and the special tokens, and
    generation_config.json.
    """
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    if set(tokenizer.templates) == {"default"}:
        settings["chat_template"] = tokenizer.templates["default"]
    elif tokenizer.templates:
        settings["chat_template"] = [
            {"name": name, "template": source} for name, source in tokenizer.templates.items()
        ]
    write_settings(directory / "tokenizer_config.json", settings)
    if eos_ids:
        write_settings(directory / GENERATION_CONFIG, {"eos_token_id": list(eos_ids)})


def write_settings(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of a checkpoint in JSON, as people read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
