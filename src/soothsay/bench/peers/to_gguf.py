"""Writes GGUF files of Llama-like models for llama.cpp, as its own converter does, but without a vocabulary.

All engines get prompts as token ids, so no engine needs the text.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import quant_shape_to_byte_shape, quantize
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.files import replacing
from soothsay.model.decoder.rope import inverse_frequencies
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.specs.rope_spec import RopeSpec
from soothsay.model.weights.checkpoint import Checkpoint

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(checkpoint: Checkpoint, path: Path, kind: str) -> None:
    """Write a checkpoint with its matrices in GGML's type `kind`: "F32", "BF16", "Q8_0" or "Q4_0".

    Norms and biases are F32. The file appears when it is complete; see `soothsay.files.replacing`.

    Raises `ModelError` for a family, a rotation or a matrix that the format or this writer does not support.
    """
    config = parse_model_config(checkpoint.config)
    arch = ARCHITECTURES.get(config.family)
    rope = config.rotation.rope.kind
    if arch is None or rope not in ("default", "llama3") or any(config.windows):
        raise ModelError(
            f"{checkpoint.path}: GGUF is written of {', '.join(ARCHITECTURES)}, without sliding windows and "
            f"with rotation default or llama3; this is {config.family} with {rope}"
        )
    with replacing(path) as temporary:
        writer = GGUFWriter(temporary, gguf.MODEL_ARCH_NAMES[arch])
        try:
            _add_header(writer, config)
            _add_tensors(writer, checkpoint, arch, Kind[kind])
        finally:
            writer.close()


def _add_tensors(writer: GGUFWriter, checkpoint: Checkpoint, arch: gguf.MODEL_ARCH, kind: Kind) -> None:
    """Write the table of tensors, then the tensors one by one, so that few are in memory."""
    config = parse_model_config(checkpoint.config)
    tensors = _tensors(checkpoint, config, arch, kind)
    with checkpoint.open() as read:
        divisors = _rope_divisors(config)
        if divisors is not None:
            writer.add_tensor("rope_freqs.weight", divisors.numpy())
        for name, (stored, type_) in tensors.items():
            shape = tuple(read(name).shape)
            try:
                shape = quant_shape_to_byte_shape(shape, type_)
            except ValueError as error:
                problem = f"{name} cannot be stored as {type_.name}: {error}"
                raise ModelError(f"{checkpoint.path}: {problem}") from None
            writer.add_tensor_info(stored, shape, np.dtype(np.uint8), math.prod(shape), type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors.numpy())
        for name, (_, type_) in tensors.items():
            values = _interleaved(read(name), name, config) if arch is gguf.MODEL_ARCH.LLAMA else read(name)
            writer.write_tensor_data(quantize(values.float().numpy(), type_).view(np.uint8))


def _add_header(writer: GGUFWriter, config: ModelSpec) -> None:
    attention = config.first(AttentionSpec)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.first(DenseSpec).size)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.size)
    writer.add_value_length(attention.size)
    writer.add_rope_dimension_count(attention.size)
    writer.add_rope_freq_base(attention.rotation.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _rope_divisors(config: ModelSpec) -> Tensor | None:
    """Return Llama 3's scaling of rotary frequencies as divisors, as GGUF stores it."""
    rope, size = config.rotation.rope, config.rotation.size
    if rope.kind == "default":
        return None
    return inverse_frequencies(RopeSpec(rope.theta), size) / inverse_frequencies(rope, size)


def _tensors(
    checkpoint: Checkpoint, config: ModelSpec, arch: gguf.MODEL_ARCH, kind: Kind
) -> dict[str, tuple[str, Kind]]:
    """Return GGUF's name and type of each tensor to write, by our name."""
    names, tensors = gguf.get_tensor_name_map(arch, config.num_layers), {}
    in_head = Kind.Q8_0 if kind is Kind.Q4_0 else kind  # in a 4-bit file the head has 8 bits, as in ours
    for name in sorted(checkpoint.names()):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ModelError(f"{checkpoint.path}: GGUF has no place for {name!r}")
        plain = "norm" in name or not name.endswith(".weight")
        is_head = ("embed_tokens" if config.head.tied else "lm_head") in name
        if name != "lm_head.weight" or not config.head.tied:
            tensors[name] = (stored, Kind.F32 if plain else in_head if is_head else kind)
    return tensors


def _interleaved(tensor: Tensor, name: str, config: ModelSpec) -> Tensor:
    """Reorder the rows of q and k for llama.cpp's rotation: (head, 2, d/2) -> (head, d/2, 2)."""
    attention = config.first(AttentionSpec)
    heads = {"q_proj": attention.heads, "k_proj": attention.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
