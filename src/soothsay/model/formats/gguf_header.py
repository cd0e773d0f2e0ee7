"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

The header states counts and lengths. None is believed before it is compared with the bytes that are left, so
time and memory are bounded by the size of the file, and by the limits below.

The layout: magic, version, number of tensors, number of metadata entries; the entries;
the tensors' names, shapes, types and offsets; the tensors.

A file may be in several parts, as llama.cpp's `llama-gguf-split` writes them: `NAME-00001-of-00003.gguf` and
so on, in one folder. Each has a header with its own tensors. Only the first has the metadata of the model.
"""

import math
import mmap
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_names import MAX_PARTS, part_names

AnyType = TypeVar("AnyType", bound=IntEnum)

VERSIONS = (2, 3)

MAX_VALUES = 4_000_000
"""Limit of values in all arrays of the metadata. A vocabulary of 260,000 tokens takes 1.3 million."""

MAX_ENTRIES = 100_000
"""Limit of metadata entries. Files have about 40."""

MAX_TENSORS = 200_000
"""Limit of tensors, experts counted one by one. A model of 61 layers with 256 experts has 48,000."""

MAX_NAME = 4096
"""Limit of a key or a tensor's name in bytes. Their writers stop at 64."""

MAX_DIMENSIONS = 4

MAX_NAMED = 10
"""Limit of missing parts that a message names."""

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
"""struct's letters, which are numpy's too."""

_LENGTH = struct.Struct("=Q")
"""The length of a text, before it."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is."""

    kind: str  # GGML's name of the element type
    shape: tuple[int, ...]  # [out, in]: the file has the sizes in the other order
    offset: int  # bytes from the start of the file
    size: int  # bytes
    path: Path


@dataclass(frozen=True)
class GGUFHeader:
    """The content of a header, or of those of all parts of a model."""

    files: tuple[Path, ...]  # in order
    metadata: dict[str, Any]
    """The first part's: numbers, truth values, texts, lists of texts, and arrays of numbers, by key."""

    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises `ModelError`, which names the file and the part, if the file is missing or no GGUF file, or if its
    header does not fit the rest of the file.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing; check the path, or download the file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(
                    f"{path} is not a GGUF file (it starts with {magic!r}); give a GGUF or a model directory"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Walk(path, content).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error})") from error


class _Walk:
    """A place in the file, which moves on as values are read."""

    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at, self.size = path, content, 4, len(content)
        self.values = 0  # of all arrays so far

    def header(self) -> GGUFHeader:
        version: int = self._number("I", "the version")
        if not version & 0xFFFF:
            raise ModelError(
                f"{self.path} is written for a machine of the other byte order; convert the model again here"
            )
        if version not in VERSIONS:
            raise self._damaged(f"it is of version {version}, and versions 2 and 3 are known")
        tensors = self._count("the number of tensors", 24, MAX_TENSORS)
        entries = self._count("the number of metadata entries", 13, MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text("a metadata key", MAX_NAME)
            if key in metadata:
                raise self._damaged(f"metadata {key!r} is there twice")
            metadata[key] = self._value(f"metadata {key!r}")
        return GGUFHeader((self.path,), metadata, self._tensors(tensors, metadata))

    def _value(self, what: str) -> Any:
        kind = self._kind(what)
        if kind == GGUFValueType.STRING:
            return self._text(what)
        return self._array(what) if kind == GGUFValueType.ARRAY else self._number(_SCALARS[kind], what)

    def _array(self, what: str) -> list[str] | npt.NDArray[Any]:
        kind = self._kind(what)
        if kind == GGUFValueType.ARRAY:
            raise self._damaged(f"{what} is an array of arrays, which no model needs")
        least = 8 if kind == GGUFValueType.STRING else struct.calcsize(_SCALARS[kind])
        count = self._count(f"the length of {what}", least, MAX_VALUES - self.values)
        self.values += count
        if kind == GGUFValueType.STRING:
            return self._texts(count, what)
        return np.frombuffer(self._bytes(count * least, what), dtype=_SCALARS[kind])

    def _texts(self, count: int, what: str) -> list[str]:
        """Texts, each after its length. A vocabulary has 500,000 of them, so the loop does the least."""
        content, at, size, texts = self.content, self.at, self.size, []
        try:
            for _ in range(count):
                start = at + 8
                at = start + _LENGTH.unpack_from(content, at)[0]
                if at > size:
                    raise self._damaged(f"it ends within {what}")
                texts.append(str(content[start:at], "utf-8"))
        except struct.error:
            raise self._damaged(f"it ends within {what}") from None
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8 ({error.reason})") from None
        self.at = at
        return texts

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, TensorPlace]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}, and not a power of two")
        found: dict[str, TensorPlace] = {}
        for _ in range(count):
            name = self._text("a tensor's name", MAX_NAME)
            if name in found:
                raise self._damaged(f"tensor {name!r} is there twice")
            found[name] = self._tensor(f"tensor {name!r}")
        start = -(-self.at // alignment) * alignment
        found = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in found.items()}
        end = start  # of the tensor before
        for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
            if tensor.offset % alignment:
                raise self._damaged(
                    f"tensor {name!r} begins at {tensor.offset:,}, no multiple of {alignment}"
                )
            if tensor.offset < end:
                raise self._damaged(f"tensor {name!r} overlaps another")
            end = tensor.offset + tensor.size
            if end > self.size:
                raise self._damaged(f"tensor {name!r} ends at byte {end:,}, beyond the file")
        return found

    def _tensor(self, what: str) -> TensorPlace:
        """A tensor's entry. The offset counts from the first tensor."""
        dimensions: int = self._number("I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"{what} has {dimensions} dimensions, and 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(self._number("Q", what) for _ in range(dimensions))[::-1]
        number, offset = self._number("I", what), self._number("Q", what)
        kind = self._type(GGMLQuantizationType, number, what)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._damaged(f"{what} of type {kind.name} has shape {list(shape)}, which is not possible")
        return TensorPlace(kind.name, shape, offset, math.prod(shape) // block * block_bytes, self.path)

    def _type(self, types: type[AnyType], number: int, what: str) -> AnyType:
        try:
            return types(number)
        except ValueError:
            raise self._damaged(f"{what} is of type {number}, which is not known") from None

    def _kind(self, what: str) -> GGUFValueType:
        return self._type(GGUFValueType, self._number("I", what), what)

    def _count(self, what: str, least: int, limit: int) -> int:
        """A count of things of at least `least` bytes each."""
        count: int = self._number("Q", what)
        if count * least > self.size - self.at:
            raise self._damaged(f"{what} is {count:,}, and only {self.size - self.at:,} bytes follow")
        if count > limit:
            raise self._damaged(f"{what} is {count:,}, beyond the limit of {limit:,}")
        return count

    def _text(self, what: str, limit: int | None = None) -> str:
        length = self._count(f"the length of {what}", 1, self.size if limit is None else limit)
        try:
            return str(self._bytes(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not UTF-8 ({error.reason})") from None

    def _number(self, letter: str, what: str) -> Any:
        size = struct.calcsize(f"={letter}")
        return struct.unpack(f"={letter}", self._bytes(size, what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self._damaged(f"it ends within {what}")
        self.at += count
        return self.content[self.at - count : self.at]

    def _damaged(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path} is damaged or cut short (at byte {self.at:,}: {why}); download it again"
        )


def read_parts(path: Path) -> GGUFHeader:
    """Read the headers of a GGUF file, or of all parts if it is one of them.

    Raises `ModelError`, which names the file, if a part is missing, damaged, or belongs to another model.
    """
    header = read_header(path)
    number, count = _place(path, header)
    if count == 1:
        return header
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
    return GGUFHeader(files, headers[0].metadata, tensors)


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
