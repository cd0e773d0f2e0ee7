"""GGUF files of a tiny model, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValue, GGUFWriter
from gguf.quants import quantize

HIDDEN, LAYERS = 32, 2
SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (64, HIDDEN)),
    "ffn_down": (HIDDEN, 64),
}
TENSORS = 2 + LAYERS * len(SHAPES)


def write_gguf(
    path: Path,
    in_part: int = 0,
    seed: int = 0,
    more: dict[str, GGUFValue] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> list[Path]:
    """Write a tiny Llama with random weights, whole or in parts of `in_part` tensors, and return its files.

    `more` is added to the metadata of the last part. Matrices are of type `kind`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama", split_max_tensors=in_part)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    for name, shape in {"token_embd": (48, HIDDEN), "output_norm": (HIDDEN,), **shapes}.items():
        values = rng.standard_normal(shape, np.float32)
        if len(shape) == 2 and kind is not GGMLQuantizationType.F32:
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    if not in_part:  # the header, which is next, has their number
        writer.kv_data[0].update(more or {})
    writer.write_header_to_file()
    writer.kv_data[-1].update(more or {})
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))
