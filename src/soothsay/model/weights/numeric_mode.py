"""The number formats in which a model computes: how they are chosen, and how they are told."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from soothsay import __version__
from soothsay.config import DType, KVDType
from soothsay.errors import ModelError
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.weight_format import STAY_PLAIN, WeightFormat
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense, Packed, multiplies_bfloat16
from soothsay.model.specs.attention_spec import LatentSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.quantized import QuantizedRows, coarser, dequantized, round_to_nearest
from soothsay.model.weights.tensor_names import TensorNames

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BITS = {"int8": 8, "int4": 4}
GROUP_SIZES = (32, 16)
"""Group sizes of weights that are rounded on loading: the first that divides a layer's inputs.

Activations are rounded in the same groups. Real models have channels of large activations, and those in the
same group lose their precision (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class NumericMode:
    """The number formats of a model's linear layers."""

    dtype: torch.dtype  # of activations and plain weights
    bits: int | None = None  # to which a user has plain weights rounded; None: they stay plain
    stored: WeightFormat | None = None  # the checkpoint's format of weights in integers; None: all are plain
    keeps_integers: bool = False  # whether weights in integers stay so, or become plain
    coarse: bool = False  # for drafting: integers of more than `bits` are rounded again, the head's too
    file_dtype: torch.dtype = torch.float32  # of plain weights in the checkpoint: they take no more memory

    @property
    def stored_bits(self) -> int | None:
        """Bits of the loaded weights; None: they are plain."""
        return self.bits or (self.stored.bits if self.stored is not None and self.keeps_integers else None)

    def kv_dtype(self, spec: ModelSpec, kernels: Kernels, wanted: KVDType = "auto") -> torch.dtype:
        """Element type of a model's KV pool.

        With weights in integers it is one that keeps more of a key. Rounding keys to bfloat16 would cost more
        than rounding the weights to 8 bits. Latent states are no such keys.

        Raises `ModelError` if it cannot be what a user wants.
        """
        if wanted not in get_args(KVDType):
            raise ModelError(f"kv_dtype {wanted!r} is unknown; choose {', '.join(get_args(KVDType))}")
        if wanted == "int8":
            check_int8_kv(spec, kernels)
            return torch.int8
        whole = self.stored_bits is not None and not spec.parts(LatentSpec)
        return (kernels.dtype_of_keys or self.dtype) if whole else self.dtype

    @property
    def name(self) -> str:
        """A description for people."""
        dtype, kept = (str(one).removeprefix("torch.") for one in (self.dtype, self.file_dtype))
        if self.stored_bits is None:
            narrow = self.file_dtype.itemsize < self.dtype.itemsize
            return f"{kept} weights, {dtype} between" if narrow else dtype
        kinds = [self.stored.name] if self.stored is not None and self.keeps_integers else []
        if self.bits is not None or self.stored is None or self.stored.bytes_each is None:
            kinds.append("plain" if self.bits is None else f"int{self.bits}")
        return f"{' beside '.join(kinds)} weights, int8 activations, {dtype} between"

    def format_of(self, names: frozenset[str], module: str) -> WeightFormat | None:
        """The format in which a checkpoint with tensors `names` stores `module`; None: it is plain."""
        return self.stored if self.stored is not None and self.stored.holds(names, module) else None

    def usual_format(self, module: str) -> WeightFormat | None:
        """The format in which checkpoints usually store the layer we call `module`; None: it is plain."""
        return self.stored if self.stored is not None and self.stored.usual(module) else None

    def bits_of(self, module: str, held: WeightFormat | None = None) -> int | None:
        """Bits of a linear layer whose weight was floats, plain or `held` in a format; None: it stays plain.

        A head that is not coarse has 8.
        """
        bits = self.bits or (held.bits if held is not None and self.keeps_integers else None)
        if bits is None or module.endswith(STAY_PLAIN):
            return None
        return 8 if module == "head" and not self.coarse else bits

    def bytes_of(self, module: str, linear: Dense, held: WeightFormat | None) -> int:
        """Memory of a linear layer's weights in bytes, scales included. `held`: see `bits_of`."""
        out, size = linear.weight.shape
        if held is not None and held.bytes_each is not None and self.keeps_integers:
            return int(out * size * held.bytes_each)
        bits = self.bits_of(module, held)
        if bits is None:
            return out * size * min(self.dtype.itemsize, self.file_dtype.itemsize)
        return out * size * bits // 8 + out * size // (group_size(size) or size) * 2

    def output(self, module: str, kv_dtype: torch.dtype) -> torch.dtype:
        """Element type of a linear layer's output. Keys and values are rounded once, to that of the pool."""
        is_exact = module == "head" or (
            module.endswith((".attention.qkv", ".cross.kv")) and kv_dtype != self.dtype
        )
        return torch.float32 if is_exact else self.dtype

    def convert(
        self, module: str, weight: Tensor | QuantizedRows, held: WeightFormat | None = None
    ) -> Tensor | QuantizedRows:
        """A part of a layer's weight as the layer computes with it. `held`: see `bits_of`."""
        bits = self.bits_of(module, held)
        if not isinstance(weight, Tensor):
            if not self.keeps_integers:
                return dequantized(weight, self.dtype)
            if bits is None or not self.coarse:
                return weight
            return coarser(weight, bits, group_size(weight.shape[1]))
        if bits is None:
            return weight.to(self.dtype)
        return round_to_nearest(weight, bits, group_size(weight.shape[1]))


def check_int8_kv(spec: ModelSpec, kernels: Kernels) -> None:
    """Raises `ModelError` if a model cannot have its keys and values in int8."""
    if not kernels.quantizes_kv:
        raise ModelError(
            f"{kernels.name} cannot keep KV in int8; leave kv_dtype at auto, or choose device='cpu'"
        )
    if spec.parts(LatentSpec) or spec.states:
        kept = "latent states" if spec.parts(LatentSpec) else "recurrent states"
        raise ModelError(
            f"kv_dtype='int8' is for models with keys and values in each layer; this one keeps {kept}. "
            "Leave kv_dtype at auto"
        )


def group_size(size: int) -> int | None:
    """Group size for rounding a weight of `size` inputs on loading; None: all inputs share a scale."""
    return next((group for group in GROUP_SIZES if size % group == 0), None)


def check_bits(stored: WeightFormat, dtype: str, path: Path) -> None:
    """Raises `ModelError` if `dtype` asks for integers of fewer bits than a checkpoint's own have."""
    if BITS[dtype] < stored.bits and not stored.are_fp8:
        raise ModelError(
            f"{path} is stored as {stored.name}, which cannot become {dtype} without further loss; leave "
            "dtype at auto, or quantize the model that it was made from"
        )


def numeric_mode(
    names: TensorNames,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
    coarse: bool = False,
    kernels: Kernels | None = None,
) -> NumericMode:
    """The numeric mode of a checkpoint on `device`, computed by `kernels`; None: those of a CPU.

    Warns if it differs from `dtype`.

    A checkpoint's weights in integers stay so, and those that are plain do, unless `dtype` asks for integers.
    With `coarse`, weights in integers may have any `dtype` of integers: see `NumericMode.coarse`.
    """
    on_cpu = torch.device(device).type == "cpu"
    fast = not on_cpu or multiplies_bfloat16()
    stored, path = names.checkpoint.weight_format(), names.checkpoint.path
    if dtype not in ("auto", *DTYPES, *BITS):
        raise ModelError(f"dtype {dtype!r} is unknown; choose {', '.join(('auto', *DTYPES, *BITS))}")
    first = torch.float32
    if stored is None:
        with names.checkpoint.open() as read:
            first = read(names.require(names.first_linear)[0]).dtype
    if dtype == "bfloat16" and not fast:
        warnings.warn("this processor does not multiply bfloat16; computing in float32", stacklevel=3)
    if dtype == "auto" and stored is not None and stored.are_fp8:
        if not on_cpu:
            return NumericMode(torch.bfloat16, stored=stored)
        warnings.warn(
            f"{path} is stored in FP8 and runs in int8 in groups of {GROUP_SIZES[0]}, "
            "which takes as much memory; dtype='bfloat16' dequantizes it, in twice the memory",
            stacklevel=3,
        )
    mode = _mode(dtype, stored, path, fast, first, coarse and dtype in BITS)
    multiplied = on_cpu or (kernels is not None and torch.device(device).type in kernels.integers_on)
    if mode.stored_bits is not None and not multiplied:
        raise ModelError(
            f"the kernels of {device} do not multiply integer weights of this model; choose "
            "dtype='bfloat16', or device='cpu'"
        )
    if dtype == "auto" and first == torch.float16 and fast:
        warnings.warn(
            f"{path} is stored in float16 and computed in bfloat16, which keeps 8 of its 11 "
            "bits; dtype='float32' keeps all",
            stacklevel=3,
        )
    return mode


def _mode(
    dtype: DType, stored: WeightFormat | None, path: Path, fast: bool, first: torch.dtype, coarse: bool
) -> NumericMode:
    """The numeric mode of a checkpoint.

    Args:
        dtype: as `load_model` takes it.
        stored: the checkpoint's format of weights in integers.
        path: of the checkpoint.
        fast: bfloat16 is multiplied fast.
        first: element type of plain weights in the checkpoint.
        coarse: see `NumericMode`.

    Raises `ModelError` if weights in integers cannot become `dtype`.
    """
    usual, bits = torch.bfloat16 if fast else torch.float32, BITS.get(dtype)
    if dtype in DTYPES:
        plain = usual if dtype == "bfloat16" else torch.float32
        return NumericMode(plain, stored=stored, file_dtype=first)
    if stored is not None and bits is not None and not coarse:
        check_bits(stored, dtype, path)
    if bits is not None or stored is not None:
        return NumericMode(usual, bits, stored, stored is not None, coarse, first)
    return NumericMode(usual if first.itemsize == 2 else torch.float32, file_dtype=first)


def declared_mode(raw: Mapping[str, Any], path: Path, dtype: DType = "auto") -> NumericMode:
    """The numeric mode on this machine of a model, by its config.json alone.

    Raises `ModelError` if its format of weights is unknown, or cannot become `dtype`.
    """
    text, stored = raw.get("text_config"), open_format(raw, path)
    parts = raw, text if isinstance(text, Mapping) else {}
    written = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if key in part), "")
    first = torch.float32 if written == "float32" or stored is not None else torch.bfloat16
    return _mode(dtype, stored, path, multiplies_bfloat16(), first, coarse=False)


def described_mode(
    layers: nn.Module, kernels: Kernels, dtype: torch.dtype, kv_dtype: torch.dtype, bits: int | None
) -> str:
    """The numeric mode of some layers. Weights are not in it.

    The number of threads is in it only where the bits depend on it: where PyTorch multiplies.

    Args:
        layers: that compute.
        kernels: by which they do.
        dtype: of activations.
        kv_dtype: of the KV pool.
        bits: of weights in integers; None: all are plain.
    """
    linears = {type(module) for module in layers.modules() if isinstance(module, (Dense, Packed))}
    pytorch = f"PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"
    parts = [kernels.name, pytorch, f"activations {str(dtype).removeprefix('torch.')}"]
    if kv_dtype != dtype:
        parts.append(f"KV pool {str(kv_dtype).removeprefix('torch.')}")
    if bits is not None:
        parts.append(f"int{bits} weights")
    if linears:
        parts.append(f"{torch.get_num_threads()} threads")
    return ", ".join([*parts, f"soothsay {__version__}"])
