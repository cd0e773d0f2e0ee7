"""Models with latent attention in integers: what each head makes of a latent state stays plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import array, load, random_oracle, random_tokens, read_config
from families import run as run_rows

from soothsay.core.batch import Rows
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.quantizing import quantized_layers
from soothsay.quantizing.quantize_model import quantize


@pytest.mark.parametrize("plain", [True, False], ids=["as ours", "as others"])
def test_int8(plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs also quantize `kv_b_proj`, which becomes plain when it loads."""
    # dense, since experts that are chosen otherwise change logits at once
    oracle = random_oracle("deepseek_v3", first_k_dense_replace=3)
    oracle.save_pretrained(tmp_path / "source")
    if not plain:
        monkeypatch.setattr(quantized_layers, "STAY_PLAIN", (".router",))
    report = quantize(open_checkpoint(tmp_path / "source"), tmp_path / "out", "int8")
    assert ("attention.kv_b" in report.errors) != plain
    ignored = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert ("model.layers.0.self_attn.kv_b_proj" in ignored) == plain

    (sequence,) = random_tokens(np.random.default_rng(1), 60)
    got = run_rows(load(tmp_path / "out", "auto"), [Rows(array(sequence), 0)])[0][0]
    with torch.no_grad():
        expected = oracle(torch.tensor([sequence])).logits[0]
    assert (got - expected).square().mean().sqrt() < 0.06 * expected.std()
