"""Making a model smaller: its linear layers in 8 or 4 bits, from one Hugging Face directory to another.

What is written is an ordinary directory in the format of compressed-tensors, which other engines load too.
Embeddings, the head, norms and routers stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.calibration import Progress, read_samples, write_samples
from soothsay.config import ModelConfig
from soothsay.engine.batch import Batch, Rows
from soothsay.errors import ModelError, RequestError
from soothsay.model.checkpoint import Checkpoint, Reader
from soothsay.model.formats import Scheme, open_format
from soothsay.model.gptq import gptq, round_fitted
from soothsay.model.linear import Dense
from soothsay.model.load import TensorNames, load_model
from soothsay.model.quantized import Quantized
from soothsay.model.transformer import Block, Transformer, unfuse
from soothsay.model.writing import CheckpointWriter, require_free, writing
from soothsay.tokenizer import Tokenizer

IntDType = Literal["int8", "int4"]
Method = Literal["gptq", "round"]

GROUP_SIZES = (128, 64, 32)
"""Inputs that may share a scale in int4."""

HELD_BACK = 8
"""One more sample is taken for so many, to measure perplexity on."""

ROWS = 2048
"""Tokens that go through a block together while its inputs are measured."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a model."""

    scheme: Scheme
    method: Method
    errors: Mapping[str, list[float]]
    """Of each kind of layer, such as `attention.qkv`, the relative error of every one, as a root mean square:
    by "gptq", of its outputs for calibration text; by "round", of its weights."""

    bytes_before: int
    bytes_after: int
    perplexity: tuple[float, float] | None
    """Before and after, of calibration text that was held back; after that, weights alone are in integers."""


@torch.no_grad()
def quantize(
    checkpoint: Checkpoint,
    out: Path,
    dtype: IntDType,
    *,
    group_size: int = 128,
    method: Method | None = None,
    calibration: Path | None = None,
    samples: int = 128,
    tokens: int = 512,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Write a copy of a model with weights in integers.

    Args:
        checkpoint: a Hugging Face directory that is not quantized.
        out: a directory that is empty or not there yet. It is there when all of it is.
        dtype: "int8", a scale for each output channel, for products with activations in int8; or "int4", a
            scale for each group of inputs.
        group_size: of int4: 128, 64 or 32, or the largest of them below it that divides all layers' inputs.
        method: "round" takes the nearest integers, and is int8's default; "gptq" makes up for what rounding
            does to calibration text, and is int4's.
        calibration: such text, see `read_samples`; None: the model writes its own.
        samples: pieces of text to calibrate on.
        tokens: in a piece.
        progress: called as it goes.

    Raises:
        ModelError: the model cannot be quantized in this way, or `out` is in use.
        RequestError: the calibration text is of no use.
    """
    require_free(out)
    names, scheme = _plan(checkpoint, dtype, group_size)
    modules = list(_linear_layers(names.config))
    method = method or ("gptq" if dtype == "int4" else "round")
    walks = None
    if method == "gptq":
        model, tokenizer = load_model(checkpoint), checkpoint.tokenizer()
        text = _text(model, tokenizer, calibration, samples + samples // HELD_BACK, tokens, progress)
        walks = _Walks(model, text)
    elif calibration is not None:
        raise RequestError("rounding takes no calibration text; leave it out, or choose the method gptq")
    layers = (
        _rounded(names, scheme, modules) if walks is None else _compensated(names, scheme, modules, walks)
    )
    errors: dict[str, list[float]] = {}
    with writing(out) as writer:
        for done, layer in enumerate(layers, 1):
            for name, weight in layer.parts.items():
                writer.add(scheme.write(weight, name))
            errors.setdefault(layer.kind, []).append(layer.error)
            progress("quantizing", done, len(modules))
        quantization = scheme.config(_copy_tensors(names, modules, writer))
        writer.finish(checkpoint, {**checkpoint.config, "quantization_config": quantization})
    return Report(
        scheme=scheme,
        method=method,
        errors=errors,
        bytes_before=_bytes(checkpoint.path),
        bytes_after=_bytes(out),
        perplexity=None if walks is None else walks.perplexity(),
    )


def _plan(checkpoint: Checkpoint, dtype: str, group_size: int) -> tuple[TensorNames, Scheme]:
    """Raises `ModelError` for what cannot be done, before any of it is."""
    path = checkpoint.path
    if not path.is_dir():
        raise ModelError(f"{path} is not a Hugging Face directory, the one thing that can be quantized")
    stored = open_format(checkpoint.config, path)
    if stored is not None:
        raise ModelError(
            f"{path} is quantized already, to {stored.name}; take the model that it was made from"
        )
    names = TensorNames(ModelConfig.from_hf(checkpoint.config), checkpoint)
    if dtype == "int8":
        return names, Scheme(8, packed=False)
    if dtype != "int4":
        raise ModelError(f"dtype {dtype!r} is not one to quantize to; choose int8 or int4")
    if group_size not in GROUP_SIZES:
        raise ModelError(f"groups of {group_size} are not possible; choose one of {GROUP_SIZES}")
    inputs = _linear_layers(names.config)
    for size in GROUP_SIZES:
        if size <= group_size and not any(count % size for count in inputs.values()):
            return names, Scheme(4, size)
    module, count = next((m, n) for m, n in inputs.items() if n % GROUP_SIZES[-1])
    raise ModelError(
        f"{path}: the {count} inputs of {module} cannot be cut into groups of {group_size} or fewer, down to "
        f"{GROUP_SIZES[-1]}; choose int8, which has none"
    )


def _linear_layers(config: ModelConfig) -> dict[str, int]:
    """Our names of the layers to quantize, in order, and their inputs."""
    with torch.device("meta"):
        model = Transformer(config)
    return {
        name: module.weight.shape[1]
        for name, module in model.named_modules()
        if isinstance(module, Dense) and name.startswith("blocks.") and not name.endswith(".router")
    }


def _text(
    model: Transformer,
    tokenizer: Tokenizer | None,
    file: Path | None,
    count: int,
    tokens: int,
    progress: Progress,
) -> Tensor:
    limit = model.config.max_positions
    if not 2 <= tokens <= limit:
        raise RequestError(f"samples of {tokens} tokens are not possible: this model takes 2 to {limit}")
    if file is None:
        return write_samples(model, tokenizer, count, tokens, progress)
    return read_samples(file, tokenizer, count, tokens)


# layers


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer in integers."""

    module: str  # such as blocks.0.attention.qkv
    parts: Mapping[str, Quantized]  # by their names in the checkpoint
    weight: Tensor  # what they are together, float32
    error: float

    @property
    def kind(self) -> str:
        """The module less numbers."""
        return ".".join(part for part in self.module.split(".")[1:] if not part.isdigit())


def _rounded(names: TensorNames, scheme: Scheme, modules: list[str]) -> Iterator[_Layer]:
    """Each layer by itself."""
    for module in modules:
        with names.checkpoint.open() as read:
            yield _layer(names, read, scheme, module, None)


def _compensated(names: TensorNames, scheme: Scheme, modules: list[str], walks: _Walks) -> Iterator[_Layer]:
    """Each layer for the inputs that it gets from those before it, as they have become. Changes the model."""
    for number, block in enumerate(walks.blocks):
        prefix = f"blocks.{number}."
        paths = [module.removeprefix(prefix) for module in modules if module.startswith(prefix)]
        hessians = walks.measure(block, paths)
        with names.checkpoint.open() as read:
            for path in paths:
                layer = _layer(names, read, scheme, prefix + path, hessians.pop(path, None))
                bias = cast(Tensor | None, block.get_submodule(path).bias)
                block.set_submodule(path, Dense(layer.weight.to(block.dtype), bias))
                yield layer
        walks.advance(block)


def _layer(names: TensorNames, read: Reader, scheme: Scheme, module: str, hessian: Tensor | None) -> _Layer:
    """`hessian` is of the layer's inputs; None: nothing is known of them."""
    parts = {name.removesuffix(".weight"): read(name) for name in names.require(module)}
    weight = torch.cat([part.float() for part in parts.values()])
    if hessian is None:
        quantized = round_fitted(weight, scheme.bits, scheme.group_size)
    else:
        quantized = gptq(weight, hessian, scheme.bits, scheme.group_size)
    become, pieces, begin = quantized.dequantize(), {}, 0
    for name, part in parts.items():
        rows = slice(begin, begin := begin + len(part))
        pieces[name] = Quantized(quantized.bits, quantized.values[rows], quantized.scales[rows])
    total = _squares(weight, hessian)
    error = (_squares(weight - become, hessian) / total) ** 0.5 if total else 0.0
    return _Layer(module, pieces, become, error)


def _squares(weight: Tensor, hessian: Tensor | None) -> float:
    """Sum of squares of a weight, or of its outputs for the inputs that `hessian` is of."""
    squares = (weight if hessian is None else weight @ hessian) * weight
    return max(0.0, float(squares.sum()))  # rounding takes the sum below zero where there is next to nothing


# calibration text, on its way through the model


class _Walk:
    """Samples, as far as they have come."""

    def __init__(self, model: Transformer, samples: Tensor):
        c = model.config
        self.model, self.samples = model, samples
        step = max(1, ROWS // samples.shape[1])
        requests = [Rows(ids, 0) for ids in samples.numpy()]
        self.batches = [
            Batch.pack(requests[i : i + step], group=c.group, windows=c.windows)
            for i in range(0, len(requests), step)
        ]
        self.states = [model.embedding(batch.tokens) for batch in self.batches]  # inputs of the next block

    def through(self, block: Block) -> Iterator[Tensor]:
        """What `block` makes of them, one pass after the other."""
        rope = self.model.rope
        if block.local and self.model.local_rope is not None:
            rope = self.model.local_rope
        for batch, state in zip(self.batches, self.states, strict=True):
            yield block(state, rope(batch.positions), batch, None)

    def advance(self, block: Block) -> None:
        """Go on to the next block."""
        for i, state in enumerate(self.through(block)):
            self.states[i] = state

    def perplexity(self) -> float:
        """Of the samples, at the end of the way."""
        model, loss = self.model, 0.0
        states = torch.cat(self.states).view(*self.samples.shape, -1)
        for ids, state in zip(self.samples, states, strict=True):
            logits = model.logits(model.kernels.norm(state[:-1].contiguous(), model.norm, state.dtype))
            loss += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        return exp(loss / self.samples[:, 1:].numel())


class _Walks:
    """Text to calibrate on; and text that is held back, once in the model as it was, once as it becomes."""

    def __init__(self, model: Transformer, text: Tensor):
        held = len(text) // (HELD_BACK + 1)
        self.blocks = [cast(Block, block) for block in model.blocks]
        unfuse(model)
        self.text = _Walk(model, text[held:])
        self.before, self.after = _Walk(model, text[:held]), _Walk(model, text[:held])

    def measure(self, block: Block, paths: Iterable[str]) -> dict[str, Tensor]:
        """`X^T X` of the inputs `X` of the layers at `paths`, less those that the text does not come to.

        To be called before the block is changed; `advance` after.
        """
        self.before.advance(block)
        sums: dict[str, Tensor] = {}

        def add(path: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].float()
            if path not in sums:
                sums[path] = x.new_zeros(x.shape[1], x.shape[1])
            sums[path].addmm_(x.t(), x)

        hooks = [block.get_submodule(path).register_forward_pre_hook(partial(add, path)) for path in paths]
        for _ in self.text.through(block):
            pass
        for hook in hooks:
            hook.remove()
        return sums

    def advance(self, block: Block) -> None:
        """Go on to the next block."""
        self.text.advance(block)
        self.after.advance(block)

    def perplexity(self) -> tuple[float, float] | None:
        """See `Report`."""
        return (self.before.perplexity(), self.after.perplexity()) if len(self.before.samples) else None


# files


def _copy_tensors(names: TensorNames, modules: Iterable[str], writer: CheckpointWriter) -> set[str]:
    """Copy what stays as it is. Returns the matrices among it that may be linear layers."""
    replaced = {f"{part}.weight" for module in modules for part in names.of(module)}
    kept = {"lm_head"}  # also where it is tied, and no tensor of its own
    with names.checkpoint.open() as read:
        for name in sorted(names.all - replaced):
            tensor = read(name)
            writer.add({name: tensor})
            if tensor.dim() == 2 and name not in names.require("embedding"):
                kept.add(name.removesuffix(".weight"))
    return kept


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
