"""GGUF files of several architectures, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import EXPERTS, VOCAB, array, random_oracle, random_tokens, read_config, run
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mtp_targets import in_module
from safetensors.torch import load_file
from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.formats.gguf_tokenizer import build_tokenizer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model

Named = Iterator[tuple[str, Tensor]]


def common(writer: GGUFWriter, c: Any) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_feed_forward_length(c.intermediate_size)


def experts(writer: GGUFWriter, count: int, chosen: int, size: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(chosen)
    writer.add_expert_feed_forward_length(size)


def gemma4(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    local = [kind == "sliding_attention" for kind in c.layer_types]
    own = getattr(c, "per_layer_config", {})  # of layers without a window
    full = own.get(str(local.index(False)), {})
    size = full.get("head_dim") or c.global_head_dim
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(c.head_dim)
    writer.add_value_length_swa(c.head_dim)
    writer.add_rope_dimension_count(size)
    count = full.get("num_key_value_heads", c.num_key_value_heads)
    writer.add_head_count_kv([c.num_key_value_heads if is_local else count for is_local in local])
    shared = c.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    if c.use_double_wide_mlp:
        wide = [c.intermediate_size * (1 + (i >= len(local) - shared)) for i in range(len(local))]
        writer.add_feed_forward_length(wide)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(local)
    writer.add_final_logit_softcapping(c.final_logit_softcapping)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    if c.enable_moe_block:
        experts(writer, c.num_experts, c.top_k_experts, c.moe_intermediate_size)
    turning = int(size * 0.25 / 2)
    writer.add_tensor("rope_freqs.weight", np.float32([1.0] * turning + [1e30] * (size // 2 - turning)))


def gemma4_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for name, tensor in tensors.items():
        if name.endswith("router.scale"):
            yield f"blk.{name.split('.')[2]}.ffn_gate_inp.scale", tensor
        elif name.endswith("per_expert_scale"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.scale", tensor
        else:
            yield name if name.endswith(".weight") else f"{name}.weight", tensor


def gemma3n(writer: GGUFWriter, c: Any) -> None:
    sizes, c.intermediate_size = c.intermediate_size, c.intermediate_size[0]
    common(writer, c)
    writer.add_feed_forward_length(sizes)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input)
    writer.add_altup_active_idx(c.altup_active_idx)
    writer.add_altup_num_inputs(c.altup_num_inputs)
    shares = torch.tensor(c.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_final_logit_softcapping(c.final_logit_softcapping)


def gemma3n_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    stacks = dict[str, list[Tensor]]()
    for name, tensor in sorted(tensors.items()):
        if "altup" in name and "projections" in name:
            stacks.setdefault(name.rsplit(".", 2)[0], []).append(tensor)
        else:
            yield name if name.endswith(".weight") else f"{name}.weight", tensor
    yield from ((f"{name}.weight", torch.stack(parts)) for name, parts in stacks.items())


def llama4(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    writer.add_feed_forward_length(c.intermediate_size_mlp)
    experts(writer, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    writer.add_interleave_moe_layer_step(c.interleave_moe_layer_step)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    rates = 1e4 ** -(torch.arange(0, c.head_dim, 2).double() / c.head_dim)
    turning = 2 * torch.pi / rates < 32  # the original context over both factors, which are 1
    writer.add_tensor("rope_freqs.weight", torch.where(turning, 1.0, 8.0).float().numpy())


def llama4_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            gate, up = tensor.transpose(1, 2).chunk(2, 1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.transpose(1, 2)
        else:
            yield name, tensor


def minimax_m2(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    experts(writer, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim // 2)


def glm4_moe(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    experts(writer, c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(c.head_dim * c.rope_parameters["partial_rotary_factor"]))


def mixture(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of families whose experts are like DeepSeek-V3's, or have other names in config.json."""

    def found(*names: str, default: Any = None) -> Any:
        return next((getattr(c, name) for name in names if hasattr(c, name)), default)

    c.head_dim = found("head_dim") or c.hidden_size // c.num_attention_heads
    common(writer, c)
    size, count = c.moe_intermediate_size, found("n_routed_experts", "moe_num_experts", "num_experts")
    experts(writer, count, found("num_experts_per_tok", "moe_k", "moe_topk"), size)
    writer.add_expert_shared_count(found("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"))
    dense = c.mlp_layer_types.count("dense") if hasattr(c, "mlp_layer_types") else None
    writer.add_leading_dense_block_count(
        found("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", default=dense)
    )
    writer.add_interleave_moe_layer_step(found("moe_layer_interval", default=1))
    writer.add_expert_weights_scale(found("routed_scaling_factor", "route_scale", default=1.0))
    writer.add_expert_weights_norm(found("norm_topk_prob", default=True))
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if found("sliding_window"):
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def hy3(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of Hunyuan 3, which do not say how many layers are dense."""
    common(writer, c)
    experts(writer, c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.num_shared_experts * c.moe_intermediate_size)
    writer.add_expert_weights_scale(c.router_scaling_factor)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])


def mellum(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of Mellum 2: layers with a window have a base of their own, and no YaRN."""
    full, local = (c.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    c.rope_parameters = full
    close_to_llama(writer, c)
    experts(writer, c.num_local_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(full["factor"])
    writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])


def chatglm(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of GLM-4: half of each head rotates."""
    close_to_llama(writer, c)
    writer.add_rope_dimension_count(c.head_dim // 2)


def in_one_matrix(tensors: dict[str, Tensor], c: Any) -> Named:
    """Queries, keys and values in one matrix, as in the files of GLM-4's own code."""
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            block, end = f"blk.{name.split('.')[2]}", name.rsplit(".")[-1]
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            yield f"{block}.attn_qkv.{end}", torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            yield name, tensor


def hunyuan_moe(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    experts(writer, c.num_experts, c.moe_topk, c.intermediate_size)
    rope, size = c.rope_parameters, c.head_dim
    writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)))


def granite(writer: GGUFWriter, c: Any) -> None:
    c.head_dim = c.hidden_size // c.num_attention_heads
    common(writer, c)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_attention_scale(c.attention_multiplier)
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)
    if c.num_local_experts:
        experts(writer, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    if c.model_type == "granitemoe":
        return
    if c.num_local_experts:
        writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)
    else:
        writer.add_feed_forward_length(c.shared_intermediate_size)
    kept = [c.num_key_value_heads * (kind == "full_attention") for kind in c.layer_types]
    writer.add_head_count_kv(kept)
    writer.add_rope_scaling_finetuned(c.position_embedding_type == "rope")
    mamba2(writer, c, c.mamba_expand * c.hidden_size)


def bamba(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of Bamba, which is a Granite without multipliers."""
    c.head_dim, c.num_local_experts = c.hidden_size // c.num_attention_heads, 0
    common(writer, c)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim // 2)
    attends = [layer in c.attn_layer_indices for layer in range(c.num_hidden_layers)]
    writer.add_head_count_kv([c.num_key_value_heads * has for has in attends])
    writer.add_rope_scaling_finetuned(True)
    mamba2(writer, c, c.mamba_expand * c.hidden_size)


def minicpm(writer: GGUFWriter, c: Any) -> None:
    """Multipliers as in Granite, but for scores."""
    close_to_llama(writer, c)
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)


def interleaved(tensors: dict[str, Tensor], c: Any) -> Named:
    c.num_local_experts = 0
    yield from granite_tensors(tensors, c)


def mamba2(writer: GGUFWriter, c: Any, size: int) -> None:
    writer.add_ssm_conv_kernel(c.mamba_d_conv)
    writer.add_ssm_state_size(c.mamba_d_state)
    writer.add_ssm_group_count(c.mamba_n_groups)
    writer.add_ssm_inner_size(size)
    writer.add_ssm_time_step_rank(c.mamba_n_heads)


def granite_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for full, tensor in tensors.items():
        block = f"blk.{full.split('.')[2]}" if ".layers." in full else ""
        beside = "_shexp" if c.num_local_experts else ""
        if full.endswith("input_linear.weight"):
            kind = "_exps" if "block_sparse" in full else beside
            gate, up = tensor.chunk(2, dim=-2)
            yield f"{block}.ffn_gate{kind}.weight", gate
            yield f"{block}.ffn_up{kind}.weight", up
        elif full.endswith("shared_mlp.output_linear.weight"):
            yield f"{block}.ffn_down{beside}.weight", tensor
        elif full.endswith(("q_proj.weight", "k_proj.weight")):
            heads = c.num_attention_heads if "q_proj" in full else c.num_key_value_heads
            halves = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
            yield full, halves.reshape(tensor.shape)
        else:
            yield mamba2_tensor(full, tensor, c)


def mamba2_tensor(full: str, tensor: Tensor, c: Any) -> tuple[str, Tensor]:
    block = f"blk.{full.split('.')[2]}" if ".layers." in full else ""
    if full.endswith("A_log"):
        return f"{block}.ssm_a", -tensor.exp()[:, None]
    if full.endswith(".D"):
        return f"{block}.ssm_d", tensor[:, None]
    if full.endswith("conv1d.weight"):
        return full, tensor[:, 0]
    if full.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = c.n_groups if "mixer" in full else c.mamba_n_groups
        return full, tensor.view(groups, -1)
    return full.replace("dt_bias", "dt_proj.bias"), tensor


def falcon_h1(writer: GGUFWriter, c: Any) -> None:
    c.head_dim = c.hidden_size // c.num_attention_heads
    common(writer, c)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    mamba2(writer, c, c.mamba_d_ssm)


def falcon_h1_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    """All multipliers are in the weights."""
    shared = [c.mamba_n_groups * c.mamba_d_state] * 2
    sizes = torch.tensor([c.mamba_d_ssm, c.mamba_d_ssm, *shared, c.mamba_n_heads])
    factors = {
        "in_proj": c.ssm_in_multiplier * torch.tensor(c.ssm_multipliers).repeat_interleave(sizes)[:, None],
        "out_proj": c.ssm_out_multiplier,
        "q_proj": c.attention_in_multiplier,
        "k_proj": c.attention_in_multiplier * c.key_multiplier,
        "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier,
        "gate_proj": c.mlp_multipliers[0],
        "down_proj": c.mlp_multipliers[1],
        "embed_tokens": c.embedding_multiplier,
        "lm_head": c.lm_head_multiplier,
    }
    for full, tensor in tensors.items():
        factor = factors.get(full.removesuffix(".weight").rpartition(".")[2])
        yield mamba2_tensor(full, tensor if factor is None else tensor * factor, c)


def nemotron_h(writer: GGUFWriter, c: Any) -> None:
    c.num_hidden_layers, c.rms_norm_eps = len(c.layers_block_type), c.layer_norm_epsilon
    common(writer, c)
    has_experts = "moe" in c.layers_block_type
    size = c.moe_intermediate_size if has_experts else c.intermediate_size
    sizes = {"mlp": c.intermediate_size, "moe": size}
    writer.add_feed_forward_length([sizes.get(kind, 0) for kind in c.layers_block_type])
    kept = [c.num_key_value_heads * (kind == "full_attention") for kind in c.layers_block_type]
    writer.add_head_count_kv(kept)
    writer.add_rope_dimension_count(20)  # of no meaning
    writer.add_ssm_conv_kernel(c.conv_kernel)
    writer.add_ssm_state_size(c.ssm_state_size)
    writer.add_ssm_group_count(c.n_groups)
    writer.add_ssm_inner_size(c.mamba_num_heads * c.mamba_head_dim)
    writer.add_ssm_time_step_rank(c.mamba_num_heads)
    if has_experts:
        experts(writer, c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(c.norm_topk_prob)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_group_count(c.n_group)
        writer.add_moe_latent_size(c.moe_latent_size)


def mamba2_alone(writer: GGUFWriter, c: Any) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(2**20)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(c.conv_kernel)
    writer.add_ssm_state_size(c.state_size)
    writer.add_ssm_group_count(c.n_groups)
    writer.add_ssm_inner_size(c.num_heads * c.head_dim)
    writer.add_ssm_time_step_rank(c.num_heads)


def mamba(writer: GGUFWriter, c: Any) -> None:
    size = 2 * c.hidden_size
    mamba_keys(writer, c, c.layer_norm_epsilon, 0)
    writer.add_head_count(0)
    selective(writer, c.conv_kernel, size, c.state_size, c.time_step_rank)
    if c.model_type == "falcon_mamba":
        writer.add_ssm_dt_b_c_rms(True)


def mamba_keys(writer: GGUFWriter, c: Any, eps: float, feed_forward: int) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(getattr(c, "max_position_embeddings", 2**20))
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(feed_forward)
    writer.add_layer_norm_rms_eps(eps)


def selective(writer: GGUFWriter, taps: int, size: int, states: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(size)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(rank)


def jamba(writer: GGUFWriter, c: Any) -> None:
    mamba_keys(writer, c, c.rms_norm_eps, c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    attends = [i % c.attn_layer_period == c.attn_layer_offset for i in range(c.num_hidden_layers)]
    writer.add_head_count_kv([c.num_key_value_heads if has else 0 for has in attends])
    selective(writer, c.mamba_d_conv, 2 * c.hidden_size, c.mamba_d_state, c.mamba_dt_rank)
    if c.num_experts > 1:
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.num_experts_per_tok)


def selective_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for name, tensor in stacked(tensors, c):
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if name.endswith("conv1d.weight"):
            tensor = tensor[:, 0]
        yield name.replace("feed_forward.experts", "mlp.experts") if ".experts." in name else name, tensor


def mamba2_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    yield from (mamba2_tensor(name, tensor, c) for name, tensor in tensors.items())


def glm4_text(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of GLM-4V's text part."""
    close_to_llama(writer, c)
    writer.add_rope_dimension_count(c.head_dim // 2)
    writer.add_rope_dimension_sections([4, 1, 1, 0])


def glm4_text_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    """The first half of each head rotates, and its even dimensions come first."""
    half = c.head_dim // 2
    order = torch.tensor([*range(0, half, 2), *range(1, half, 2), *range(half, c.head_dim)])
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.view(-1, c.head_dim, c.hidden_size)[:, order].reshape(tensor.shape)
        yield name, tensor


def phimoe(writer: GGUFWriter, c: Any) -> None:
    """The converter has no key for the jitter, which is that of all published models."""
    c.head_dim = c.hidden_size // c.num_attention_heads
    common(writer, c)
    experts(writer, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_sliding_window(c.sliding_window)


def phimoe_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    names = {"w1.weight": "gate_proj.weight", "w3.weight": "up_proj.weight", "w2.weight": "down_proj.weight"}
    for name, tensor in stacked(tensors, c):
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        yield name.replace("block_sparse_moe.experts", "mlp.experts"), tensor


def apertus(writer: GGUFWriter, c: Any) -> None:
    c.head_dim = c.hidden_size // c.num_attention_heads
    common(writer, c)
    rope = c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])


def apertus_with(source: Path) -> Write:
    """How Apertus is written: the converter puts the activation's numbers into the metadata."""
    stored = load_file(source / "model.safetensors")

    def describe(writer: GGUFWriter, c: Any) -> None:
        apertus(writer, c)
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            numbers = [
                stored[f"model.layers.{i}.mlp.act_fn.{name}"].item() for i in range(c.num_hidden_layers)
            ]
            getattr(writer, f"add_xielu_{name}")(numbers)

    def named(tensors: dict[str, Tensor], c: Any) -> Named:
        yield from ((name, tensor) for name, tensor in tensors.items() if "act_fn" not in name)

    return gguf.MODEL_ARCH.APERTUS, describe, named


def nemotron_h_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for name, tensor in stacked(tensors, c):
        full = name
        if ".experts." in name:
            full = f"{name.replace('backbone', 'model').replace('mixer', 'mlp')}"
        yield mamba2_tensor(full, tensor, c)


def close_to_llama(writer: GGUFWriter, c: Any) -> None:
    c.head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    common(writer, c)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim)
    if getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def classic(writer: GGUFWriter, c: Any) -> None:
    """Write the keys of families with layer norms, and of others whose files have no rotary base."""
    own = vars(c)
    for ours, theirs in {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon",
    }.items():
        own[ours] = next((own[key] for key in theirs.split() if key in own), own.get(ours))
    if c.model_type == "falcon":
        c.num_key_value_heads = c.num_kv_heads if c.new_decoder_architecture else 1
    size = c.hidden_size // c.num_attention_heads
    c.head_dim = own.get("head_dim") or size
    common(writer, c)
    writer.add_layer_norm_eps(c.rms_norm_eps)
    rope = own.get("rope_parameters") or {}
    if "alpha" in rope:
        size = c.head_dim
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)))
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1) * c.head_dim))
    if "use_parallel_residual" in own:
        writer.add_parallel_residual(c.use_parallel_residual)
    if own.get("clip_qkv"):
        writer.add_clamp_kqv(c.clip_qkv)
    if "num_experts" in own:
        experts(writer, c.num_experts, c.num_experts_per_tok, own.get("moe_intermediate_size", 80))
    if "shared_expert_intermediate_size" in own:
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)


def classic_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    """Rows of queries, keys and values one after the other, and of two heads that rotate by neighbours."""
    for name, tensor in stacked(tensors, c):
        if name.endswith(("query_key_value.weight", "query_key_value.bias")):
            parts = tensor.view(c.num_key_value_heads, -1, c.head_dim, *tensor.shape[1:]).split(
                [c.num_attention_heads // c.num_key_value_heads, 1, 1], 1
            )
            yield name, torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        elif c.model_type in ("olmo", "arcee") and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.view(-1, 2, c.head_dim // 2, tensor.shape[1])
            yield name, heads.transpose(1, 2).reshape(tensor.shape)
        elif c.model_type == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
            yield name, tensor.t()
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor[0]
        elif c.model_type in ("gemma", "nemotron") and name.endswith("norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor


def lfm2(writer: GGUFWriter, c: Any) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([c.num_key_value_heads * (kind != "conv") for kind in c.layer_types])
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_shortconv_l_cache(c.conv_L_cache)
    if c.model_type == "lfm2":
        adjusted = int(2 * c.intermediate_size / 3)
        writer.add_feed_forward_length(-(-adjusted // c.block_multiple_of) * c.block_multiple_of)
    else:
        writer.add_feed_forward_length(c.intermediate_size)
        experts(writer, c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
        writer.add_leading_dense_block_count(c.num_dense_layers)


def lfm2_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    for name, tensor in stacked(tensors, c):
        if name.endswith("conv.conv.weight"):
            yield name, tensor[:, 0]
        else:
            is_stack = ".experts." in name
            renamed = name.removeprefix("model.") if is_stack else name.replace("bias", "bias.bias")
            yield renamed, tensor


def as_stored(tensors: dict[str, Tensor], c: Any) -> Named:
    yield from tensors.items()


def stacked(tensors: dict[str, Tensor], c: Any) -> Named:
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(".experts.")
        if part:
            stacks.setdefault(f"{stem}.experts.{part.partition('.')[2]}", []).append(tensor)
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            yield (f"{name}.bias" if name.endswith("mlp.expert_bias") else name), tensor
    yield from ((name, torch.stack(parts)) for name, parts in stacks.items())


def qwen3_next(writer: GGUFWriter, c: Any) -> None:
    common(writer, c)
    experts(writer, c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(c.head_dim // 4)
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_ssm_state_size(c.linear_key_head_dim)
    writer.add_ssm_group_count(c.linear_num_key_heads)
    writer.add_ssm_time_step_rank(c.linear_num_value_heads)
    writer.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)


def qwen3_next_tensors(tensors: dict[str, Tensor], c: Any) -> Named:
    group = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
    for name, tensor in stacked(tensors, c):
        if name.endswith("in_proj_qkvz.weight"):
            heads = tensor.view(c.linear_num_key_heads, -1, c.hidden_size)
            parts = heads.split([c.linear_key_head_dim, c.linear_key_head_dim, group, group], 1)
            query, key, value, gate = (part.reshape(-1, c.hidden_size) for part in parts)
            layer = name.split(".")[2]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat([query, key, value])
            yield f"blk.{layer}.attn_gate.weight", gate
        elif name.endswith("A_log"):
            yield name, -tensor.exp()
        elif name.endswith("conv1d.weight"):
            yield name, tensor[:, 0]
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor[0]
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            yield name, tensor + 1
        else:
            yield name.replace("dt_bias", "dt_proj.bias"), tensor


Write = tuple[Any, Callable[[GGUFWriter, Any], None], Callable[[dict[str, Tensor], Any], Named]]
"""An architecture, what writes its keys, and its tensors by Hugging Face's names. Where `gguf` does not know
an architecture yet, a pair: its name, and an architecture whose tensors have the same names."""
GEMMA4: Write = (gguf.MODEL_ARCH.GEMMA4, gemma4, gemma4_tensors)
CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "gemma3n": ((gguf.MODEL_ARCH.GEMMA3N, gemma3n, gemma3n_tensors), {"vocab_size_per_layer_input": VOCAB}),
    "gemma4": (GEMMA4, {}),
    "gemma4_keys_are_values": (GEMMA4, {}),
    "gemma4_all": (GEMMA4, {}),
    "llama4": (
        (gguf.MODEL_ARCH.LLAMA4, llama4, llama4_tensors),  # which has no keys for these
        {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layer_interval": 4},
    ),
    "glm4_moe": ((gguf.MODEL_ARCH.GLM4_MOE, glm4_moe, stacked), {}),
    "minimax_m2": ((gguf.MODEL_ARCH.MINIMAXM2, minimax_m2, stacked), {}),
    "dots1": (
        (gguf.MODEL_ARCH.DOTS1, mixture, stacked),
        {"sliding_window": None, "n_group": 1, "topk_group": 1},
    ),
    "afmoe": ((gguf.MODEL_ARCH.AFMOE, mixture, stacked), {}),
    "exaone_moe": ((gguf.MODEL_ARCH.EXAONE_MOE, mixture, stacked), {}),
    "ernie_moe": ((gguf.MODEL_ARCH.ERNIE4_5_MOE, mixture, stacked), {"moe_layer_end_index": -1}),
    "hy3": ((("hy_v3", gguf.MODEL_ARCH.DOTS1), hy3, stacked), {}),
    "mellum": ((("mellum", gguf.MODEL_ARCH.QWEN3MOE), mellum, stacked), {}),
    "glm": ((gguf.MODEL_ARCH.CHATGLM, chatglm, as_stored), {}),
    "jais2": ((gguf.MODEL_ARCH.JAIS2, classic, as_stored), {}),
    "hunyuan_moe": ((gguf.MODEL_ARCH.HUNYUAN_MOE, hunyuan_moe, stacked), {}),
    "exaone": ((gguf.MODEL_ARCH.EXAONE, close_to_llama, as_stored), {}),
    "ernie": ((gguf.MODEL_ARCH.ERNIE4_5, close_to_llama, as_stored), {"use_bias": False}),
    "seed_oss": ((gguf.MODEL_ARCH.SEED_OSS, close_to_llama, as_stored), {}),
    "exaone4": ((gguf.MODEL_ARCH.EXAONE4, close_to_llama, as_stored), {}),
    "exaone4_full": ((gguf.MODEL_ARCH.EXAONE4, close_to_llama, as_stored), {}),
    "granite_moe": ((gguf.MODEL_ARCH.GRANITE_MOE, granite, granite_tensors), {}),
    "granite4_hybrid": ((gguf.MODEL_ARCH.GRANITE_HYBRID, granite, granite_tensors), {}),
    "granite4_experts": ((gguf.MODEL_ARCH.GRANITE_HYBRID, granite, granite_tensors), {}),
    "bamba": ((gguf.MODEL_ARCH.GRANITE_HYBRID, bamba, granite_tensors), {}),
    "falcon_h1": ((gguf.MODEL_ARCH.FALCON_H1, falcon_h1, falcon_h1_tensors), {}),
    "falcon_h1_normed": (
        (gguf.MODEL_ARCH.FALCON_H1, falcon_h1, falcon_h1_tensors),
        {"mamba_norm_before_gate": False},
    ),
    "llama1": ((gguf.MODEL_ARCH.INTERNLM2, close_to_llama, interleaved), {}),
    "granite": (
        (gguf.MODEL_ARCH.MINICPM, minicpm, interleaved),
        {"attention_multiplier": 32**-0.5},
    ),
    "mamba": ((gguf.MODEL_ARCH.MAMBA, mamba, selective_tensors), {}),
    "falcon_mamba": (
        (gguf.MODEL_ARCH.MAMBA, mamba, selective_tensors),
        {"mixer_rms_eps": 1e-3},  # for which the converter has no key
    ),
    "jamba": ((gguf.MODEL_ARCH.JAMBA, jamba, selective_tensors), {}),
    "jamba_dense": ((gguf.MODEL_ARCH.JAMBA, jamba, selective_tensors), {}),
    "mamba2": ((gguf.MODEL_ARCH.MAMBA2, mamba2_alone, mamba2_tensors), {}),
    "mamba2_tied": ((gguf.MODEL_ARCH.MAMBA2, mamba2_alone, mamba2_tensors), {}),
    "glm4": ((gguf.MODEL_ARCH.GLM4, glm4_text, glm4_text_tensors), {}),
    "phimoe": ((gguf.MODEL_ARCH.PHIMOE, phimoe, phimoe_tensors), {"router_jitter_noise": 0.01}),
    "nemotron_h": ((gguf.MODEL_ARCH.NEMOTRON_H, nemotron_h, nemotron_h_tensors), {}),
    "nemotron_h_experts": (
        (gguf.MODEL_ARCH.NEMOTRON_H_MOE, nemotron_h, nemotron_h_tensors),
        {"topk_group": 4},  # for which the converter has no key
    ),
    **{
        name: ((arch, classic, classic_tensors), changes)
        for name, arch, changes in (
            ("starcoder2", gguf.MODEL_ARCH.STARCODER2, {"sliding_window": None}),
            ("stablelm", gguf.MODEL_ARCH.STABLELM, {}),
            ("stablelm_parallel", gguf.MODEL_ARCH.STABLELM, {}),
            ("nemotron", gguf.MODEL_ARCH.NEMOTRON, {}),
            ("arcee", gguf.MODEL_ARCH.ARCEE, {}),
            ("hunyuan", gguf.MODEL_ARCH.HUNYUAN_DENSE, {}),
            ("phi", gguf.MODEL_ARCH.PHI2, {}),
            ("gpt_neox", gguf.MODEL_ARCH.GPTNEOX, {}),
            ("gpt2", gguf.MODEL_ARCH.GPT2, {}),
            ("falcon", gguf.MODEL_ARCH.FALCON, {}),
            ("falcon_groups", gguf.MODEL_ARCH.FALCON, {"bias": False}),
            ("gemma1", gguf.MODEL_ARCH.GEMMA, {}),
            ("olmo1", gguf.MODEL_ARCH.OLMO, {}),
            ("olmoe", gguf.MODEL_ARCH.OLMOE, {}),
            (
                "qwen2_moe",
                gguf.MODEL_ARCH.QWEN2MOE,
                {"mlp_only_layers": [], "use_sliding_window": False},
            ),
        )
    },
    "lfm2": ((gguf.MODEL_ARCH.LFM2, lfm2, lfm2_tensors), {}),
    "lfm2_moe": (
        (gguf.MODEL_ARCH.LFM2MOE, lfm2, lfm2_tensors),
        {"routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    ),
    "qwen3_next": ((gguf.MODEL_ARCH.QWEN3NEXT, qwen3_next, qwen3_next_tensors), {"mlp_only_layers": []}),
}


def write(path: Path, name: str, source: Path, kind: str = "F32") -> None:
    write_as(CASES[name][0], path, source, kind)


def write_as(how: Write, path: Path, source: Path, kind: str = "F32") -> None:
    arch, describe, named = how
    own, arch = arch if isinstance(arch, tuple) else (gguf.MODEL_ARCH_NAMES[arch], arch)
    c = SimpleNamespace(**read_config(source))
    writer = GGUFWriter(path, own)
    describe(writer, c)
    modules = getattr(c, "num_nextn_predict_layers", None) or 0
    if modules:
        writer.add_nextn_predict_layers(modules)
        writer.add_block_count(c.num_hidden_layers + modules)
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers + modules)
    tensors = in_module(load_file(source / "model.safetensors"), c.num_hidden_layers)
    for full, tensor in named(tensors, c):
        stored = full if full.startswith("blk.") else names.get_name(full, try_suffixes=(".weight", ".bias"))
        assert stored is not None, full
        packs = tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "conv" not in stored.split(".")[-2]
        data = tensor.contiguous().numpy()
        used = kind if packs else "F32"
        data = data if used == "F32" else quantize(data, GGMLQuantizationType[used])
        writer.add_tensor(stored, data, raw_dtype=GGMLQuantizationType[used])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = random_oracle(name, **CASES[name][1])
    oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", name, tmp_path)
    (tokens,) = random_tokens(np.random.default_rng(0), 60)
    ours = run(load_model(open_checkpoint(tmp_path / "model.gguf"), "float32"), [Rows(array(tokens), 0)])[0][
        0
    ]
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (ours - expected).abs().max() < 1e-4
    assert expected.std() > 1


def test_queries_keys_and_values_of_glm_4_may_be_one_matrix(tmp_path: Path) -> None:
    random_oracle("glm").save_pretrained(tmp_path)
    write_as((gguf.MODEL_ARCH.CHATGLM, chatglm, in_one_matrix), tmp_path / "model.gguf", tmp_path)
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    ours, expected = (
        run(load_model(open_checkpoint(path), "float32"), [Rows(array(tokens), 0)])[0][0]
        for path in (tmp_path / "model.gguf", tmp_path)
    )
    assert torch.equal(ours, expected)


def test_numbers_of_an_activation_in_the_metadata(tmp_path: Path) -> None:
    oracle = random_oracle("apertus", rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    oracle.save_pretrained(tmp_path)
    arch, describe, named = apertus_with(tmp_path)
    write_as((arch, describe, named), tmp_path / "model.gguf", tmp_path)
    rows = [Rows(array(random_tokens(np.random.default_rng(0), 60)[0]), 0)]
    ours, expected = (
        run(load_model(open_checkpoint(path), "float32"), rows)[0][0]
        for path in (tmp_path / "model.gguf", tmp_path)
    )
    assert (ours - expected).abs().max() < 1e-4

    write_as((arch, apertus, named), tmp_path / "without.gguf", tmp_path)
    with pytest.raises(ModelError, match=r"xielu\.alpha_p should have a number for each of 3 layers"):
        open_checkpoint(tmp_path / "without.gguf")


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_experts", "lfm2"])
def test_an_epsilon_under_the_key_of_the_other_norms(name: str, tmp_path: Path) -> None:
    """As converters write files of models whose config.json has `layer_norm_epsilon` alone."""
    (arch, describe, named), changes = CASES[name]

    def otherwise(writer: GGUFWriter, c: Any) -> None:
        describe(writer, c)
        data, key = writer.kv_data[0], f"{gguf.MODEL_ARCH_NAMES[arch]}.attention.layer_norm_rms_epsilon"
        data[key.replace("_rms", "")] = data.pop(key)

    random_oracle(name, **changes).save_pretrained(tmp_path)
    write(tmp_path / "usual.gguf", name, tmp_path)
    write_as((arch, otherwise, named), tmp_path / "other.gguf", tmp_path)
    usual, other = (open_checkpoint(tmp_path / f"{kind}.gguf") for kind in ("usual", "other"))
    assert read_model_config(other) == read_model_config(usual)


@pytest.mark.parametrize(
    "name",
    ["gemma3n", "gemma4_all", "qwen3_next", "minimax_m2", "lfm2_moe", "granite4_hybrid", "falcon_h1_normed"],
)
def test_blocks_run_as_integers(name: str, tmp_path: Path) -> None:
    """Each token reads all experts of Gemma 4, since rounding would choose others for most tokens."""
    changes = {"top_k_experts": EXPERTS["num_experts"]} if name == "gemma4_all" else CASES[name][1]
    oracle = random_oracle(name, **changes)
    oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", name, tmp_path, "Q8_0")
    checkpoint, original = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path)
    with checkpoint.open() as read, original.open() as read_original:
        names = checkpoint.names() & original.names()
        assert len(names) > 0.8 * len(original.names())
        for each in names:
            expected = read_original(each)
            assert (read(each) - expected).norm() < 0.01 * expected.norm(), each
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    exact, integers = (
        run(load_model(checkpoint, dtype), [Rows(array(tokens), 0)])[0][0] for dtype in ("float32", "auto")
    )
    errors = (integers - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < 0.1  # of most rows: in a few, other experts are chosen


def test_frequencies_that_gemma_4_does_not_have(tmp_path: Path) -> None:
    oracle = random_oracle("gemma4")
    oracle.save_pretrained(tmp_path)
    write(tmp_path / "model.gguf", "gemma4", tmp_path)
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    place = data.index(np.float32([1.0] * 8 + [1e30] * 24).tobytes())
    data[place : place + 4] = np.float32(2.0).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="frequencies that Gemma 4 does not have"):
        open_checkpoint(tmp_path / "model.gguf")


def test_the_tokenizer_of_gemma_4_merges_by_its_list(tmp_path: Path) -> None:
    """Scores say nothing. Characters without a token become bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "c", "▁a", "bc", "▁abc", "ab", "<turn|>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.merges": ["b c", "▁ a", "▁a bc", "a b"],
        "tokenizer.ggml.token_type": np.array([3] * 4 + [6] * 256 + [1] * 8 + [3], np.int32),
        **{f"tokenizer.ggml.{key}_token_id": i for i, key in enumerate(("padding", "eos", "bos", "unknown"))},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = build_tokenizer(metadata, tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("abc abc<turn|>é")
    assert [tokens[i] for i in ids] == ["<bos>", "a", "bc", "▁abc", "<turn|>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "abc abcé"
