"""Places of tensors in GGUF files, and how to turn each into the tensor that Hugging Face stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_blocks import DECODERS, BlockRows
from soothsay.model.quantized import dequantized

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Change = Callable[[Tensor], Tensor]
Files = Callable[[Path], npt.NDArray[np.uint8]]
"""From a path to the bytes of the file."""


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of the file. Copy on write, since torch warns about read-only memory."""
    return np.memmap(path, dtype=np.uint8, mode="c")


@dataclass(frozen=True)
class Stored:
    """A tensor's place in a file, and its differences from the tensor that Hugging Face stores."""

    kind: str  # GGML's name of the element type
    shape: tuple[int, ...]  # [out, in]
    offset: int  # bytes
    size: int  # bytes
    path: Path
    heads: int = 0  # number of heads whose rows are interleaved for llama.cpp's rotation; 0: none
    centred: bool = False  # a norm's weight w, stored as 1 + w
    change: Change | None = None  # from the stored numbers to those of Hugging Face

    @property
    def parts(self) -> tuple[Stored, ...]:
        """The tensors of the file that make this one."""
        return (self,)

    def expert(self, index: int) -> Stored:
        """One matrix of a stack `[E, out, in]`, or one vector."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, size=size)

    def halves(self) -> tuple[Stored, Stored]:
        """The upper and the lower rows of a matrix."""
        rows, size = self.shape[0] // 2, self.size // 2
        upper = replace(self, shape=(rows, *self.shape[1:]), size=size)
        return upper, replace(upper, offset=self.offset + size)

    def shape_read(self) -> tuple[int, ...]:
        """The shape of what `read` returns."""
        return self.shape if self.change is None else tuple(self.read(map_file).shape)

    def read(self, files: Files) -> Tensor:
        """The tensor: a view of the file where possible."""
        if self.kind in DECODERS:
            tensor = dequantized(self.blocks(files), torch.float32).view(self.shape)
        else:
            data = files(self.path)[self.offset : self.offset + self.size]
            tensor = torch.from_numpy(data).view(DTYPES[self.kind]).view(self.shape)
            if self.heads:  # rows (head, d/2, 2) -> (head, 2, d/2)
                tensor = tensor.view(self.heads, -1, 2, *self.shape[1:]).transpose(1, 2).reshape(self.shape)
        tensor = tensor if self.change is None else self.change(tensor)
        return tensor.float() - 1 if self.centred else tensor

    def blocks(self, files: Files) -> BlockRows:
        """The tensor in integers."""
        rows = math.prod(self.shape[:-1])
        data = files(self.path)[self.offset : self.offset + self.size].reshape(rows, -1)
        return BlockRows(self.kind, torch.Size((rows, self.shape[-1])), data, self.heads)


@dataclass(frozen=True)
class KeysAndValues:
    """The matrix that makes keys and values of latent states, `[H * (plain + value), rank]`, head by head.

    llama.cpp's converter cuts it into one tensor for keys, transposed, and one for values. Blocks of integers
    run along different dimensions in the two, so the whole is floats.
    """

    keys: Stored  # [H, rank, plain]
    values: Stored  # [H, value, rank]

    @property
    def kind(self) -> str:
        """GGML's name of the type of the elements that `read` returns."""
        return self.keys.kind if self.keys.kind == self.values.kind in DTYPES else "F32"

    @property
    def parts(self) -> tuple[Stored, ...]:
        """See `Stored`."""
        return self.keys, self.values

    def shape_read(self) -> tuple[int, ...]:
        """See `Stored`."""
        heads, rank, plain = self.keys.shape
        return heads * (plain + self.values.shape[1]), rank

    def read(self, files: Files) -> Tensor:
        """The matrix, a copy."""
        keys, values = self.keys.read(files).transpose(1, 2), self.values.read(files)
        return torch.cat([keys, values], 1).flatten(0, 1).to(DTYPES[self.kind])


def _log_rates(rates: Tensor) -> Tensor:
    """A from the stored -e^A. Raises `ModelError` for rates at which a state would grow."""
    if not bool((rates < 0).all()):
        raise ModelError("a tensor ssm_a has rates that are not below 0; the file is damaged")
    return (-rates.float()).log()


# by part of a block, from the stored numbers to those of Hugging Face
QWEN3_5_CHANGES: Mapping[str, Change] = {
    "ssm_a": _log_rates,
    "ssm_conv1d": lambda taps: taps[:, None],
    "ffn_gate_inp_shexp": lambda gate: gate.reshape(1, -1),
}
MAMBA2_CHANGES: Mapping[str, Change] = {
    "ssm_a": lambda rates: _log_rates(rates).flatten(),
    "ssm_d": lambda skips: skips.flatten(),
    "ssm_norm": lambda scale: scale.flatten(),
    "ssm_conv1d": lambda stored: stored[:, None] if stored.ndim == 2 else stored,  # or the bias
}
LFM2_CHANGES: Mapping[str, Change] = {"shortconv.conv": lambda taps: taps[:, None]}
