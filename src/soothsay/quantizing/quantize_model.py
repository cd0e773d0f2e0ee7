"""Quantizes a model: from one Hugging Face directory to another, with linear layers in 8 or 4 bits.

The result is an ordinary directory in the format of compressed-tensors, which other engines load too.
Embeddings, the output head, norms and routers keep their type. Calibration text is read from a file, or
written by the model itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.params import SamplingParams
from soothsay.corpus import as_entry, encode_entry, encode_text, has_lines, read_items, read_text
from soothsay.errors import ModelError, RequestError
from soothsay.llm import LLM
from soothsay.model.formats.compressed_tensors import Scheme
from soothsay.model.formats.declared import open_format
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import Checkpoint, read_model_config
from soothsay.model.weights.load import load_model
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.model.weights.writing import CheckpointWriter, require_free, writing
from soothsay.progress import tell_progress
from soothsay.quantizing.quantized_layers import (
    CalibrationRun,
    compensate_layers,
    layers_to_quantize,
    round_layers,
)
from soothsay.tokenizer import Tokenizer

AT_ONCE = 32
"""Samples that the model writes together."""


def read_samples(file: Path, tokenizer: Tokenizer | None, count: int, tokens: int) -> Tensor:
    """Read up to `count` samples of `tokens` tokens from a file.

    A file named `.jsonl` or `.json` has entries as `soothsay.corpus.as_entry` reads them. Any other file is
    one plain text. A name that ends in `.gz` says that the file is compressed. The texts are shuffled, joined
    and cut into samples.

    Returns:
        `[n, tokens]` int64.

    Raises:
        RequestError: a line cannot be used (the message has its number), the file has less than one sample,
            or there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(f"{file} cannot be used: the model has no tokenizer")
    ids = list(islice(chain.from_iterable(_texts(file, tokenizer)), count * tokens))
    whole = min(len(ids) // tokens, count)
    if not whole:
        raise RequestError(f"{file} has {len(ids)} tokens, less than one sample of {tokens}")
    return torch.tensor(ids[: whole * tokens]).view(whole, tokens)


def write_samples(model: Transformer, tokenizer: Tokenizer | None, count: int, tokens: int) -> Tensor:
    """Let the model write `count` samples of `tokens` tokens. Each call writes the same samples.

    A sample begins with a random token, in a user's message if there is a chat template. The model goes on at
    temperature 1. The text has the distribution that the model has learned, and no data is needed (LLM-QAT,
    Liu et al. 2023, arXiv 2305.17888).

    Returns:
        `[count, tokens]` int64.
    """
    config = EngineConfig(
        max_context=tokens, max_requests=AT_ONCE, kv_tokens=AT_ONCE * (tokens + 16), prefix_caching=False
    )
    llm = LLM(model, tokenizer=tokenizer, drafter="none", config=config)
    samples: list[list[int]] = []
    for first in range(0, count, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, count))
        prompts = [_opening(llm, seed)[: tokens - 1] for seed in seeds]
        streams = [
            llm.stream(prompt, SamplingParams(seed=seed, max_tokens=tokens - len(prompt)))
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]
        for written, _ in enumerate(streams[0], 1):  # each step adds a token to every stream
            done = first * tokens + (len(prompts[0]) + written) * len(streams)
            tell_progress("writing calibration text", done, count * tokens)
        samples += [
            [*prompt, *stream.choice.token_ids] for prompt, stream in zip(prompts, streams, strict=True)
        ]
    return torch.tensor(samples)


def _opening(llm: LLM, seed: int) -> list[int]:
    """The tokens that a sample begins with."""
    token = random.Random(seed).randrange(llm.model.spec.vocab_size)
    if llm.tokenizer is None:
        return [token]
    word = llm.tokenizer.decode([token])
    if llm.tokenizer.has_chat_template:
        return llm.chat_prompt([{"role": "user", "content": word}])
    return llm.tokenizer.encode(word) or [token]


def _texts(file: Path, tokenizer: Tokenizer) -> Iterator[Iterable[int]]:
    """The token ids of each text."""
    if not has_lines(file):
        yield encode_text(read_text(file), tokenizer)
        return
    items = list(read_items(file))
    random.Random(0).shuffle(items)  # files are often sorted by source
    for where, item in items:
        try:
            yield encode_entry(as_entry(item), tokenizer, add_generation_prompt=False)
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from None


IntDType = Literal["int8", "int4"]
Method = Literal["gptq", "round"]

GROUP_SIZES = (128, 64, 32)
"""Numbers of inputs that may share a scale in int4."""

HELD_OUT = 8
"""For each `HELD_OUT` samples, one more is taken and held out, to measure perplexity."""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What `quantize` did to a model."""

    scheme: Scheme
    method: Method
    errors: Mapping[str, list[float]]
    """Relative errors (root mean square) of all layers, by kind of layer, such as `attention.qkv`. "gptq": of
    the outputs for calibration text. "round": of the weights."""

    bytes_before: int
    bytes_after: int
    perplexity: tuple[float, float] | None
    """Perplexity of held-out calibration text, before and after. "After" has integers as weights only, not as
    activations. None: nothing was held out."""


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
) -> QuantizationReport:
    """Write a copy of a model with weights in integers.

    Args:
        checkpoint: a Hugging Face directory that is not quantized.
        out: a directory that is empty or does not exist. It appears only when it is complete.
        dtype: "int8": a scale for each output channel, for products with activations in int8. "int4": a scale
            for each group of inputs.
        group_size: for int4: 128, 64 or 32. If it does not divide the inputs of all layers, the largest
            smaller one that does.
        method: "round" takes the nearest integers, and is the default for int8. "gptq" corrects the errors of
            rounding on calibration text, and is the default for int4.
        calibration: a file with this text, see `read_samples`. None: the model writes it.
        samples: number of pieces of calibration text.
        tokens: tokens in a piece.

    Raises:
        ModelError: the model cannot be quantized in this way, or `out` is in use.
        RequestError: the calibration text cannot be used.
    """
    require_free(out)
    names, scheme = _plan(checkpoint, dtype, group_size)
    modules = list(layers_to_quantize(names.spec))
    method, run = method or ("gptq" if dtype == "int4" else "round"), None
    if method == "gptq":
        run = _calibration_run(checkpoint, names.spec, calibration, samples, tokens)
        layers = compensate_layers(names, scheme, modules, run)
    elif calibration is not None:
        raise RequestError("rounding takes no calibration text; leave it out, or choose the method gptq")
    else:
        layers = round_layers(names, scheme, modules)
    errors: dict[str, list[float]] = {}
    with writing(out) as writer:
        for done, layer in enumerate(layers, 1):
            for name, weight in layer.parts.items():
                writer.add(scheme.write(weight, name))
            errors.setdefault(layer.kind, []).append(layer.error)
            tell_progress("quantizing", done, len(modules))
        quantization = scheme.config(_copy_tensors(names, modules, writer))
        writer.finish(checkpoint, {**checkpoint.config, "quantization_config": quantization})
    return QuantizationReport(
        scheme=scheme,
        method=method,
        errors=errors,
        bytes_before=_bytes(checkpoint.path),
        bytes_after=_bytes(out),
        perplexity=None if run is None else run.perplexity(),
    )


def _plan(checkpoint: Checkpoint, dtype: str, group_size: int) -> tuple[TensorNames, Scheme]:
    """Choose how layers are stored. Raises `ModelError` if the model cannot be quantized in this way."""
    path = checkpoint.path
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a Hugging Face directory, which is what can be quantized: give one, or "
            "OWNER/NAME on the hub, with weights in .safetensors. A .gguf file is quantized already"
        )
    stored = open_format(checkpoint.config, path)
    if stored is not None:
        raise ModelError(
            f"{path} is quantized already, to {stored.name}; take the model that it was made from"
        )
    names = TensorNames(read_model_config(checkpoint), checkpoint)
    if dtype == "int8":
        return names, Scheme(8, packed=False)
    if dtype != "int4":
        raise ModelError(f"dtype {dtype!r} is not one to quantize to; choose int8 or int4")
    if group_size not in GROUP_SIZES:
        raise ModelError(f"groups of {group_size} are not possible; choose one of {GROUP_SIZES}")
    inputs = layers_to_quantize(names.spec)
    for size in GROUP_SIZES:
        if size <= group_size and not any(count % size for count in inputs.values()):
            return names, Scheme(4, size)
    module, count = next((m, n) for m, n in inputs.items() if n % GROUP_SIZES[-1])
    raise ModelError(
        f"{path}: the {count} inputs of {module} cannot be cut into groups of {group_size} or fewer, down to "
        f"{GROUP_SIZES[-1]}; choose int8, which has none"
    )


def _calibration_run(
    checkpoint: Checkpoint, spec: ModelSpec, file: Path | None, samples: int, tokens: int
) -> CalibrationRun:
    """A model with its calibration text. Raises `RequestError` if there is none, or it does not fit."""
    if spec.num_sharing_layers or spec.embedding.layers is not None:
        raise ModelError(
            f"{checkpoint.path}: its layers do not only read the layer before (shared keys and values, "
            "or embeddings of their own), so they cannot be calibrated one by one: choose method round"
        )
    model, tokenizer, count = load_model(checkpoint), checkpoint.tokenizer(), samples + samples // HELD_OUT
    if not 2 <= tokens <= spec.max_positions:
        raise RequestError(
            f"samples of {tokens} tokens are not possible: this model takes 2 to {spec.max_positions}"
        )
    if file is None:
        return CalibrationRun(model, write_samples(model, tokenizer, count, tokens), HELD_OUT)
    return CalibrationRun(model, read_samples(file, tokenizer, count, tokens), HELD_OUT)


def _copy_tensors(names: TensorNames, modules: Iterable[str], writer: CheckpointWriter) -> set[str]:
    """Copy the tensors that do not change. Returns the matrices among them that may be linear layers."""
    replaced = {f"{part}.weight" for module in modules for part in names.of(module)}
    kept = {"lm_head"}  # also where the head is tied to the embedding and has no tensor
    with names.checkpoint.open() as read:
        for name in sorted(names.all - replaced):
            tensor = read(name)
            writer.add({name: tensor})
            if tensor.dim() == 2 and name not in names.require("embedding"):
                kept.add(name.removesuffix(".weight"))
    return kept


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
