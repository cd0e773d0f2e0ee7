"""Formats of 2 to 8 bits, packed here by their published definitions, against transformers on their values.

bitsandbytes: Dettmers et al. 2023, arXiv 2305.14314. HQQ: hqq's `bitpack.py`. MLX: `mx.quantize`.
BitNet: transformers' `pack_weights`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import array, load, random_oracle, run, write_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from soothsay import LLM, ModelError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.weight_format import unpack
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

SIZES = {"hidden_size": 128, "intermediate_size": 96}
Written = dict[str, Tensor]
Packing = Callable[[str, Tensor], tuple[Written, Tensor]]
"""From a module's name and its weight `[out, in]` to its tensors and the weight that they stand for."""

NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
_FP4 = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
FP4 = [value / 12 for value in _FP4 + [-value for value in _FP4]]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed(values: Tensor, bits: int, dtype: Any = np.int32) -> Tensor:
    """Rows of integers as one run of bits each, the lowest first: `[n, m]` -> `[n, m * bits / 32]`."""
    each = values.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    data = np.packbits(each.reshape(len(values), -1), axis=1, bitorder="little")
    return torch.from_numpy(data.view(dtype))


def rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers `[out, in]` from 0, scales and minimums `[out, groups]` in float16."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, minimums = ((high - low) / (2**bits - 1)).half(), low.half()
    values = (
        ((groups - minimums.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 2**bits - 1)
    )
    return values.view_as(weight).to(torch.uint8), scales, minimums


def spread(factors: Tensor, group: int) -> Tensor:
    """A factor for each weight."""
    return factors.float().repeat_interleave(group, 1)


def gptq(bits: int, *, sym: bool = True, reordered: bool = False, group: int = 32, shift: int = 1) -> Packing:
    """`shift` is subtracted from zero points."""

    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        values, scales, minimums = rounded(weight, bits, group)
        zeros = (-minimums.float() / scales.float()).round().clamp(1, 2**bits - 1).to(torch.uint8)
        if sym:
            middle = 2 ** (bits - 1)
            scales = (weight.view(len(weight), -1, group).abs().amax(-1) / middle).half()
            values = (
                (weight / spread(scales, group)).round().add(middle).clamp(0, 2 * middle - 1).to(torch.uint8)
            )
            zeros.fill_(middle)
        groups = torch.arange(weight.shape[1]) // group
        if reordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        stored = {
            "qweight": packed(values, bits).t().contiguous(),
            "qzeros": packed(zeros.t() - shift, bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups.int(),
        }
        exact = (values.float() - zeros.float()[:, groups]) * scales.float()[:, groups]
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact

    return write


def awq(name: str, weight: Tensor) -> tuple[Written, Tensor]:
    values, scales, minimums = rounded(weight, 4, 32)
    zeros = (-minimums.float() / scales.float()).round().clamp(0, 15).to(torch.uint8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(integers: Tensor) -> Tensor:
        return packed(integers.t().reshape(integers.shape[1], -1, 8)[..., order].flatten(1), 4)

    stored = {"qweight": words(values), "qzeros": words(zeros), "scales": scales.t().contiguous()}
    exact = (values.float() - spread(zeros, 32)) * spread(scales, 32)
    return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact


def mlx(bits: int, group: int = 32) -> Packing:
    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        values, scales, biases = rounded(weight, bits, group)
        stored = {"weight": packed(values, bits, np.uint32), "scales": scales, "biases": biases}
        exact = values.float() * spread(scales, group) + spread(biases, group)
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact

    return write


def hqq(bits: int, group: int = 64) -> Packing:
    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        flat = weight.reshape(-1, group)
        values, scales, minimums = rounded(flat, bits, group)
        zeros = (-minimums.float() / scales.float()).half()
        count = 10 if bits == 3 else 8 // bits
        filled = torch.nn.functional.pad(values.int(), (0, 0, 0, -len(values) % count))
        words = sum(part << bits * (count - 1 - i) for i, part in enumerate(filled.chunk(count)))
        assert isinstance(words, Tensor)
        stored = {
            "W_q": words if bits == 3 else words.to(torch.uint8),
            "scale": scales,
            "zero": zeros,
            "shape": torch.tensor(weight.shape),
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "packing": torch.tensor([ord(c) for c in f"{bits}bit_u8"], dtype=torch.uint8),
        }
        exact = (values.float() - zeros.float()) * scales.float()
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, exact.view_as(weight)

    return write


def quantized_4bit(kind: str, *, double: bool = False, dtype: torch.dtype = torch.uint8) -> Packing:
    """Blocks of 64 that run through rows. `dtype`: as which bytes are stored."""

    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(-1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "shape": list(weight.shape)}
        stored = {"quant_map": table}
        if double:
            offset = float(largest.mean())
            nested = torch.linspace(-1, 1, 256)
            parts = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
            scales = parts.abs().amax(1)
            bytes_ = ((parts / scales[:, None])[..., None] - nested).abs().argmin(-1)
            largest = (nested[bytes_] * scales[:, None]).flatten()[: len(largest)] + offset
            stored |= {"absmax": bytes_.flatten()[: len(largest)].to(torch.uint8), "nested_absmax": scales}
            stored |= {"nested_quant_map": nested}
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            stored["absmax"] = largest
        data = (codes.view(-1, 2)[:, 0] << 4 | codes.view(-1, 2)[:, 1]).to(torch.uint8)
        stored[f"quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()]).byte()
        written = {f"{name}.weight.{key}": tensor for key, tensor in stored.items()}
        exact = table[codes] * largest[:, None]
        return {**written, f"{name}.weight": data.view(dtype)[:, None]}, exact.view_as(weight)

    return write


def quantized_8bit(name: str, weight: Tensor) -> tuple[Written, Tensor]:
    largest = weight.abs().amax(1)
    values = (weight * 127 / largest[:, None]).round().to(torch.int8)
    exact = values.float() * largest[:, None] / 127
    return {f"{name}.weight": values, f"{name}.SCB": largest, f"{name}.weight_format": torch.zeros(())}, exact


def four_bit_floats(group: int, names: dict[str, str], whole: Callable[[float], float] | None) -> Packing:
    """`whole`: from the factor of all scales to the number that is stored."""

    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        groups, table, factor = (
            weight.view(len(weight), -1, group),
            torch.tensor(E2M1),
            1.0 if whole is None else 2**-8,
        )
        wanted = groups.abs().amax(-1) / 6
        if group == 32:
            exponents = wanted.log2().ceil()
            scales, stored = 2**exponents, (exponents + 127).to(torch.uint8)
        else:
            stored = (wanted / factor).to(torch.float8_e4m3fn)
            scales = stored.float()
        codes = ((groups / (scales * factor)[..., None])[..., None] - table).abs().argmin(-1).flatten(1)
        held = {names["values"]: packed(codes, 4, np.uint8), names["scales"]: stored}
        if "words" in names:
            held[names["values"]] = packed(codes, 4, np.uint32)
        if whole is not None:
            held[names["whole"]] = torch.tensor([whole(factor)])
        exact = table[codes] * spread(scales * factor, group)
        return {f"{name}.{key}": tensor for key, tensor in held.items()}, exact

    return write


CT = {"values": "weight_packed", "scales": "weight_scale", "whole": "weight_global_scale"}
MODELOPT = {"values": "weight", "scales": "weight_scale", "whole": "weight_scale_2"}
IN_WORDS = {"values": "weight", "scales": "scales", "words": ""}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GPTQ = {"quant_method": "gptq", "group_size": 32, "sym": True, "desc_act": False}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


IN_FP8 = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["model.layers.0.self_attn.q_proj"]}
IN_NVFP4 = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}


def attention_in_fp8(name: str, weight: Tensor) -> tuple[Written, Tensor]:
    """The rest is in NVFP4. Scales of inputs are not used."""
    if "self_attn" not in name:
        return four_bit_floats(16, MODELOPT, lambda factor: factor)(name, weight)
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(())}
    return {f"{name}.{key}": tensor for key, tensor in stored.items()}, values.float() * scale


def bitnet(*, divides: bool) -> Packing:
    def write(name: str, weight: Tensor) -> tuple[Written, Tensor]:
        scale = weight.abs().mean().bfloat16()
        factor = (1 / scale if divides else scale)[None]
        values = (weight / scale.float()).round().clamp(-1, 1)
        held = factor.float().reciprocal() if divides else factor.float()
        quarters = [part.to(torch.uint8) for part in (values + 1).chunk(4)]
        low, second, third, high = quarters
        stored = {"weight": low | second << 2 | third << 4 | high << 6, "weight_scale": factor}
        return {f"{name}.{key}": tensor for key, tensor in stored.items()}, values * held

    return write


def of_hqq(bits: int, group: int | None = 64) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": group, "axis": 1, "channel_wise": True}
    parts = {"weight_quant_params": weights, "scale_quant_params": None, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": parts, "skip_modules": ["lm_head"]}


def of_compressed(format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


CASES: dict[str, tuple[dict[str, Any], Packing, int, str]] = {
    "nf4": (BNB, quantized_4bit("nf4"), 4, "NF4 (bitsandbytes, values rounded to 1 / 112)"),
    "nf4 double": (
        {**BNB, "bnb_4bit_use_double_quant": True},
        quantized_4bit("nf4", double=True, dtype=torch.bfloat16),
        4,
        "NF4 (bitsandbytes, values rounded to 1 / 112)",
    ),
    "fp4": (
        {**BNB, "bnb_4bit_quant_type": "fp4"},
        quantized_4bit("fp4"),
        4,
        "FP4 (bitsandbytes, values rounded to 1 / 120)",
    ),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        quantized_8bit,
        8,
        "INT8 (bitsandbytes)",
    ),
    "gptq 2": ({**GPTQ, "bits": 2}, gptq(2), 2, "int2, groups of 32 (GPTQ)"),
    "gptq 3": ({**GPTQ, "bits": 3}, gptq(3), 4, "int3 in 4 bits, groups of 32 (GPTQ)"),
    "gptq 3 asymmetric": (
        {**GPTQ, "bits": 3, "sym": False},
        gptq(3, sym=False),
        4,
        "int3 in 4 bits, groups of 32 (GPTQ)",
    ),
    "gptq 2 asymmetric": (
        {**GPTQ, "bits": 2, "sym": False},
        gptq(2, sym=False),
        2,
        "int2, groups of 32 (GPTQ)",
    ),
    "gptq reordered": (
        {**GPTQ, "bits": 4, "desc_act": True, "sym": False},
        gptq(4, sym=False, reordered=True),
        8,
        "int4, groups of 32 (GPTQ, int8 in groups of 32 where inputs are reordered)",
    ),
    "auto-round": (
        {**ROUND, "packing_format": "auto_round:auto_gptq"},
        gptq(4),
        4,
        "int4, groups of 32 (GPTQ)",
    ),
    "auto-round asymmetric": (
        {**ROUND, "packing_format": "auto_round", "sym": False, "extra_config": {"lm_head": {"bits": 16}}},
        gptq(4, sym=False, shift=0),
        4,
        "int4, groups of 32 (GPTQ)",
    ),
    "auto-round awq": (
        {**ROUND, "packing_format": "auto_round:auto_awq"},
        awq,
        4,
        "int4, groups of 32 (AWQ)",
    ),
    **{f"hqq {bits}": (of_hqq(bits), hqq(bits), 4 if bits == 3 else bits, "") for bits in (2, 3, 4, 8)},
    "mxfp4": (
        of_compressed("mxfp4-pack-quantized"),
        four_bit_floats(32, CT, None),
        4,
        "MXFP4 (compressed-tensors)",
    ),
    "nvfp4": (
        of_compressed("nvfp4-pack-quantized"),
        four_bit_floats(16, CT, lambda factor: 1 / factor),
        4,
        "NVFP4 (compressed-tensors)",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        four_bit_floats(16, MODELOPT, lambda factor: factor),
        4,
        "NVFP4 (ModelOpt)",
    ),
    "modelopt mixed": (
        {"quant_method": "modelopt", "config_groups": {"a": IN_FP8, "b": IN_NVFP4}},
        attention_in_fp8,
        8,
        "NVFP4 and FP8 in int8 (ModelOpt)",
    ),
    **{
        f"mlx {bits}": ({"group_size": 32, "bits": bits}, mlx(bits), 4 if bits == 3 else bits, "")
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "bitnet": (
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        bitnet(divides=False),
        2,
        "ternary (BitNet)",
    ),
    "bitnet, older": ({"quant_method": "bitnet"}, bitnet(divides=True), 2, "ternary (BitNet)"),
    "mlx mxfp4": (
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        four_bit_floats(32, IN_WORDS, None),
        4,
        "FP4, groups of 32 (MLX)",
    ),
    "mlx nvfp4": (
        {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        four_bit_floats(16, IN_WORDS, None),
        4,
        "FP4, groups of 16 (MLX)",
    ),
}
"""Settings, the packing, bits in memory, and the name; "": it is not tested."""


def key_of(case: str) -> str:
    return "quantization" if case.startswith("mlx") else "quantization_config"


def write(directory: Path, case: str) -> Any:
    """A small Llama whose linear layers are quantized, with MLX all matrices. Returns transformers' model."""
    settings, packing, _, _ = CASES[case]
    oracle, held = random_oracle("llama1", **SIZES), {}
    for name, weight in oracle.state_dict().items():
        stem = name.removesuffix(".weight")
        plain = weight.ndim == 1 or (stem.endswith(("embed_tokens", "lm_head")) and key_of(case)[12:])
        if plain:
            held[name] = weight
            continue
        tensors, exact = packing(stem, weight)
        held |= tensors
        oracle.get_parameter(name).data = exact
    save_file(held, directory / "model.safetensors")
    write_config(directory, {**oracle.config.to_dict(), key_of(case): settings})
    return oracle


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_on_the_files_values(case: str, tmp_path: Path) -> None:
    oracle, tokens = write(tmp_path, case), torch.arange(40) % 97
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    assert expected.std() > 0.1
    logits = run(load(tmp_path), [Rows(tokens.numpy(), 0)])[0][0]
    assert (logits - expected).abs().max() < 2e-4 * max(1.0, float(expected.std()))
    model = load_model(open_checkpoint(tmp_path))
    assert model.bits == CASES[case][2]
    (ours, *_) = run(model, [Rows(tokens.numpy(), 0)])[0]
    assert (ours - expected).norm() < 0.06 * expected.norm()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_integers_of_the_file(case: str, tmp_path: Path) -> None:
    """Bit by bit, but for float16's products, and rounding that the name of the format states."""
    oracle, (settings, _, bits, name) = write(tmp_path, case), CASES[case]
    format = open_format({key_of(case): settings}, tmp_path)
    assert format is not None
    assert not name or format.name == name
    module = "model.layers.1.mlp.down_proj"
    with open_checkpoint(tmp_path).open() as read:
        weight = format.read(read, module)
    exact = oracle.get_parameter(f"{module}.weight").detach()
    if isinstance(weight, Tensor):
        assert case == "gptq reordered"
        assert torch.equal(weight, exact)
        return
    rows = weight.rows(0, weight.shape[0])
    assert rows.bits == (4 if case == "modelopt mixed" else bits)
    torch.testing.assert_close(rows.dequantize(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))
    model = load_model(open_checkpoint(tmp_path))
    layer = model.blocks[1].mlp.down
    if not isinstance(layer, NativeLinear):
        pytest.skip("no native kernels run here")
    assert [part.struct.bits for part in layer.parts] == [rows.bits]
    x = torch.randn(8, exact.shape[1])
    expected = x @ exact.t()
    assert (layer(x).float() - expected).norm() < 0.015 * expected.norm()
    integers = rows.integers().float().view(*rows.scales.shape, -1) * rows.scales[..., None]
    error = integers.view(exact.shape) - exact if rows.minimums is None else torch.zeros(1)
    assert error.norm() < 0.005 * exact.norm()


@pytest.mark.parametrize(
    "case", ["nf4 double", "gptq 3 asymmetric", "gptq reordered", "hqq 2", "nvfp4", "mlx 6"]
)
def test_answers_do_not_depend_on_the_drafter(case: str, tmp_path: Path) -> None:
    write(tmp_path, case)
    llm, prompt = LLM(tmp_path, drafter="none", kv_tokens=512), [*range(20)] * 2
    params = SamplingParams(temperature=1, seed=1, max_tokens=16, logprobs=2, ignore_eos=True)
    plain = llm.generate(prompt, params)
    other = llm.generate([prompt, prompt[:30]], params, drafter="prompt-lookup")[0]
    assert (other.token_ids, other.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_table_of_mlx_stays_packed(tmp_path: Path) -> None:
    """Rows are unpacked when a token needs them. Single modules may have other bits, or be plain."""
    settings = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}, "model.norm": False}
    oracle, held = random_oracle("llama1", **SIZES), {}
    for name, weight in oracle.state_dict().items():
        stem = name.removesuffix(".weight")
        if weight.ndim == 1 or stem.endswith("k_proj"):
            held[name] = weight
            continue
        tensors, exact = (mlx(8, 64) if stem == "lm_head" else mlx(4))(stem, weight)
        held |= tensors
        oracle.get_parameter(name).data = exact
    save_file(held, tmp_path / "model.safetensors")
    write_config(tmp_path, {**oracle.config.to_dict(), "quantization": settings})
    model = load_model(open_checkpoint(tmp_path))
    assert model.embedding.table.data.dtype == torch.uint32  # type: ignore[operator, union-attr]
    tokens = torch.tensor([96, 0, 5, 5])
    torch.testing.assert_close(model.embedding(tokens), oracle.get_input_embeddings().weight[tokens].detach())
    found = open_format({"quantization": settings}, tmp_path)
    assert found is not None
    assert found.name == "int4, groups of 32 and int8, groups of 64 (MLX)"
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    logits = run(load(tmp_path), [Rows(array(tokens.tolist()), 0)])[0][0]
    assert (logits - expected).abs().max() < 2e-4


def test_experts_of_mlx(tmp_path: Path) -> None:
    """Each part of all experts is one stack. The router may have bits of its own."""
    oracle = random_oracle("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    oracle.save_pretrained(tmp_path / "plain")
    stored, stacks, exact = load_file(tmp_path / "plain" / "model.safetensors"), dict[str, list[Tensor]](), {}
    held: Written = {}
    gate = {"group_size": 64, "bits": 8}
    settings: dict[str, Any] = {"group_size": 32, "bits": 4, "model.layers.0.mlp.switch_mlp.up_proj": gate}
    for name in sorted(stored):
        weight, module = stored[name], name.removesuffix(".weight")
        is_gate = module.endswith("mlp.gate") or (
            module.startswith("model.layers.0.mlp.experts") and "up" in module
        )
        if weight.ndim == 1:
            exact[name] = held[name] = weight
            continue
        if module.endswith("mlp.gate"):
            settings[module] = gate
        tensors, exact[name] = (mlx(8, 64) if is_gate else mlx(4))(module, weight)
        for key, tensor in tensors.items():
            if ".experts." in key:
                place, part = key.split(".experts.")
                stacks.setdefault(f"{place}.switch_mlp.{part.split('.', 1)[1]}", []).append(tensor)
            else:
                held[key] = tensor
    (tmp_path / "mlx").mkdir()
    save_file(
        held | {key: torch.stack(stack) for key, stack in stacks.items()},
        tmp_path / "mlx" / "model.safetensors",
    )
    write_config(tmp_path / "mlx", {**oracle.config.to_dict(), "quantization": settings})
    save_file(exact, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    values = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    tokens = torch.arange(30)
    with torch.no_grad():
        expected = values(tokens[None]).logits[0]
    logits = run(load(tmp_path / "mlx"), [Rows(tokens.numpy(), 0)])[0][0]
    assert len(stacks) == 9 * oracle.config.num_hidden_layers
    assert (logits - expected).abs().max() < 2e-4
    (ours, *_) = run(load(tmp_path / "mlx", "auto"), [Rows(tokens.numpy(), 0)])[0]
    errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.06


STATE = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Tensor:
    usual = {"quant_type": "nf4", "blocksize": 64, "shape": [96, 128]}
    return torch.tensor([*json.dumps({**usual, **changes}).encode()]).byte()


@pytest.mark.parametrize(
    "content",
    [
        torch.tensor([*b"[" * 4000]).byte(),
        torch.tensor([*b"[]" * 4000]).byte(),
        torch.tensor([*b"null"]).byte(),
        torch.tensor([255, 254]).byte(),
        torch.zeros(30),
        state(more="x" * 4096),
        state(shape=[96]),
        state(shape=[96, -128]),
        state(shape=[2**30, 2**30]),
        state(shape=[[96], 128]),
        state(shape=[97, 128]),
        state(shape=None),
        state(blocksize=0),
        state(blocksize=32),
        state(blocksize=2**62),
        state(blocksize="64"),
    ],
)
def test_hostile_states_of_bitsandbytes(content: Tensor, tmp_path: Path) -> None:
    write(tmp_path, "nf4")
    tensors = {**load_file(tmp_path / "model.safetensors"), STATE: content}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj: the tensors do not make a weight of NF4"):
        load(tmp_path, "auto")


@pytest.mark.parametrize(
    ("case", "suffix", "change"),
    [
        ("nf4", "weight.absmax", lambda t: t[:-1]),
        ("nf4", "weight.quant_map", lambda t: t * 3),
        ("nf4", "weight.quant_map", lambda t: t * float("nan")),
        ("nf4", "weight", lambda t: t[:-1]),
        ("nf4 double", "weight.nested_absmax", lambda t: torch.cat([t, t])),
        ("nf4 double", "weight.nested_quant_map", lambda t: t[:3]),
        ("int8", "SCB", lambda t: t[:-1]),
        ("gptq 3", "qweight", lambda t: t[:-1]),
        ("gptq 3", "scales", lambda t: t[:-1]),
        ("hqq 4", "W_q", lambda t: t[:-1]),
        ("hqq 4", "W_q", lambda t: torch.cat([t, t])),
        ("hqq 4", "scale", lambda t: t[:-1]),
        ("hqq 3", "shape", lambda t: -t),
        ("hqq 3", "shape", lambda t: t[:1]),
        ("hqq 3", "shape", lambda t: t * 2**40),
        ("nvfp4", "weight_scale", lambda t: t.float()),
        ("nvfp4", "weight_scale", lambda t: t[:, :-1]),
        ("nvfp4", "weight_packed", lambda t: t[:, :-1]),
        ("nvfp4", "weight_global_scale", lambda t: torch.cat([t, t])),
        ("mlx 3", "weight", lambda t: t[:, :-1]),
        ("mlx 4", "weight", lambda t: t.view(torch.int32)),
        ("mlx 4", "scales", lambda t: t[:, :-1]),
        ("mlx 4", "biases", lambda t: t[:-1]),
        ("mlx mxfp4", "scales", lambda t: t.float()),
    ],
)
def test_tensors_that_do_not_fit(
    case: str, suffix: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    write(tmp_path, case)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.up_proj.{suffix}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj"):
        load(tmp_path, "auto")


def test_settings_of_model_optimizer_beside_config_json(tmp_path: Path) -> None:
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    found = open_format({}, tmp_path)
    assert found is not None
    assert found.name == "NVFP4 (ModelOpt)"


def changed(settings: dict[str, Any], *path: str, to: Any) -> dict[str, Any]:
    made = copy.deepcopy(settings)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return made


@pytest.mark.parametrize(
    ("key", "settings", "named"),
    [
        ("quantization_config", {**BNB, "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3'"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "load_in_4bit None"),
        (
            "quantization_config",
            {**ROUND, "packing_format": "auto_round:fp8"},
            "packing_format 'auto_round:fp8'",
        ),
        ("quantization_config", {**ROUND, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ("quantization_config", {**ROUND, "extra_config": {"a.b": {"bits": 8}}}, r"'a\.b' \(extra_config\)"),
        (
            "quantization_config",
            changed(of_hqq(4), "quant_config", "weight_quant_params", "axis", to=0),
            "axis 0",
        ),
        ("quantization_config", of_hqq(1), "nbits 1"),
        ("quantization_config", of_hqq(4, 0), "group_size 0"),
        (
            "quantization_config",
            changed(of_hqq(4), "quant_config", "scale_quant_params", to={"nbits": 8}),
            "scale_quant_params",
        ),
        (
            "quantization_config",
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ'",
        ),
        ("quantization", {"bits": 7, "group_size": 64}, "bits 7"),
        ("quantization", {"bits": 4, "group_size": 0}, "group_size 0"),
        ("quantization", {"bits": 4, "group_size": 64, "mode": "mxfp8"}, "mode 'mxfp8'"),
        ("quantization", {"bits": 4, "group_size": 64, "lm_head": {"bits": 1}}, "bits 1"),
        ("quantization", [4], r"quantization \[4\]"),
    ],
)
def test_what_is_refused_by_name(key: str, settings: Any, named: str) -> None:
    with pytest.raises(ModelError, match=rf"^model .*{named}.*soothsay quantize"):
        open_format({key: settings}, Path("model"))


@pytest.mark.parametrize("format", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_what_the_package_compressed_tensors_packs(format: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = 16 if format.startswith("nv") else 32
    arguments = QuantizationArgs(
        num_bits=4,
        type="float",
        symmetric=True,
        group_size=group,
        strategy="tensor_group" if group == 16 else "group",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    steps = weight.view(8, -1, group).abs().amax(-1) / 6
    state = {"weight": weight, "weight_scale": steps.log2().round().exp2()}
    if group == 16:
        whole = torch.tensor([100.0])
        state |= {
            "weight_scale": (steps * whole).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": whole,
        }
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"].float()
    found = open_format({"quantization_config": of_compressed(format)}, Path("model"))
    assert found is not None
    read = found.read({f"x.{name}": tensor for name, tensor in stored.items()}.__getitem__, "x")
    assert not isinstance(read, Tensor)
    assert (expected - weight).norm() < 0.2 * weight.norm()
    torch.testing.assert_close(
        read.rows(0, 8).dequantize(), expected, rtol=1e-2, atol=0
    )  # theirs is bfloat16


def test_integers_of_3_bits_run_through_words() -> None:
    """As GPTQ's writers pack them: number 10 begins at bit 30 of the first word, 21 at bit 63."""
    values = torch.zeros(1, 32, dtype=torch.uint8)
    values[0, 10], values[0, 21], values[0, 31] = 7, 5, 6
    words = torch.tensor([[3 << 30, 1 | 1 << 31, 2 | 6 << 29]]).to(torch.int32)
    assert torch.equal(unpack(words, 3), values)
