"""Checkpoints that quantize some layers and leave others in 16 bits: each layer stays as its file has it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import array, load, random_oracle, read_config, run, write_config
from kernels import SETS
from safetensors.torch import save_file
from test_weight_formats import AWQ_ORDER, compressed, pack_rows
from torch import Tensor

from soothsay import LLM, ModelError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.ops.linear import multiplies_bfloat16
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model, weight_bytes
from soothsay.model.weights.numeric_mode import numeric_mode
from soothsay.model.weights.quantized import round_to_nearest
from soothsay.model.weights.tensor_names import TensorNames

GROUP = 32
SIZES = {"hidden_size": 128, "intermediate_size": 96}  # native kernels
Written = dict[str, Tensor]


def integers(weight: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Integers `[out, in]` from 0, and scales `[out, groups]` float16."""
    rounded = round_to_nearest(weight, bits, GROUP)
    return rounded.values.long(), rounded.scales.half()


def gptq(name: str, weight: Tensor) -> Written:
    values, scales = integers(weight)
    groups = torch.arange(weight.shape[1]) // GROUP
    middle = torch.full((scales.shape[1], len(weight)), 7)  # version 1 stores one less
    return {
        f"{name}.qweight": pack_rows(values, 4).t().contiguous(),
        f"{name}.qzeros": pack_rows(middle, 4),
        f"{name}.scales": scales.t().contiguous(),
        f"{name}.g_idx": groups.int(),
        f"{name}.bias": torch.zeros(len(weight)),  # as older writers add to each layer
    }


def awq(name: str, weight: Tensor) -> Written:
    values, scales = integers(weight)
    middle = torch.full((scales.shape[1], len(weight)), 8)
    return {
        f"{name}.qweight": pack_rows(values.t(), 4, AWQ_ORDER),
        f"{name}.qzeros": pack_rows(middle, 4, AWQ_ORDER),
        f"{name}.scales": scales.t().contiguous(),
    }


def packed(name: str, weight: Tensor) -> Written:
    values, scales = integers(weight)
    return {
        f"{name}.weight_packed": pack_rows(values, 4),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
        f"{name}.weight_zero_point": pack_rows(torch.zeros(scales.shape[1], len(weight)).long(), 4)
        .t()
        .contiguous(),
    }


def fp8(name: str, weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Written], int]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
        gptq,
        4,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, 4),
    "compressed-tensors": (compressed(group_size=GROUP), packed, 4),
    "fp8": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"all": {"targets": ["Linear"], "weights": FLOATS}},
        },
        fp8,
        8,
    ),
}
PLAIN = ("layers.0.self_attn.k_proj", "layers.0.mlp.up_proj", "layers.1.mlp.down_proj", "lm_head")
"""Layers that stay in 16 bits: whole ones, and parts of those that are multiplied as one."""


def write(directory: Path, kind: str, plain: tuple[str, ...] = PLAIN) -> Path:
    """A small Llama in bfloat16, of which all linear layers but `plain` are quantized."""
    settings, quantized, _ = FORMATS[kind]
    held: Written = {}
    oracle = random_oracle("llama1", **SIZES)
    for name, weight in oracle.state_dict().items():
        stem = name.removesuffix(".weight")
        is_plain = weight.ndim == 1 or stem.endswith((*plain, "embed_tokens"))
        held |= {name: weight.bfloat16()} if is_plain else quantized(stem, weight)
    save_file(held, directory / "model.safetensors")
    write_config(directory, {**oracle.config.to_dict(), "quantization_config": settings})
    return directory


def bits_of(layer: torch.nn.Module) -> list[int]:
    """Bits of a native layer's parts; 16: plain."""
    return [part.struct.bits for part in layer.parts] if isinstance(layer, NativeLinear) else []


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:.*FP8:UserWarning")
def test_what_is_stored_in_16_bits_stays_so(kind: str, tmp_path: Path) -> None:
    model, bits = load_model(open_checkpoint(write(tmp_path, kind))), FORMATS[kind][2]
    assert model.bits == bits
    first, second = model.blocks
    if not isinstance(first.attention.o, NativeLinear) or not multiplies_bfloat16():
        pytest.skip("no native kernels for bfloat16 run here")
    assert bits_of(first.attention.qkv) == [bits, 16, bits]
    assert bits_of(first.mlp.gate_up) == [bits, 16]
    assert bits_of(first.mlp.down) == bits_of(second.mlp.gate_up) == bits_of(second.attention.qkv) == [bits]
    assert bits_of(second.mlp.down) == bits_of(model.head) == [16]
    assert model.blocks.recorded is not None


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:.*FP8:UserWarning")
def test_logits_are_those_of_the_files_own_values(kind: str, tmp_path: Path) -> None:
    model = load_model(open_checkpoint(write(tmp_path, kind)))
    exact, rows = load(tmp_path), [Rows(array(range(40)), 0)]
    (ours, *_), (expected, *_) = run(model, rows)[0], run(exact, rows)[0]
    error = ((ours - expected).norm() / expected.norm()).item()
    rounded = load_model(open_checkpoint(tmp_path), "int4")
    asked = ((run(rounded, rows)[0][0] - expected).norm() / expected.norm()).item()
    assert error < 0.05
    assert asked > 2 * error


@pytest.mark.parametrize(("kind", "bits"), [("gptq", 4), ("gptq", 8), ("compressed-tensors", 8), ("awq", 4)])
def test_a_user_may_have_the_rest_rounded(kind: str, bits: int, tmp_path: Path) -> None:
    """Weights in integers stay as they are."""
    model = load_model(open_checkpoint(write(tmp_path, kind)), "int4" if bits == 4 else "int8")
    first, second = model.blocks
    if not isinstance(first.attention.o, NativeLinear):
        pytest.skip("no native kernels run here")
    assert bits_of(first.attention.o) == [4]
    assert bits_of(second.mlp.down) == [bits]
    assert bits_of(model.head) == [8]


def test_integers_of_8_bits_are_not_rounded_to_4(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    settings = {"quant_method": "gptq", "bits": 8, "group_size": GROUP}
    write_config(tmp_path, {**read_config(tmp_path), "quantization_config": settings})
    with pytest.raises(ModelError, match="cannot become int4 without further loss"):
        load_model(open_checkpoint(tmp_path), "int4")


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_answers_do_not_depend_on_the_drafter(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    llm, prompt = LLM(tmp_path, drafter="none", kv_tokens=512), [*range(20)] * 2
    params = SamplingParams(temperature=1, seed=1, max_tokens=24, logprobs=2, ignore_eos=True)
    plain = llm.generate(prompt, params)
    other = llm.generate([prompt, prompt[:30]], params, drafter="prompt-lookup")[0]
    assert (other.token_ids, other.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("kind", ["gptq", "fp8"])
@pytest.mark.parametrize("kernels", ["stock", *SETS])
@pytest.mark.filterwarnings("ignore:.*FP8:UserWarning")
def test_bits_of_a_row_without_native_products_of_bfloat16(kind: str, kernels: str, tmp_path: Path) -> None:
    """Plain parts are multiplied by PyTorch there, and those in integers by the kernels."""
    model = load_model(open_checkpoint(write(tmp_path, kind)), kernels=kernels)
    tokens = array(range(24))
    whole = run(model, [Rows(tokens, 0)])[0][0]
    beside = run(model, [Rows(tokens[:5], 0), Rows(tokens, 0)])[0]
    assert torch.equal(beside[1], whole)
    assert torch.equal(beside[0], whole[:5])
    assert torch.equal(run(model, [Rows(tokens[:1], 0)])[0][0], whole[:1])


@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors", "fp8"])  # AWQ needs multiples of 8
@pytest.mark.filterwarnings("ignore:.*FP8:UserWarning")
def test_an_output_head_may_be_quantized_too(kind: str, tmp_path: Path) -> None:
    model = load_model(open_checkpoint(write(tmp_path, kind, ("down_proj",))))
    assert bits_of(model.head) in ([], [FORMATS[kind][2]])


@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors"])
def test_memory_is_that_of_each_layer(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind))
    model = load_model(checkpoint)
    names = TensorNames(model.spec, checkpoint)
    size = SIZES["hidden_size"] * SIZES["intermediate_size"]
    mixed = weight_bytes(model, numeric_mode(names), names=names)  # layers that are loaded are not counted
    assert mixed == 0
    with torch.device("meta"):
        shapes = type(model)(model.spec)
    mixed = weight_bytes(shapes, numeric_mode(names), names=names)
    whole = weight_bytes(shapes, numeric_mode(names))  # as if qkv, gate_up and down were in integers
    assert mixed > whole + size


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_tensors_that_repeat_the_configuration_are_no_reason_to_warn(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(open_checkpoint(tmp_path))


def test_a_bias_that_is_not_used_is_named(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    checkpoint = open_checkpoint(tmp_path)
    with checkpoint.open() as read:
        held = {name: read(name).clone() for name in checkpoint.names()}
    held["model.layers.1.self_attn.o_proj.bias"][3] = 1
    save_file(held, tmp_path / "model.safetensors")
    with pytest.warns(match=r"use: model\.layers\.1\.self_attn\.o_proj\.bias\. Answers may be wrong"):
        load_model(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("gptq", "quantize_config.json", {}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}),
    ],
)
def test_settings_beside_a_config_that_does_not_mention_them(
    kind: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    rows = [Rows(array(range(20)), 0)]
    expected = run(load(write(tmp_path, kind), "auto"), rows)[0][0]
    settings = {key: value for key, value in FORMATS[kind][0].items() if key != "quant_method"}
    write_config(tmp_path, {**read_config(tmp_path), "quantization_config": None})
    with pytest.raises(ModelError, match=r"has no tensor .*\.weight"):
        load(tmp_path, "auto")
    (tmp_path / name).write_text(json.dumps(changes or settings))
    (tmp_path / "model.safetensors").rename(tmp_path / f"{kind}_model-4bit-{GROUP}g.safetensors")
    assert torch.equal(run(load(tmp_path, "auto"), rows)[0][0], expected)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization": {"group_size": 64, "bits": 1}}, "bits 1"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 1, "group_size": 64}}, "bits 1"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm'"),
        ({}, "the download is incomplete"),
    ],
)
def test_fewer_bits_than_any_format_has_are_no_incomplete_download(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path, "gptq")
    rest = {**read_config(tmp_path), "quantization_config": None, "intermediate_size": 4096}
    write_config(tmp_path, rest | settings)
    with pytest.raises(ModelError, match=named):
        read_model_config(open_checkpoint(tmp_path))
