"""Loading: build a `Transformer` and fill it from a checkpoint's mapped files, module by module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.errors import ModelError
from soothsay.heap import return_freed_memory
from soothsay.machine import available_memory
from soothsay.model.attention_layer import Sinks
from soothsay.model.blocks import fuse
from soothsay.model.checkpoint import Checkpoint, read_model_config
from soothsay.model.delta_rule import Recurrence
from soothsay.model.embedding import Embedding, IntegerEmbedding
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.fp8 import FP8
from soothsay.model.formats.gguf_blocks import BlockRows, GGUFFormat
from soothsay.model.formats.mxfp4 import MXFP4
from soothsay.model.formats.weight_format import WeightFormat
from soothsay.model.head_order import delta_order, latent_order, norm_order, qkv_order
from soothsay.model.kernels import Kernels, StockKernels
from soothsay.model.latent_attention import PerHead
from soothsay.model.linear import Dense, Packed
from soothsay.model.native.kernels import VARIANTS, NativeKernels, load_native
from soothsay.model.native.linear import NativeLinear, PackedTable
from soothsay.model.norm import RMSNorm, Vector
from soothsay.model.quantized import (
    Integers,
    Quantized,
    QuantizedRows,
    Reordered,
    dequantized,
    joined,
    round_to_nearest,
)
from soothsay.model.tensor_names import TensorNames
from soothsay.model.transformer import LocalStage, Transformer
from soothsay.model.unused import warn_of_unused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BITS = {"int8": 8, "int4": 4}
GROUP_SIZES = (32, 16)
"""Group sizes of weights that are rounded on loading: the first that divides a layer's inputs.

Activations are rounded in the same groups. Real models have channels of large activations, and those in the
same group lose their precision (docs/log.md)."""

STAY_PLAIN = (".router", ".kv_b", ".shared_gate", ".attention.gates")
"""Linear layers that are not rounded: gates and routers, and those of each head in latent attention."""

RECURRENCE = {"taps": "conv1d.weight", "log_rates": "A_log", "offsets": "dt_bias", "scale": "norm.weight"}
"""The weights of a `Recurrence` and their names in checkpoints."""

MAPPED = 2**25
"""Number of bytes that are read from a checkpoint before its files are mapped anew, which frees memory."""


@dataclass(frozen=True, slots=True)
class NumericMode:
    """The number formats of a model's linear layers."""

    dtype: torch.dtype  # of activations, the KV pool and plain weights
    bits: int | None = None  # to which plain weights are rounded; None: they stay plain
    stored: WeightFormat | None = None  # the checkpoint's format of weights in integers; None: all are plain
    keeps_integers: bool = False  # whether weights in integers stay so, or become plain

    @property
    def stored_bits(self) -> int | None:
        """Bits of the loaded weights; None: they are plain."""
        return 8 if self.keeps_integers and self.bits is None else self.bits

    @property
    def name(self) -> str:
        """A description for people."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.keeps_integers and isinstance(self.stored, MXFP4):
            beside = "plain" if self.bits is None else f"int{self.bits}"
            return f"{self.stored.name} beside {beside} weights, int8 activations, {dtype} between"
        if self.bits is not None:
            return f"int{self.bits} weights, int8 activations, {dtype} between"
        if self.keeps_integers and self.stored is not None:
            return f"{self.stored.name} weights, int8 activations, {dtype} between"
        return dtype

    def bits_of(self, module: str) -> int | None:
        """Bits of a linear layer's integers; None: plain. The head always has 8, and some stay plain."""
        if self.bits is None or module.endswith(STAY_PLAIN):
            return None
        return 8 if module == "head" else self.bits

    def bytes_of(self, module: str, linear: Dense) -> int:
        """Memory of a linear layer's weights in bytes, scales included."""
        out, size = linear.weight.shape
        bits = self.bits_of(module)
        if self.keeps_integers and isinstance(self.stored, MXFP4) and ".experts." in module:
            bits = 4
        if bits is None:
            return out * size * self.dtype.itemsize
        return out * size * bits // 8 + out * size // (group_size(size) or size) * 2

    def convert(self, module: str, weight: Tensor | Integers) -> Tensor | Integers:
        """A weight in the format of its layer."""
        bits = self.bits_of(module)
        if not isinstance(weight, Tensor):
            return weight if self.keeps_integers else dequantized(weight, self.dtype)
        if bits is None:
            return weight.to(self.dtype)
        return round_to_nearest(weight, bits, group_size(weight.shape[1]))


def group_size(size: int) -> int | None:
    """Group size for rounding a weight of `size` inputs on loading; None: all inputs share a scale."""
    return next((group for group in GROUP_SIZES if size % group == 0), None)


def load_model(
    checkpoint: Checkpoint,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
    kernels: Kernels | None = None,
    max_context: int | None = None,
    layers: range | None = None,
) -> Transformer:
    """Load a model from a checkpoint.

    Files are mapped and read once, layer by layer, so peak memory is little more than the weights.

    Args:
        checkpoint: has the weights and the configuration.
        dtype: "auto" keeps integer weights, and chooses bfloat16 for other 16-bit weights if the machine
            multiplies it fast, else float32. "int8" and "int4" round plain weights to nearest;
            `soothsay quantize` loses less.
        device: where the model runs.
        kernels: None: the fastest that fit.
        max_context: the longest context that will be served, for models that have several sets of rotary
            positions (longrope); None: the model's own limit.
        layers: the first ones, if `Transformer.rest` will have the others; None: all.

    Raises `ModelError` for an unknown dtype or quantization, for too little memory, and for tensors that are
    missing or do not fit the configuration.
    """
    config = for_context(read_model_config(checkpoint), max_context)
    names = TensorNames(config, checkpoint)
    mode = numeric_mode(names, dtype, device)
    with torch.device("meta"):
        model = Transformer(config, kernels or best_kernels(config, device), layers)
    if not config.tie_embeddings:
        names.require("head")
    _load_modules(model, names, mode, device)
    embedding, head = model.embedding, model.head
    if config.tie_embeddings and isinstance(embedding, IntegerEmbedding) and isinstance(head, NativeLinear):
        embedding.table = PackedTable(head)  # the same integers, read in one native call
    model.bits = mode.stored_bits
    fuse(model)
    return model.to(device).eval().requires_grad_(False)


def load_stage(
    checkpoint: Checkpoint,
    layers: range,
    dtype: DType = "auto",
    kernels: Kernels | None = None,
    max_context: int | None = None,
) -> tuple[LocalStage, int | None]:
    """Load some layers of a model, and nothing else, on the CPU. For the arguments see `load_model`.

    Returns the layers, and the bits of their weights as `Transformer.bits`. Raises `ModelError`.
    """
    config = for_context(read_model_config(checkpoint), max_context)
    names = TensorNames(config, checkpoint, layers.start)
    mode = numeric_mode(names, dtype)
    with torch.device("meta"):
        model = Transformer(config, kernels or best_kernels(config), layers)
    _load_modules(model, names, mode, "cpu", "blocks.")
    stage = model.own
    fuse(stage.blocks)
    stage.blocks.eval().requires_grad_(False)
    return stage, mode.stored_bits


def _load_modules(
    model: Transformer, names: TensorNames, mode: NumericMode, device: torch.device | str, prefix: str = ""
) -> None:
    """Fill the modules of a model whose names begin with `prefix`."""
    if torch.device(device).type == "cpu":
        check_memory(model, mode, names.checkpoint, prefix)
    with _Source(names, mode) as source:
        for name, module in list(model.named_modules()):
            if name.startswith(prefix):
                _fill(model, name, module, source)
                source.release()
    warn_of_unused(names, source.used, model.own.layers)


def for_context(config: ModelConfig, max_context: int | None) -> ModelConfig:
    """The configuration of a model that serves at most `max_context` tokens; None: the model's own limit."""
    if max_context is None or config.rope.kind != "longrope":
        return config
    return replace(config, rope=replace(config.rope, context=max_context))


def numeric_mode(
    names: TensorNames, dtype: DType = "auto", device: torch.device | str = "cpu"
) -> NumericMode:
    """The numeric mode of a checkpoint on `device`. Warns if it differs from `dtype`."""
    on_cpu = torch.device(device).type == "cpu"
    fast = not on_cpu or Packed.available(torch.bfloat16)
    stored = names.checkpoint.weight_format()
    if dtype not in ("auto", *DTYPES, *BITS):
        raise ModelError(f"dtype {dtype!r} is unknown; choose {', '.join(('auto', *DTYPES, *BITS))}")
    if dtype == "bfloat16" and not fast:
        warnings.warn("this processor does not multiply bfloat16; computing in float32", stacklevel=3)
        return NumericMode(torch.float32, stored=stored)
    if dtype in DTYPES:
        return NumericMode(DTYPES[dtype], stored=stored)
    bits = BITS.get(dtype)
    if isinstance(stored, FP8) and bits is None:
        if not on_cpu:
            return NumericMode(torch.bfloat16, stored=stored)
        warnings.warn(
            f"{names.checkpoint.path} is stored in FP8 and runs in int8 in groups of {GROUP_SIZES[0]}, "
            "which takes as much memory; dtype='bfloat16' dequantizes it, in twice the memory",
            stacklevel=3,
        )
    if stored is not None:
        if bits not in (None, stored.bits) and not isinstance(stored, MXFP4 | FP8):
            raise ModelError(
                f"{names.checkpoint.path} is stored as {stored.name}, which cannot become {dtype} without "
                "further loss; leave dtype at auto, or quantize the model that it was made from"
            )
        bits = stored.bits if bits is None else bits  # with MXFP4, of the layers that are stored plain
    if bits is not None or stored is not None:
        if not on_cpu:
            raise ModelError(f"integer weights run on a CPU only, not on {device}; choose dtype='bfloat16'")
        return NumericMode(torch.bfloat16 if fast else torch.float32, bits, stored, stored is not None)
    with names.checkpoint.open() as read:
        first = read(names.require("blocks.0.attention.o")[0])
    if first.dtype == torch.float16 and fast:
        warnings.warn(
            f"{names.checkpoint.path} is stored in float16 and computed in bfloat16, which keeps 8 of its 11 "
            "bits; dtype='float32' keeps all",
            stacklevel=3,
        )
    return NumericMode(torch.bfloat16 if first.dtype.itemsize == 2 and fast else torch.float32)


def declared_mode(raw: Mapping[str, Any], path: Path, dtype: DType = "auto") -> NumericMode:
    """The numeric mode on this machine of a model, by its config.json alone.

    Raises `ModelError` if its format of weights is unknown, or cannot become `dtype`.
    """
    fast, stored = Packed.available(torch.bfloat16), open_format(raw, path)
    text = raw.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    written = next(
        (part[key] for part in (raw, inner) for key in ("dtype", "torch_dtype") if key in part), ""
    )
    plain = torch.bfloat16 if fast and (dtype == "bfloat16" or written != "float32") else torch.float32
    if dtype in DTYPES:
        return NumericMode(torch.float32 if dtype == "float32" else plain, stored=stored)
    bits = BITS.get(dtype)
    if stored is None:
        halved = torch.bfloat16 if fast and bits is not None else plain
        return NumericMode(halved, bits)
    if bits not in (None, stored.bits) and not isinstance(stored, MXFP4 | FP8):
        raise ModelError(f"{path}: weights in {stored.name} cannot become {dtype} without further loss")
    bits = stored.bits if bits is None else bits
    return NumericMode(torch.bfloat16 if fast else torch.float32, bits, stored, keeps_integers=True)


def weight_bytes(model: Transformer, mode: NumericMode, prefix: str = "") -> int:
    """Memory that the linear layers of a model will take once loaded, in bytes.

    Of those whose names begin with `prefix`.
    """
    own = [(name, m) for name, m in model.named_modules() if isinstance(m, Dense) and name.startswith(prefix)]
    if mode.keeps_integers and isinstance(mode.stored, GGUFFormat):  # which are of several types
        is_whole = not prefix and len(model.blocks) == model.config.num_layers
        weights = sum(m.weight.numel() for _, m in own)
        share = 1.0 if is_whole else weights / model.config.num_parameters
        return int(mode.stored.num_bytes * share)
    return sum(mode.bytes_of(name, m) for name, m in own)


def table_bytes(names: TensorNames, mode: NumericMode) -> int:
    """Bytes of the table of embeddings, which stays a mapped file."""
    with _Source(names, mode) as source:
        blocks = source.blocks("embedding")
        return source.read(names.require("embedding")[0]).nbytes if blocks is None else blocks.data.nbytes


def check_memory(model: Transformer, mode: NumericMode, checkpoint: Checkpoint, prefix: str = "") -> None:
    """Raises `ModelError` if the weights of modules do not fit into memory. `prefix`: see `weight_bytes`."""
    needed, free = weight_bytes(model, mode, prefix), available_memory()
    if needed > free:
        modes = {name: NumericMode(mode.dtype, bits) for name, bits in BITS.items()}
        smaller = {name: weight_bytes(model, other, prefix) for name, other in modes.items()}
        fits = [f"dtype={name!r} takes {size / 1e9:.1f} GB" for name, size in smaller.items() if size < free]
        advice = "; ".join(fits) if fits and mode.stored is None else "free some, or take a smaller model"
        raise ModelError(
            f"{checkpoint.path} needs {needed / 1e9:.1f} GB of memory in {mode.name}; "
            f"{free / 1e9:.1f} GB are free: {advice}"
        )


def best_kernels(config: ModelConfig, device: torch.device | str = "cpu") -> Kernels:
    """The fastest kernels for a model: native ones on a CPU if they fit, else stock operations."""
    native = load_native() if torch.device(device).type == "cpu" else None
    return StockKernels() if native is None or not native.fit(config) else native


def named_kernels(name: str) -> Kernels | None:
    """The kernels of a name: an instruction set, or "stock"; None for "auto". Raises `ModelError`."""
    if name in ("auto", "stock"):
        return StockKernels() if name == "stock" else None
    if name not in VARIANTS:
        raise ModelError(f"there are no kernels {name!r}; choose from auto, stock, {', '.join(VARIANTS)}")
    try:
        return NativeKernels(name)
    except OSError as error:
        raise ModelError(str(error)) from None


class _Source:
    """Reads the tensors of a module, checks their shapes and converts them."""

    def __init__(self, names: TensorNames, mode: NumericMode):
        self.names, self.mode = names, mode
        self._opened = ExitStack()
        self.used = set[str]()  # names of tensors that were read
        self._mapped = 0  # bytes read since the files were mapped

    def __enter__(self) -> _Source:
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
        names = self.names.require(module, suffix)
        parts = [self.read(name) for name in names]
        self._check(names, parts, expected)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        order = row_order(module, self.names.config)
        return whole if order is None else whole[order]

    def weight(self, module: str, expected: Tensor) -> Tensor | Integers:
        """The weight of a linear layer, in the layer's format."""
        stored, parts = self.mode.stored, self.names.of(module)
        quantized = [stored is not None and stored.holds(self.names.all, part) for part in parts]
        if stored is None or isinstance(stored, FP8) or not any(quantized):
            plain = self.names.require(module)
            tensors = [
                self.read(name) if stored is None or not held else cast(Tensor, self._stored(stored, part))
                for name, part, held in zip(plain, parts, quantized, strict=True)
            ]
            self._check(plain, tensors, expected)
            orders = self._orders(module, tensors)
            if orders is not None:
                tensors = [tensor[order] for tensor, order in zip(tensors, orders, strict=True)]
            return _joined([self.mode.convert(module, tensor) for tensor in tensors])
        if not all(quantized):
            raise ModelError(
                f"{self.names.checkpoint.path}: of {', '.join(parts)}, some are quantized and some are "
                "not, but they are multiplied as one; load it with another engine, or quantize the original"
            )
        weights = [cast(QuantizedRows, self._stored(stored, part)) for part in parts]
        self._check(parts, weights, expected)
        orders = self._orders(module, weights)
        if orders is not None:
            weights = [Reordered(*part) for part in zip(weights, orders, strict=True)]
        return self.mode.convert(module, joined(weights))

    def _stored(self, stored: WeightFormat, part: str) -> QuantizedRows | Tensor:
        """A weight that is stored in a format of its own. Raises `ModelError` if tensors do not make one."""
        for name in stored.tensors(part):
            self.names.check(name)
            self.used.add(name)
        try:
            return stored.read(self.read, part)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # of torch, for odd shapes, dtypes
            raise ModelError(
                f"{self.names.checkpoint.path}: {part}: the tensors do not make a weight of {stored.name} "
                f"({error}); the file is damaged, or config.json belongs to another model"
            ) from error

    def _orders(self, module: str, parts: Sequence[Tensor | QuantizedRows]) -> list[Tensor] | None:
        """For each part of a module, the order of its rows; None if they stay in order."""
        order = row_order(module, self.names.config)
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

    def blocks(self, module: str) -> BlockRows | None:
        """The rows of a table in blocks, if they stay so."""
        stored, (name,) = self.mode.stored, self.names.of(module)
        if not self.mode.keeps_integers or stored is None or not stored.holds(self.names.all, name):
            return None
        rows = stored.read(self.read, name)
        return rows if isinstance(rows, BlockRows) else None

    def _check(self, names: list[str], parts: Sequence[Tensor | QuantizedRows], expected: Tensor) -> None:
        shapes = [tuple(part.shape) for part in parts]
        rows, rest = sum(sum(shape[:1]) for shape in shapes), {shape[1:] for shape in shapes}
        if rows != expected.shape[0] or rest != {tuple(expected.shape[1:])}:
            held = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            together = " together" if len(names) > 1 else ""
            raise ModelError(
                f"{self.names.checkpoint.path}: {held}: by config.json it should be "
                f"{list(expected.shape)}{together}"
            )
        for name, part in zip(names, parts, strict=True):
            if isinstance(part, Tensor) and (not part.is_floating_point() or part.dtype.itemsize < 2):
                raise ModelError(
                    f"{self.names.checkpoint.path}: {name} is stored as {part.dtype}, which config.json does "
                    "not declare in a quantization_config; take another version of this model"
                )


def row_order(module: str, config: ModelConfig) -> Tensor | None:
    """For each row of a module, its number in a checkpoint; None if the order is the same."""
    if config.latent is not None:
        return latent_order(config, module)
    if config.delta is not None and (order := delta_order(config, module)) is not None:
        return order
    if module.endswith("attention.qkv"):
        return qkv_order(config)
    if not module.endswith(("attention.q_norm", "attention.k_norm")):
        return None
    heads = config.num_heads if module.endswith("q_norm") else config.num_kv_heads
    return norm_order(config, heads if config.qk_norm_over_heads else 1)


def _joined(parts: Sequence[Tensor | Integers]) -> Tensor | Integers:
    """Plain or rounded weights, joined along their rows."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    if plain:
        return plain[0] if len(plain) == 1 else torch.cat(plain)
    return joined([part for part in parts if isinstance(part, Quantized)])


def _fill(model: Transformer, name: str, module: nn.Module, source: _Source) -> None:
    """Load the weights of the module called `name`, if it has its own."""
    dtype = source.mode.dtype
    if isinstance(module, PerHead):
        weight = source.weight(name, module.weight)
        plain = weight if isinstance(weight, Tensor) else dequantized(weight, dtype)
        model.set_submodule(name, module.packed(plain, model.kernels))
    elif isinstance(module, Dense):
        weight = source.weight(name, module.weight)
        bias = None if module.bias is None else source.tensor(name, "bias", module.bias).to(dtype)
        out = torch.float32 if name == "head" else dtype
        model.set_submodule(name, model.kernels.linear(weight, bias, out))
    elif isinstance(module, Recurrence):
        for part, stored in RECURRENCE.items():
            weight = cast(nn.Parameter, getattr(module, part))
            shape = (
                weight.t()[:, None] if part == "taps" else weight
            )  # of a convolution, `[channels, 1, taps]`
            read = source.tensor(name, stored, shape).float()
            values = read[:, 0].t() if part == "taps" else read
            setattr(module, part, nn.Parameter(values.clone(memory_format=torch.contiguous_format)))
    elif isinstance(module, Vector):
        numbers = source.tensor(name, module.name, module.value)
        module.register_parameter(module.name, nn.Parameter(numbers.float().clone()))
    elif isinstance(module, Sinks):
        module.sinks = nn.Parameter(source.tensor(name, "sinks", module.sinks).float().clone())
    elif isinstance(module, RMSNorm):
        scale = source.tensor(name, module.stored_as, module.weight).float() * module.factor
        module.weight = nn.Parameter(scale + 1 if model.config.zero_centred_norms else scale.clone())
    elif isinstance(module, Embedding) and (rows := source.blocks(name)) is not None:
        model.set_submodule(name, IntegerEmbedding(rows, module.scale))
    elif isinstance(module, Embedding):  # remains a view of the file: only the rows in use are read
        table = source.tensor(name, "weight", module.weight)
        module.weight = nn.Parameter(table, requires_grad=False)
        if model.config.embedding_scale_rounded:
            module.scale = float(torch.tensor(module.scale, dtype=table.dtype))
