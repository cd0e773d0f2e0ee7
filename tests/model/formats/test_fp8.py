"""Weights in FP8 against transformers' dequantization, and whole models against their dequantized twins."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import array, load, random_oracle, random_tokens, read_config, run, write_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.formats.declared import open_format
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

BLOCK = 32
FINE = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def compressed(strategy: str, **settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **settings}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


KINDS: dict[
    str, tuple[dict[str, Any], str, tuple[int | None, int | None]]
] = {  # and a block; None: all of it
    "blocks": (FINE, "weight_scale_inv", (BLOCK, BLOCK)),
    "one scale": ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", (None, None)),
    "AutoFP8": ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, "weight_scale", (None, None)),
    "channels": (compressed("channel"), "weight_scale", (1, None)),
    "tensor": (compressed("tensor"), "weight_scale", (None, None)),
    "blocks of compressed-tensors": (
        compressed("block", block_structure=[BLOCK, BLOCK]),
        "weight_scale",
        (BLOCK, BLOCK),
    ),
}


def stored(weight: Tensor, block: tuple[int | None, int | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The values, the factors `[rows, columns]` and the float32 weight that they stand for."""
    (out, size), (rows, columns) = weight.shape, block
    rows, columns = rows or out, columns or size
    values, exact = torch.empty(out, size, dtype=torch.float8_e4m3fn), torch.empty(out, size)
    factors = torch.empty(-(-out // rows), -(-size // columns))
    for r, c in product(range(factors.shape[0]), range(factors.shape[1])):
        place = slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns)
        factors[r, c] = weight[place].abs().max() / 448
        values[place] = (weight[place] / factors[r, c]).to(values.dtype)
        exact[place] = values[place].float() * factors[r, c]
    return values, factors, exact


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 96), (40, 70)])
def test_weights_are_those_of_transformers(kind: str, shape: tuple[int, int]) -> None:
    settings, suffix, block = KINDS[kind]
    torch.manual_seed(0)
    values, factors, exact = stored(torch.randn(shape), block)
    found = open_format({"quantization_config": settings}, Path("model"))
    assert found is not None
    tensors = {"x.weight": values, f"x.{suffix}": factors}
    assert found.holds(frozenset(tensors), "x")
    assert not found.holds(frozenset({"x.weight"}), "x")
    weight = found.read(tensors.__getitem__, "x")
    assert torch.equal(weight, exact)  # type: ignore[arg-type]
    if shape == (64, 96):  # transformers needs whole blocks
        assert torch.equal(weight, Fp8Dequantize(None)._dequantize_one(values, factors))  # type: ignore[arg-type]
    if block == (None, None):
        tensors[f"x.{suffix}"] = factors[0, 0]
        assert torch.equal(found.read(tensors.__getitem__, "x"), exact)  # type: ignore[arg-type]


def test_factors_may_be_powers_of_two() -> None:
    found = open_format({"quantization_config": FINE}, Path("model"))
    assert found is not None
    exponents = torch.tensor([[127, 130], [120, 126]], dtype=torch.uint8)
    values = torch.randn(64, 64).to(torch.float8_e4m3fn)
    weight = found.read({"x.weight": values, "x.weight_scale_inv": exponents}.__getitem__, "x")
    expected = Fp8Dequantize(None)._dequantize_one(values, exponents, torch.float32)
    assert torch.equal(weight, expected)  # type: ignore[arg-type]


@torch.no_grad()
def save_in_fp8(name: str, directory: Path, kind: str) -> Any:
    """Save a random model in FP8. Return transformers' model with the values that it stands for."""
    settings, suffix, block = KINDS[kind]
    oracle = random_oracle(name)
    oracle.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        values, factors, exact = stored(tensors[key], block)
        tensors |= {key: values, key.replace("weight", suffix): factors, key + "_exact": exact}
    plain = {key.removesuffix("_exact"): value for key, value in tensors.items() if value.dtype.itemsize > 1}
    tensors = {key: value for key, value in tensors.items() if not key.endswith("_exact")}
    save_file(
        {key: value for key, value in plain.items() if suffix not in key}, directory / "plain.safetensors"
    )
    exact_model = type(oracle).from_pretrained(
        None, config=oracle.config, state_dict=load_file(directory / "plain.safetensors")
    )
    (directory / "plain.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, {**read_config(directory), "quantization_config": settings})
    return exact_model.eval()


@pytest.mark.parametrize(
    ("name", "kind"), [("deepseek_v3", "blocks"), ("qwen3_moe", "channels"), ("qwen3_next", "blocks")]
)
def test_logits_of_dequantized_models(name: str, kind: str, tmp_path: Path) -> None:
    """Some layers that run as one are stored in FP8 and some are not, in Qwen3-Next."""
    oracle = save_in_fp8(name, tmp_path, kind)
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    logits = run(load(tmp_path), [Rows(array(tokens), 0)])[0][0]
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def test_weights_run_in_int8_unless_asked_otherwise(tmp_path: Path) -> None:
    save_in_fp8("qwen3_moe", tmp_path, "blocks")
    (tokens,) = random_tokens(np.random.default_rng(0), 40)
    exact = run(load(tmp_path), [Rows(array(tokens), 0)])[0][0]
    checkpoint = open_checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="is stored in FP8 and runs in int8 in groups of 32"):
        model = load_model(checkpoint)
    assert model.bits == 8
    error = (run(model, [Rows(array(tokens), 0)])[0][0] - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.05
    assert load_model(checkpoint, "int4").bits == 4
    assert load_model(checkpoint, "float32").bits is None


@pytest.mark.parametrize(
    "scales", [torch.ones(2, 2), torch.ones(3), torch.ones(0), torch.ones(1, 2, 3), torch.ones(2, 4).int()]
)
def test_scales_that_do_not_fit_are_refused(scales: Tensor, tmp_path: Path) -> None:
    save_in_fp8("qwen3_moe", tmp_path, "blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = scales
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="o_proj: the tensors do not make a weight of FP8"):
        load(tmp_path)


def test_dense_parts_of_kimi_linear_as_transformers_names_them(tmp_path: Path) -> None:
    """Like experts. All tensors of a quantized weight have this name, scales without dimensions too."""
    random_oracle("kimi_linear").save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    held = dict(plain)
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.block_sparse_moe.{part}.weight"
        held[f"{name}_scale"] = torch.tensor(0.01)
        held[name] = (plain[name] / 0.01).to(torch.float8_e4m3fn)
        plain[name] = held[name].float() * 0.01
    rows, config = [Rows(array([*range(30)]), 0)], read_config(tmp_path)
    save_file(plain, tmp_path / "model.safetensors")
    expected = run(load(tmp_path), rows)[0][0]
    save_file(held, tmp_path / "model.safetensors")
    write_config(
        tmp_path, {**config, "quantization_config": {"quant_method": "fp8", "ignored_layers": ["lm_head"]}}
    )
    assert torch.equal(run(load(tmp_path), rows)[0][0], expected)
