"""Loading: build a `Transformer` and fill it from a checkpoint's mapped files, module by module."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from soothsay.config import DType, KVDType
from soothsay.errors import ModelError
from soothsay.machine import available_memory, usable_memory
from soothsay.model.decoder.blocks import record
from soothsay.model.decoder.embedding import Embedding, IntegerEmbedding
from soothsay.model.formats.weight_format import WeightFormat
from soothsay.model.kernel_sets import chosen_kernels, usable_device
from soothsay.model.loaded_part import LoadedPart
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.attention_spec import HeadRotation
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import LocalStage, Transformer
from soothsay.model.weights.checkpoint import Checkpoint, read_model_config
from soothsay.model.weights.numeric_mode import BITS, NumericMode, numeric_mode
from soothsay.model.weights.quantized import QuantizedTable
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.model.weights.weight_source import WeightSource, warn_of_unused
from soothsay.processors import one_torch_thread
from soothsay.progress import tell_progress


@one_torch_thread()
def load_model(
    checkpoint: Checkpoint,
    dtype: DType = "auto",
    device: torch.device | str = "cpu",
    kernels: Kernels | str = "auto",
    max_context: int | None = None,
    layers: range | None = None,
    coarse: bool = False,
    tokens: Tensor | None = None,
    kv_dtype: KVDType = "auto",
) -> Transformer:
    """Load a model from a checkpoint.

    Files are mapped and read once, layer by layer, so peak memory is little more than the weights.

    Args:
        checkpoint: has the weights and the configuration.
        dtype: "auto" keeps integer weights, and chooses bfloat16 for other 16-bit weights if the machine
            multiplies it fast, else float32. "int8" and "int4" round plain weights to nearest;
            `soothsay quantize` loses less.
        device: where the model runs; see `usable_device`.
        kernels: or their name; see `chosen_kernels`.
        max_context: the longest context that will be served, for models that have several sets of rotary
            positions (longrope); None: the model's own limit.
        layers: the first ones, if `Transformer.rest` will have the others; None: all.
        coarse: for draft models, which may lose quality: integers of more bits than `dtype` are rounded
            again, and so is the output head.
        tokens: `[n]` int64, those that the output head has logits of, in order; None: all.
        kv_dtype: "int8" keeps keys and values in 8 bits with a scale a row and head: about half the memory.

    Raises `ModelError` for an unknown dtype, quantization, device or kernels, for too little memory, and for
    tensors that are missing or do not fit the configuration.
    """
    device = usable_device(device)
    spec = for_context(read_model_config(checkpoint), max_context)
    names = TensorNames(spec, checkpoint)
    kernels = kernels if isinstance(kernels, Kernels) else chosen_kernels(kernels, spec, device)
    mode = numeric_mode(names, dtype, device, coarse, kernels)
    if spec.source is not None and layers is not None:
        raise ModelError(f"{checkpoint.path} has an encoder, so that its layers cannot run in several stages")
    with torch.device("meta"):
        model = Transformer(spec, kernels, layers, mode.kv_dtype(spec, kernels, kv_dtype))
    if not spec.head.tied and mode.format_of(names.all, *names.of("head")) is None:
        names.require("head")
    _load_modules(model, names, mode, device, tokens=tokens)
    embedding, head = model.embedding, model.head
    is_table = spec.head.tied and not mode.coarse and tokens is None
    if isinstance(embedding, IntegerEmbedding):
        stored = cast(QuantizedTable, embedding.table)
        embedding.table = kernels.table(stored, head if is_table else None)
    model.bits, model.formats = mode.stored_bits, mode.name
    model.to(device).eval().requires_grad_(False)
    record(model)
    return model


@one_torch_thread()
def load_stage(
    checkpoint: Checkpoint,
    layers: range,
    dtype: DType = "auto",
    kernels: str = "auto",
    max_context: int | None = None,
    kv_dtype: KVDType = "auto",
) -> tuple[LocalStage, int | None]:
    """Load some layers of a model, and nothing else, on the CPU. For the arguments see `load_model`.

    Returns the layers, and the bits of their weights as `Transformer.bits`. Raises `ModelError`.
    """
    spec = for_context(read_model_config(checkpoint), max_context)
    names = TensorNames(spec, checkpoint, layers.start)
    mode = numeric_mode(names, dtype)
    own = chosen_kernels(kernels, spec)
    with torch.device("meta"):
        model = Transformer(spec, own, layers, mode.kv_dtype(spec, own, kv_dtype))
    _load_modules(model, names, mode, "cpu", "blocks.")
    stage = model.own
    record(stage.blocks)
    stage.blocks.eval().requires_grad_(False)
    return stage, mode.stored_bits


def _load_modules(
    model: Transformer,
    names: TensorNames,
    mode: NumericMode,
    device: torch.device | str,
    prefix: str = "",
    tokens: Tensor | None = None,
) -> None:
    """Fill the modules of a model whose names begin with `prefix`."""
    if torch.device(device).type == "cpu":
        check_memory(model, mode, names, prefix)
    chosen = {} if tokens is None else {"head": tokens}
    with WeightSource(names, mode, model.kernels, model.kv_dtype, chosen, device) as source:
        modules = [(name, m) for name, m in model.named_modules() if name.startswith(prefix)]
        parts = [(name, part) for name, part in modules if isinstance(part, LoadedPart)]
        for done, (name, part) in enumerate(parts):
            tell_progress("reading and packing weights", done, len(parts))
            model.set_submodule(name, part.load(source, name))
            source.release()
    warn_of_unused(names, source.used, model.own.layers)
    if names.encoder is not None:
        warn_of_unused(names.encoder, source.used, range(names.encoder.spec.num_layers))


def for_context(spec: ModelSpec, max_context: int | None) -> ModelSpec:
    """A model that serves at most `max_context` tokens; None: the model's own limit."""

    def serving(own: HeadRotation) -> HeadRotation:
        if max_context is None or own.rope.kind != "longrope":
            return own
        return replace(own, rope=replace(own.rope, context=max_context))

    return spec.with_rotations(serving)


def weight_bytes(
    model: Transformer, mode: NumericMode, prefix: str = "", names: TensorNames | None = None
) -> int:
    """Memory in bytes that a model's linear layers whose names begin with `prefix` will take once loaded.

    Without `names` of a checkpoint's tensors, layers are taken to be stored as they usually are.
    """

    def held(module: str) -> WeightFormat | None:
        if names is None:
            return mode.usual_format(module)
        formats = [mode.format_of(names.all, part) for part in names.of(module)]
        return formats[0] if all(formats) else None

    own = [(name, m) for name, m in model.named_modules() if isinstance(m, Dense) and name.startswith(prefix)]
    return sum(mode.bytes_of(name, m, held(name)) for name, m in own)


def _loading_bytes(model: Transformer, mode: NumericMode, prefix: str, names: TensorNames) -> int:
    """Memory in bytes that loading takes at most: a sixteenth more than the weights, and what is dequantized.

    Plain weights are read from mapped files. A dequantized table stays in memory; a layer does, in float32,
    until its weight is packed.
    """
    needed = weight_bytes(model, mode, prefix, names) * 17 // 16
    if mode.stored is None or mode.keeps_integers:
        return needed
    modules = [(name, m) for name, m in model.named_modules() if name.startswith(prefix)]
    tables = sum(m.weight.numel() for _, m in modules if isinstance(m, Embedding))
    layers = (m.weight.numel() for _, m in modules if isinstance(m, Dense))
    return needed + tables * mode.dtype.itemsize + max(layers, default=0) * 4


def table_bytes(names: TensorNames, mode: NumericMode) -> int:
    """Bytes of the table of embeddings, which stays a mapped file."""
    with WeightSource(names, mode, StockKernels(), mode.dtype) as source:
        blocks = source.blocks("embedding")
        stored = source.read(names.require("embedding")[0]) if blocks is None else blocks.data
        return int(stored.nbytes)


def check_memory(model: Transformer, mode: NumericMode, names: TensorNames, prefix: str = "") -> None:
    """Raises `ModelError` if the weights of modules do not fit into memory. `prefix`: see `weight_bytes`."""
    needed, free = _loading_bytes(model, mode, prefix, names), available_memory()
    if needed > free:
        modes = {name: NumericMode(mode.dtype, bits) for name, bits in BITS.items()}
        smaller = {name: weight_bytes(model, other, prefix) for name, other in modes.items()}
        fits = [f"dtype={name!r} takes {size / 1e9:.1f} GB" for name, size in smaller.items() if size < free]
        advice = "; ".join(fits) if fits and mode.stored is None else "free some, or take a smaller model"
        raise ModelError(
            f"{names.checkpoint.path} needs {needed / 1e9:.1f} GB of memory in {mode.name}; "
            f"{free / 1e9:.1f} GB are free of {usable_memory().whole}: {advice}"
        )
