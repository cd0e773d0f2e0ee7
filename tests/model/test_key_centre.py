"""Keys in 8 bits are kept relative to the bias of dimensions that hardly turn."""

from __future__ import annotations

from pathlib import Path

import torch
from families import array, random_oracle, run

from soothsay.core.batch import Rows
from soothsay.model.decoder.attention_layer import Attention
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model


def centres(model: Transformer) -> list[torch.Tensor | None]:
    """Those of the layers."""
    found = []
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        assert block.attention.centre is not None
        found.append(block.attention.centre.centre)
    return found


def test_large_biases_of_keys_cost_little(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e8}
    oracle = random_oracle("qwen2", num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope)
    biases = []
    for layer in oracle.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.view(2, 16)[:, 10:] = 200  # [halves, pairs]: those that turn by less than 1 / 32768
        biases.append(bias)
    oracle.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    rows = [Rows(array(range(40)), 0)]
    plain, small = load_model(checkpoint, "float32"), load_model(checkpoint, "float32", kv_dtype="int8")
    expected, result = (run(model, rows)[0][0].log_softmax(-1) for model in (plain, small))
    assert centres(plain) == [None] * len(biases)
    for centre, bias in zip(centres(small), biases, strict=True):
        assert centre is not None
        assert torch.equal(centre[0], torch.where(bias == 200, bias, 0.0))
        centre.zero_()  # in place, where recorded operations find it
    without = run(small, rows)[0][0].log_softmax(-1)
    assert (result - expected).abs().mean() < (without - expected).abs().mean() / 5
