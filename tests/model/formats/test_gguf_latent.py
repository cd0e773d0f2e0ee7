"""GGUF files of models with latent attention, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import CASES, array, random_oracle, random_tokens, run
from gguf import GGUFWriter
from mtp_targets import save_with_mtp
from test_gguf_architectures import Named, Write, common, experts, stacked, write_as
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import find_head
from soothsay.drafters.heads.mtp import MTPHead
from soothsay.errors import DrafterError, ModelError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "attention_bias": False,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek_v2_lite": {"n_group": 1, "topk_group": 1},  # without q-lora
    "deepseek_v3": {},
    "deepseek_v3_halves": {"rope_interleave": True},  # without q-lora
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1},
}
SPARSE: dict[str, dict[str, Any]] = {"deepseek_v32": {}, "glm_moe_dsa": {"first_k_dense_replace": 1}}
"""An indexer chooses keys."""


def describe(writer: GGUFWriter, c: Any) -> None:
    """The keys that all files have, the sizes of heads in the cache among them."""
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_feed_forward_length(c.intermediate_size)
    experts(writer, c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    if c.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    if getattr(c, "q_lora_rank", None):
        writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    if top := getattr(c, "index_topk", None):
        writer.add_indexer_top_k(top)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def older(writer: GGUFWriter, c: Any) -> None:
    describe(writer, c)
    writer.add_head_count_kv(c.num_attention_heads)
    writer.add_key_length(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length(c.v_head_dim)


def newer(writer: GGUFWriter, c: Any) -> None:
    describe(writer, c)
    writer.add_head_count_kv(1)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SOFTMAX
        if c.model_type == "deepseek_v2"
        else gguf.ExpertGatingFuncType.SIGMOID
    )


def cut(tensors: dict[str, Tensor], c: Any) -> Named:
    """Matrices of keys and values in two parts, the first one transposed."""
    for name, tensor in stacked(tensors, c):
        if name.endswith("kv_b_proj.weight"):
            keys, values = tensor.view(c.num_attention_heads, -1, c.kv_lora_rank).split(
                [c.qk_nope_head_dim, c.v_head_dim], dim=1
            )
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            yield name, tensor


def minicpm3(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of MiniCPM3, whose multipliers and whose size of values have none."""
    c.head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    common(writer, c)
    writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    for length in ("short", "long"):
        factors = np.float32(c.rope_parameters[f"{length}_factor"])
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


NO_KEYS_FOR = {
    "v_head_dim": 16,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "rope_parameters": {
        **CASES["minicpm3"][1]["rope_parameters"],
        "original_max_position_embeddings": 256,
    },
}
FORMS: dict[str, Write] = {
    "whole": (gguf.MODEL_ARCH.DEEPSEEK2, older, stacked),
    "cut": (gguf.MODEL_ARCH.DEEPSEEK2, newer, cut),
}


def kimi_linear(writer: GGUFWriter, c: Any) -> None:
    """The keys of Kimi Linear: a layer without key-value heads has a delta rule."""
    own = vars(c)
    for usual, theirs in {
        "max_position_embeddings": "model_max_length",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }.items():
        own[usual] = own[theirs]
    own |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": NOTHING_ROTATES}
    own["first_k_dense_replace"] = c.mlp_layer_types.count("dense")
    describe(writer, c)
    attends = [kind == "full_attention" for kind in c.layer_types]
    writer.add_head_count_kv([c.num_key_value_heads if has else 0 for has in attends])
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_kda_head_dim(c.linear_head_dim)


NOTHING_ROTATES = {"rope_type": "default", "rope_theta": 1e4}


def kimi_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    names = {"w1.weight": "gate_proj.weight", "w3.weight": "up_proj.weight", "w2.weight": "down_proj.weight"}
    for name, tensor in cut(tensors, c):
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if "_conv1d" in name:
            tensor = tensor[None]
        if ".experts." in name:
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            name = name.replace("block_sparse_moe", "mlp")
        if name.split("block_sparse_moe.")[-1] in names.values():  # transformers' names of dense parts
            name = name.replace("block_sparse_moe", "mlp")
        yield name.replace("dt_bias", "dt_proj.bias"), tensor


KIMI_SIZES = {"linear_num_heads": 4, "num_expert_group": 1, "topk_group": 1}
"""Sizes for which files have no keys."""
KIMI: Write = (gguf.MODEL_ARCH.KIMI_LINEAR, kimi_linear, kimi_tensors)
WRITTEN = {f"{name} {kind}": (name, form) for name in MODELS for kind, form in FORMS.items()}
WRITTEN |= {name: (name, (gguf.MODEL_ARCH.GLM_DSA, newer, cut)) for name in SPARSE}
WRITTEN["kimi"] = "kimi_linear", KIMI
WRITTEN["minicpm3"] = "minicpm3", (gguf.MODEL_ARCH.MINICPM3, minicpm3, stacked)
OWN = {**MODELS, **SPARSE, "kimi_linear": KIMI_SIZES, "minicpm3": NO_KEYS_FOR}


def save(directory: Path, name: str, form: Write, kind: str = "F32", **changes: Any) -> tuple[Any, Path]:
    """Save a random model as safetensors and as GGUF; return transformers' model, and the latter's path."""
    oracle = random_oracle(name, **{**OWN[name], **changes})
    oracle.save_pretrained(directory)
    path = directory / "gguf" / "model.gguf"
    path.parent.mkdir()
    write_as(form, path, directory, kind)
    return oracle, path


@pytest.mark.parametrize(("name", "form"), WRITTEN.values(), ids=WRITTEN)
def test_logits_are_those_of_transformers(name: str, form: Write, tmp_path: Path) -> None:
    oracle, path = save(tmp_path, name, form)
    (tokens,) = random_tokens(np.random.default_rng(0), 60)
    (ours,) = run(load_model(open_checkpoint(path), "float32"), [Rows(array(tokens), 0)])[0]
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (ours - expected).abs().max() < 1e-4
    assert expected.std() > 1


@pytest.mark.parametrize("form", FORMS)
def test_blocks_run_as_integers(form: str, tmp_path: Path) -> None:
    _, path = save(tmp_path, "deepseek_v3", FORMS[form], "Q8_0", qk_nope_head_dim=32)
    checkpoint, original = open_checkpoint(path), open_checkpoint(tmp_path)
    assert checkpoint.names() == original.names()
    with checkpoint.open() as read, original.open() as read_original:
        for name in checkpoint.names():
            expected = read_original(name)
            assert (read(name) - expected).norm() < 0.01 * expected.norm(), name
    assert sum(count for _, count in checkpoint.stored()) == sum(count for _, count in original.stored())
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    exact, integers = (
        run(load_model(checkpoint, dtype), [Rows(array(tokens), 0)])[0][0] for dtype in ("float32", "auto")
    )
    assert 0 < (integers - exact).norm() < 0.3 * exact.norm()  # experts may be chosen otherwise


def test_the_model_runs_and_its_mtp_module_is_refused(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, "deepseek_v3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    path = tmp_path / "model.gguf"
    write_as(FORMS["cut"], path, tmp_path)
    model = load_model(open_checkpoint(path), "float32")
    assert len(model.blocks) == config["num_hidden_layers"]
    with pytest.raises(DrafterError, match="latent attention"):
        find_head(MTPHead, "", Target(model, None, EngineConfig(max_context=256), 16, path))


def changed(key: str, value: float) -> Write:
    def describe_changed(writer: GGUFWriter, c: Any) -> None:
        newer(writer, c)
        writer.kv_data[0].pop(key, None)
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)

    return gguf.MODEL_ARCH.DEEPSEEK2, describe_changed, cut


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("deepseek2.expert_gating_func", 3, "expert_gating_func 3 is not supported"),
        ("deepseek2.attention.temperature_scale", 0.1, "Mistral Large 3"),
        ("deepseek2.expert_count", 0, "without experts"),
        (
            "deepseek2.attention.value_length_mla",
            39,
            r"v_b_proj.weight \[4, 40, 64\] should be \[4, 39, 64\]",
        ),
        ("deepseek2.attention.key_length_mla", 32, "qk_nope_head_dim is 0"),
    ],
)
def test_files_that_are_refused(key: str, value: float, message: str, tmp_path: Path) -> None:
    _, path = save(tmp_path, "deepseek_v3", changed(key, value))
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)
