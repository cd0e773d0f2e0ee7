"""Tensors in PyTorch's pickles.

A pickle is a program: it is read before it is run, and it may make tensors only. PyTorch's own check
(`weights_only`) runs no foreign code, but lets a file of some bytes ask for any amount of memory: by a
storage larger than the file, by bytes that are made and not stored, or by compression.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from soothsay.errors import ModelError, type_of

MAX_PICKLE = 2**21
"""Size limit of the program in a file in bytes. Tensors are beside it; each takes about 150 bytes in it."""

MAX_ENTRIES = 100_000
"""Limit of entries in a file. There is one for each tensor."""

_STORAGES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
ALLOWED = frozenset(
    {
        "collections OrderedDict",
        "torch Size",
        *(f"torch._utils _rebuild_{name}" for name in ("parameter", "tensor", "tensor_v2")),
        *(f"torch {kind}Storage" for kind in _STORAGES.split()),
    }
)
"""What a state dict needs. Most of what PyTorch allows besides makes tensors of any size from nothing."""

NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
"""Operations that make a number."""


class PickledFile:
    """A pickled state dict with the interface of a safetensors file, as far as it is used here.

    The tensors are views of the mapped file. Those of files from before PyTorch 1.6 are in memory.

    Raises `ModelError` as `unpickled` does.
    """

    def __init__(self, file: Path):
        self._tensors = unpickled(file)

    def __enter__(self) -> PickledFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor. Raises `KeyError` if there is none of this name."""
        return self._tensors[name]

    def get_slice(self, name: str) -> PickledSlice:
        """A tensor of which parts are wanted. Raises as `get_tensor`."""
        return PickledSlice(self._tensors[name])


class PickledSlice:
    """A tensor with the interface of a slice of a safetensors file."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_dtype(self) -> str:
        """Its element type, by PyTorch's name."""
        return str(self._tensor.dtype)

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor.shape)

    def __getitem__(self, index: int) -> Tensor:
        """A part along the first dimension."""
        return self._tensor[index]


def unpickled(file: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickled state dict, by name.

    Raises `ModelError` for a file that holds more than tensors, is damaged, or asks for more memory than it
    has bytes.
    """
    try:
        with file.open("rb") as opened:
            zipped = opened.read(4) == b"PK\x03\x04"  # as PyTorch decides
        _check_zip(file) if zipped else _check_old(file)
        content = torch.load(file, map_location="cpu", mmap=zipped, weights_only=True)
    except ModelError:
        raise
    except Exception as error:  # of damaged files, nearly any kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file} is damaged or cut short ({reason}); download it again") from error
    if not isinstance(content, Mapping):
        raise ModelError(f"{file} should hold tensors by name, not {type_of(content)}")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    promised = 0
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ModelError(f"{file}: {name} is larger than what is stored of it; check the file's origin")
        promised += tensor.nbytes
    if promised > 2 * file.stat().st_size:  # two tensors may share what is stored
        raise ModelError(f"{file} makes {promised:,} bytes of tensors; check the file's origin")
    return tensors


def _check_zip(file: Path) -> None:
    """Raise an error unless the entries are stored as they are, and the program makes tensors only."""
    size = file.stat().st_size
    _check_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_ENTRIES:
            raise ModelError(f"{file} has {len(entries):,} entries, and {MAX_ENTRIES:,} is the limit")
        packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
        if packed or sum(entry.file_size for entry in entries) > size:
            raise ModelError(
                f"{file} is compressed, which PyTorch's files are not; save it again with torch.save"
            )
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                _check_size(file, entry.file_size)
                _check_program(file, io.BytesIO(archive.read(entry)), size)


def _check_directory(file: Path, size: int) -> None:
    """Raise an error unless all readers find the same list of entries.

    Readers differ in where they look for the list if it is not right before the records that end the file.
    So the checked program would not be the one that PyTorch runs.
    """
    with file.open("rb") as opened:
        opened.seek(max(size - 98, 0))
        tail = opened.read()
    mark, _, length, begin, comment = struct.unpack("<4s8sLLH", tail[-22:])
    records = size - 22
    if tail[-42:-38] == b"PK\x06\x07":  # 64-bit numbers: a record, and the place of this record, come before
        records = size - 98
        length, begin = struct.unpack("<QQ", tail[40:56])
        if tail[:4] != b"PK\x06\x06" or struct.unpack("<Q", tail[-34:-26]) != (records,):
            begin = -1
    if mark != b"PK\x05\x06" or comment or begin + length != records:
        raise ModelError(f"{file} has more than one list of its entries; save it again with torch.save")


def _check_old(file: Path) -> None:
    """The same for files from before PyTorch 1.6: five pickles, of which the fourth makes the tensors."""
    with file.open("rb") as opened:
        content = io.BytesIO(opened.read(MAX_PICKLE))
    for number in range(5):
        _check_program(file, content, file.stat().st_size if number == 3 else None)


def _check_program(file: Path, program: io.BytesIO, most: int | None) -> None:
    """Raise an error for a name that is not allowed, or a number above `most`.

    Sizes of tensors and storages are numbers in the program, and none can be above the file's size.
    """
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") or opcode.name.startswith("EXT"):
            if opcode.name != "GLOBAL" or argument not in ALLOWED:
                raise ModelError(
                    f"{file} holds more than tensors, and loading it could run anything: it is refused "
                    f"({argument or opcode.name}). Convert it to safetensors where you trust it"
                )
        elif most is not None and isinstance(argument, int) and opcode.name in NUMBERS and argument > most:
            raise ModelError(f"{file} promises {argument:,} values in {most:,} bytes; it is damaged")


def _check_size(file: Path, size: int) -> None:
    if size > MAX_PICKLE:
        raise ModelError(f"{file} has a program of {size:,} bytes, and {MAX_PICKLE:,} is the limit")
