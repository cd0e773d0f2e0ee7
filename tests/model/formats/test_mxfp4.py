"""Experts in MXFP4, as gpt-oss stores them, against transformers' dequantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import load, random_oracle, run
from mxfp4_models import quantized_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.decoder.feed_forward import Experts, FeedForward
from soothsay.model.formats.declared import open_format
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import weight_bytes
from soothsay.model.weights.numeric_mode import NumericMode
from soothsay.model.weights.quantized import Quantized

SIZES = {"hidden_size": 128, "intermediate_size": 96}


def oracle_in(directory: Path) -> Any:
    return quantized_oracle(directory, **SIZES)


def test_values_are_those_of_transformers() -> None:
    """All bytes, with all scales whose values are finite in bfloat16."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 240, -1, -1).contiguous()
    scales = torch.arange(2, 242, dtype=torch.uint8).view(1, 240, 1).expand(-1, -1, 16).contiguous()
    stored = {"x.blocks": blocks[0], "x.scales": scales[0]}
    found = open_format({"quantization_config": {"quant_method": "mxfp4"}}, Path("model"))
    assert found is not None
    assert found.holds(frozenset(stored), "x")
    assert not found.holds(frozenset(stored), "y")
    weight = found.read(stored.__getitem__, "x")
    assert isinstance(weight, Quantized)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    assert torch.equal(weight.dequantize(), expected)


def test_logits_of_dequantized_experts(tmp_path: Path) -> None:
    oracle, tokens = oracle_in(tmp_path), torch.arange(60) % 97
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    logits = run(load(tmp_path), [Rows(tokens.numpy(), 0)])[0][0]
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_experts_run_as_the_integers_they_are(dtype: str, tmp_path: Path) -> None:
    """With int8, layers that are stored plain are rounded."""
    oracle_in(tmp_path)
    model, plain = load(tmp_path, dtype), load(tmp_path)
    bits = [part.struct.bits for part in getattr(model.blocks[0].attention.o, "parts", [])]
    assert not bits or bits in ([[8]] if dtype == "int8" else [[16], [32]])
    x = torch.randn(20, SIZES["hidden_size"])
    for ours, theirs in zip(model.blocks, plain.blocks, strict=True):
        ours, theirs = ours.mlp, theirs.mlp
        assert isinstance(ours, Experts)
        assert isinstance(theirs, Experts)
        for expert in ours.experts:
            assert isinstance(expert, FeedForward)
            for layer in (expert.gate_up, expert.down):
                if isinstance(layer, NativeLinear):
                    (part,) = layer.parts
                    assert (
                        part.data.nbytes == part.struct.inputs * part.data.shape[0] * 32
                    )  # half a byte each
        exact = theirs(plain.kernels, x)
        errors = (ours(model.kernels, x.to(model.dtype)).float() - exact).norm(dim=1) / exact.norm(dim=1)
        assert errors.median() < 0.03  # activations of 8 bits; a router in bfloat16 chooses others for a few
        assert ours.spec.routing.chosen < int(ours.ran) <= ours.spec.routing.count


def test_the_memory_of_experts_is_counted_in_integers(tmp_path: Path) -> None:
    oracle_in(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with torch.device("meta"):
        model = Transformer(read_model_config(checkpoint))
    stored = checkpoint.weight_format()
    kept = weight_bytes(model, NumericMode(torch.float32, None, stored, keeps_integers=True))
    plain = weight_bytes(model, NumericMode(torch.float32, None, stored))
    experts = 4 * 6 * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert plain - kept == experts * 4 - (experts // 2 + experts // 32 * 2)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("blocks", lambda tensor: tensor[..., :15].contiguous()),
        ("blocks", lambda tensor: tensor.float()),
        ("scales", lambda tensor: tensor[..., :1].contiguous()),
        ("scales", lambda tensor: tensor[:2].contiguous()),
        ("blocks", lambda tensor: tensor[0, 0, 0]),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, part: str, change: Any) -> None:
    oracle_in(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.2.mlp.experts.down_proj_{part}"
    changed: dict[str, Tensor] = {**tensors, name: change(tensors[name])}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        load(tmp_path, "auto")


def test_a_stack_of_too_many_experts(tmp_path: Path) -> None:
    random_oracle("gpt_oss", **SIZES).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(10**9, 0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        open_checkpoint(tmp_path)
