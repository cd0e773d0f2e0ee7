"""A GGUF file in several parts, as llama.cpp's `llama-gguf-split` writes them.

The parts are `NAME-00001-of-00003.gguf` and so on, in one folder. Each has a header with its own tensors.
Only the first has the metadata of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_header import MAX_TENSORS, GGUFHeader, TensorPlace, read_header
from soothsay.model.formats.gguf_names import MAX_PARTS, part_names

MAX_NAMED = 10
"""Limit of missing parts that a message names."""


class GGUFParts(NamedTuple):
    """A model, whether it is in one file or in parts."""

    files: tuple[Path, ...]
    """In order."""

    metadata: dict[str, Any]
    """That of the first part; see `GGUFHeader`."""

    tensors: dict[str, TensorPlace]
    """The tensors of all parts, by name."""


def read_parts(path: Path) -> GGUFParts:
    """Read the headers of a GGUF file, or of all parts if it is one of them.

    Raises `ModelError`, which names the file, if a part is missing, damaged, or belongs to another model.
    """
    header = read_header(path)
    number, count = _place(path, header)
    if count == 1:
        return GGUFParts((path,), header.metadata, header.tensors)
    files = _files(path, number, count)
    headers = [header if file == path else read_header(file) for file in files]
    tensors: dict[str, TensorPlace] = {}
    for i, (file, part) in enumerate(zip(files, headers, strict=True)):
        if (place := _place(file, part)) != (i, count):
            raise _foreign(file, f"its header says that it is part {place[0] + 1} of {place[1]}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise _foreign(file, f"it has tensor {twice[0]!r}, as {tensors[twice[0]].path.name} has")
        if len(tensors) + len(part.tensors) > MAX_TENSORS:
            raise ModelError(f"{path} and its other parts have more than {MAX_TENSORS:,} tensors")
        tensors |= part.tensors
    for file, part in zip(files, headers, strict=True):
        stated = _number(file, part, "split.tensors.count")
        if stated != len(tensors):
            raise _foreign(file, f"its model has {stated:,} tensors, and the parts have {len(tensors):,}")
    return GGUFParts(files, headers[0].metadata, tensors)


def _files(path: Path, number: int, count: int) -> tuple[Path, ...]:
    """All parts, of which `path` is one. Raises `ModelError` if some are missing."""
    files = tuple(path.with_name(name) for name in part_names(path.name))
    if len(files) != count or files[number] != path:
        raise ModelError(
            f"{path} is part {number + 1} of {count}, so its name should end with "
            f"-{number + 1:05d}-of-{count:05d}.gguf; give all parts the names that they were published with"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise ModelError(
            f"{path} is one of {count} parts; download these to the same folder too: "
            f"{', '.join(missing[:MAX_NAMED])}{more}"
        )
    return files


def _place(file: Path, header: GGUFHeader) -> tuple[int, int]:
    """Which part a file is, from 0, and the number of parts. Raises `ModelError` if that is not possible."""
    count = max(_number(file, header, "split.count"), 1)  # 0, too, means that the file is whole
    number = _number(file, header, "split.no")
    if number >= count or count > MAX_PARTS:
        raise ModelError(
            f"{file} is part {number + 1:,} of {count:,} by its header; {MAX_PARTS:,} parts are the limit; "
            "the file is damaged"
        )
    return number, count


def _number(file: Path, header: GGUFHeader, key: str) -> int:
    """A number in the metadata, 0 without it. Raises `ModelError` for another value."""
    value = header.metadata.get(key, 0)
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"{file}: {key} is {value!r:.80} and should be a number; the file is damaged")
    return value


def _foreign(file: Path, why: str) -> ModelError:
    return ModelError(f"{file} belongs to another model than the parts beside it: {why}; download it again")
