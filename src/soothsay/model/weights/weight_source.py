"""Reads the weights of a model from a checkpoint, module by module, and finds those that nothing reads."""

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn

from soothsay.errors import ModelError
from soothsay.model.formats.weight_format import WeightFormat
from soothsay.model.ops.kernels import Kernels
from soothsay.model.weights.numeric_mode import NumericMode
from soothsay.model.weights.quantized import (
    Integers,
    QuantizedRows,
    QuantizedTable,
    Reordered,
    dequantized,
    joined,
)
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.own_process import return_freed_memory

MAPPED = 2**25
"""Number of bytes that are read from a checkpoint before its files are mapped anew, which frees memory."""

CONVOLVED_IN_MLX = ("mamba", "falcon_mamba", "mamba2", "jamba", "lfm2")
"""Families of which MLX changes no number: convolutions are stored as `[channels, taps, 1]`."""


class WeightSource:
    """Reads the tensors of a module, checks their shapes and converts them. A context manager.

    The parts of a model read their weights from it: it is a `StoredWeights`.

    Args:
        names: of the checkpoint's tensors.
        mode: in which the model computes.
        kernels: make linear layers.
        kv_dtype: of the model's KV pool.
        chosen: the rows that are read of the weights of some linear layers, by name: `[n]` int64; None: all.
        device: where plain weights of linear layers are brought, so that kernels see where they will be.

    Attributes:
        used: names of the tensors that were read.
    """

    def __init__(
        self,
        names: TensorNames,
        mode: NumericMode,
        kernels: Kernels,
        kv_dtype: torch.dtype,
        chosen: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
    ):
        self.names, self.mode, self.chosen, self._device = names, mode, chosen or {}, device
        self._kernels, self.kv_dtype = kernels, kv_dtype
        self.zero_centred_norms = names.spec.zero_centred_norms
        self.rounds_scale = names.spec.embedding.scale_rounded
        self._opened = ExitStack()
        self.used = set[str]()
        self._mapped = 0  # bytes read since the files were mapped

    def __enter__(self) -> Self:
        self._reader = self._opened.enter_context(self.names.checkpoint.open())
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        return_freed_memory()

    def read(self, name: str) -> Tensor:
        """A tensor of the checkpoint."""
        tensor = self._reader(name)
        self.used.add(name)
        self._mapped += tensor.nbytes
        return tensor

    def release(self) -> None:
        """Map the files anew after `MAPPED` bytes, which frees memory."""
        if self._mapped > MAPPED:
            self.__exit__()
            self.__enter__()
            self._mapped = 0

    def tensor(self, module: str, suffix: str, expected: Tensor) -> Tensor:
        """A plain tensor of a module, with its rows in our order and in the shape of `expected`."""
        names = self.names.require(module, suffix)
        parts = [self._floats(name) for name in names]
        first = parts[0]  # ERNIE and Kimi Linear store dimensions of one before the others
        if first.shape[:1] == (1,) and first.squeeze().shape == expected.squeeze().shape:
            parts = [first.reshape(expected.shape)]
        if expected.ndim == 3 and first.shape == expected.mT.shape:
            if self.names.spec.family not in CONVOLVED_IN_MLX:
                raise ModelError(
                    f"{self.names.checkpoint.path} was converted for MLX, which also changes other weights "
                    f"of {self.names.spec.family}; take the model that was converted"
                )
            parts = [part.mT for part in parts]
        self._check(names, parts, expected)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = self.chosen.get(module, self.names.row_order(module))
        return whole if order is None else whole[order]

    def _floats(self, name: str) -> Tensor:
        """A tensor, dequantized if it is a table in integers that is to be plain."""
        tensor, module = self.read(name), name.removesuffix(".weight")
        if tensor.is_floating_point() or (held := self.mode.format_of(self.names.all, module)) is None:
            return tensor
        part = self._part(module, held)
        return part if isinstance(part, Tensor) else dequantized(part, self.mode.dtype)

    def weight(self, module: str, expected: Tensor) -> Tensor | Integers:
        """The weight of a linear layer. Parts that are stored in different ways stay so."""
        names = self.names.of(module)
        held = [self.mode.format_of(self.names.all, name) for name in names]
        parts = [self._part(name, own) for name, own in zip(names, held, strict=True)]
        labels = [name if own else f"{name}.weight" for name, own in zip(names, held, strict=True)]
        self._check(labels, parts, expected)
        orders = self._orders(module, parts)
        if orders is not None:
            parts = [
                part[order] if isinstance(part, Tensor) else Reordered(part, order)
                for part, order in zip(parts, orders, strict=True)
            ]
        return joined([self.mode.convert(module, *part) for part in zip(parts, held, strict=True)])

    def plain(self, module: str, expected: Tensor) -> Tensor:
        """See `StoredWeights`."""
        return dequantized(self.weight(module, expected), self.mode.dtype).to(self._device)

    def linear(self, module: str, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See `StoredWeights`."""
        stored, kept = self.weight(module, weight), torch.float32
        if isinstance(stored, Tensor):
            stored, kept = stored.to(self._device), self.mode.dtype
        added = None if bias is None else self.tensor(module, "bias", bias).to(kept)
        return self._kernels.linear(stored, added, self.mode.output(module, self.kv_dtype))

    def _part(self, part: str, held: WeightFormat | None) -> QuantizedRows | Tensor:
        """A weight, `held` in a format or plain. Raises `ModelError` if its tensors do not make one."""
        if held is None:
            self.names.check(f"{part}.weight")
            return self.read(f"{part}.weight")
        for name in held.tensors(part):
            self.names.check(name)
            self.used.add(name)
        try:
            return held.read(self.read, part)
        except ModelError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # of torch, for odd shapes, dtypes
            raise ModelError(
                f"{self.names.checkpoint.path}: {part}: the tensors do not make a weight of {held.name} "
                f"({error}); the file is damaged, or config.json belongs to another model"
            ) from error

    def _orders(self, module: str, parts: Sequence[Tensor | QuantizedRows]) -> list[Tensor] | None:
        """For each part of a module, the order of its rows; None if they stay in order."""
        if module in self.chosen:
            return [self.chosen[module]]
        order = self.names.row_order(module)
        if order is None:
            return None
        sizes = [part.shape[0] for part in parts]
        firsts = list(accumulate(sizes, initial=0))
        orders = [order[first : first + size] - first for first, size in zip(firsts, sizes, strict=False)]
        if any(own.min() < 0 or own.max() >= size for own, size in zip(orders, sizes, strict=True)):
            raise ModelError(
                f"{self.names.checkpoint.path}: {', '.join(self.names.of(module))} have {sizes} rows, which "
                "do not end with a head; the file is damaged, or config.json belongs to another model"
            )
        return orders

    def blocks(self, module: str) -> QuantizedTable | None:
        """The rows of a table in integers, if they stay so."""
        (name,) = self.names.of(module)
        held = self.mode.format_of(self.names.all, name)
        if held is None or not self.mode.keeps_integers:
            return None
        rows = self._part(name, held)
        return rows if isinstance(rows, QuantizedTable) else None

    def _check(self, names: list[str], parts: Sequence[Tensor | QuantizedRows], expected: Tensor) -> None:
        if wrong := misfit(names, [tuple(part.shape) for part in parts], expected):
            raise ModelError(f"{self.names.checkpoint.path}: {wrong}")
        for name, part in zip(names, parts, strict=True):
            if isinstance(part, Tensor) and (not part.is_floating_point() or part.dtype.itemsize < 2):
                raise ModelError(
                    f"{self.names.checkpoint.path}: {name} is stored as {part.dtype}, which config.json does "
                    "not declare in a quantization_config; take another version of this model"
                )


def misfit(names: Sequence[str], shapes: Sequence[tuple[int, ...]], expected: Tensor) -> str:
    """What is wrong with tensors of these shapes that together should make `expected`; "": nothing."""
    rows, rest = sum(sum(shape[:1]) for shape in shapes), {shape[1:] for shape in shapes}
    if rows == sum(expected.shape[:1]) and rest == {tuple(expected.shape[1:])}:
        return ""
    held = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
    together = " together" if len(names) > 1 else ""
    return f"{held}: by config.json it should be {list(expected.shape)}{together}"


MEANINGLESS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.(masked_)?bias|[kvq]_(scale|zero_point)|"
    r"[a-z]+put_(scale|zero_point|global_scale)|(weight_)?g_idx|qzeros|weight_(zero_point|shape|format)|"
    r"nbits|group_size|axis|packing|unpack_view_dtype|view_as_float|quant_(scale|zero)|compute_dtype|"
    r"offload_meta|encoded_state_dict|stores_quant_config|channel_wise|optimize|round_zero|"  # of HQQ
    r"EncDecAttention\.relative_attention_bias\.weight|indexer\.[a-z_]+\.(weight|bias)"
)
"""Ends of names of tensors that repeat the configuration, or serve what is not used here: number formats, and
DeepSeek-V3.2's choice of keys, which begins where its contexts end here.

Formats of integers store zero points and the order of groups in symmetric and ordered files, too."""

KEYS = re.compile(r"(self_attn\.|attn_)[kv]_(proj|norm)")
"""Tensors of keys and values, which published files also have in layers that read those of other layers."""

MAX_NAMES = 4
"""Limit of names in a warning."""


def warn_of_unused(names: TensorNames, used: Collection[str], layers: range) -> None:
    """Warn of tensors in the model's blocks that were not read: a bias or a norm that config.json denies.

    Tensors beside the blocks (of images, of drafters, of a head that is shared) are not needed.

    Args:
        names: of the checkpoint's tensors.
        used: the names of those that were read.
        layers: the numbers of the blocks.
    """
    block = re.compile(rf"(?:{re.escape(names.layers)}|blk)\.(\d+)\.")
    left = [
        name
        for name in sorted(names.all.difference(used))
        if (found := block.match(name))
        and int(found[1][:9]) in layers
        and not MEANINGLESS.search(name, found.end())
        and not (names.spec.kv_layers[int(found[1])] != int(found[1]) and KEYS.search(name, found.end()))
    ]
    with names.checkpoint.open() as read:  # GPTQ's writers give each of their layers a bias, of zeros
        added = {name for name in left if re.sub(r"\.bias$", ".qweight", name) in names.all - {name}}
        left = [name for name in left if name not in added or read(name).any()]
    if left:
        more = f" and {len(left) - MAX_NAMES:,} more" if len(left) > MAX_NAMES else ""
        warnings.warn(
            f"{names.checkpoint.path} has tensors that {names.spec.family} with this config.json does not "
            f"use: {', '.join(left[:MAX_NAMES])}{more}. Answers may be wrong; compare config.json with the "
            "model's origin",
            stacklevel=3,
        )
