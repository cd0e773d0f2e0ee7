"""GGUF files of Qwen3.5, as llama.cpp's converter writes them, against the models that they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import array, load, random_oracle, random_tokens, run
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mtp_targets import in_module, save_with_mtp
from safetensors.torch import load_file
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

ARCHITECTURES = {"qwen3_5": gguf.MODEL_ARCH.QWEN35, "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE}


def tiled(heads: Tensor, c: Any) -> Tensor:
    """Value heads, grouped by key head along the first dimension, in the order of the converter."""
    group = c.linear_num_value_heads // c.linear_num_key_heads
    parts = heads.reshape(c.linear_num_key_heads, group, -1, *heads.shape[1:])
    return parts.transpose(0, 1).reshape(heads.shape)


def converted(name: str, tensor: Tensor, c: Any) -> Tensor:
    """A tensor of transformers' as the file stores it."""
    part = name.rpartition("linear_attn.")[2]
    keys = 2 * c.linear_num_key_heads * c.linear_key_head_dim
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = tensor[:, 0] if part.startswith("conv1d") else tensor
        return torch.cat([rows[:keys], tiled(rows[keys:], c)])
    if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias"):
        return tiled(tensor, c)
    if part == "A_log":
        return -tiled(tensor, c).exp()
    if part == "out_proj.weight":
        return tiled(tensor.t(), c).t()
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    if name.endswith("norm.weight") and part != "norm.weight":
        return tensor + 1
    return tensor


def write(path: Path, name: str, source: Path, c: Any, kind: str = "F32", modules: int = 0) -> None:
    arch = ARCHITECTURES[name]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(c.num_hidden_layers + modules)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(c.head_dim * 0.25))
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
    writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[arch]}.full_attention_interval", 4)
    if name == "qwen3_5":
        writer.add_feed_forward_length(c.intermediate_size)
    else:
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if modules:
        writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[arch]}.nextn_predict_layers", modules)
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers + modules)
    stacks: dict[str, list[Tensor]] = {}
    for full, tensor in in_module(load_file(source / "model.safetensors"), c.num_hidden_layers).items():
        stem, _, part = full.partition(".experts.")
        if part:
            stacks.setdefault(f"{stem}.experts.{part.partition('.')[2]}", []).append(tensor)
        else:
            stacks[full] = [converted(full, tensor, c)]
    for full, tensors in stacks.items():
        tensor = torch.stack(tensors) if ".experts." in full else tensors[0]
        named = full.replace("dt_bias", "dt_proj.bias")
        stored = full if "nextn" in full else names.get_name(named, try_suffixes=(".weight", ".bias"))
        assert stored is not None, full
        rounded = (
            kind if tensor.ndim > 1 and "ssm_conv1d" not in stored and tensor.shape[-1] % 32 == 0 else "F32"
        )
        data = tensor.contiguous().numpy()
        if rounded != "F32":
            data = quantize(data, GGMLQuantizationType[rounded])
        writer.add_tensor(stored, data, raw_dtype=GGMLQuantizationType[rounded])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("modules", [0, 1])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_original(name: str, modules: int, tmp_path: Path) -> None:
    changes = {"attention_bias": False, "linear_num_value_heads": 6}
    if modules:
        oracle, _ = save_with_mtp(tmp_path, name, **changes)
    else:
        oracle = random_oracle(name, **changes)
        oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", name, tmp_path, oracle.config, modules=modules)
    model = load_model(open_checkpoint(tmp_path / "model.gguf"), "float32")
    (tokens,) = random_tokens(np.random.default_rng(0), 60)
    rows = [Rows(array(tokens), 0)]
    (ours, *_), (expected, *_) = run(model, rows)[0], run(load(tmp_path), rows)[0]
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_run_as_integers(name: str, tmp_path: Path) -> None:
    oracle = random_oracle(name, attention_bias=False, intermediate_size=96, moe_intermediate_size=32)
    oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", name, tmp_path, oracle.config, "Q8_0")
    model = load_model(open_checkpoint(tmp_path / "model.gguf"), "auto")
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    rows = [Rows(array(tokens), 0)]
    (ours, *_), (expected, *_) = run(model, rows)[0], run(load(tmp_path), rows)[0]
    assert (ours - expected).norm() < 0.2 * expected.norm()


def test_rates_that_are_no_decay(tmp_path: Path) -> None:
    oracle = random_oracle("qwen3_5_tied")
    oracle.model.layers[0].linear_attn.A_log.data[1] = torch.nan
    oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", "qwen3_5", tmp_path, oracle.config)
    with pytest.raises(ModelError, match="ssm_a"):
        load_model(open_checkpoint(tmp_path / "model.gguf"), "float32")
