"""MTP modules of Qwen3.5 and GLM-4.5: gated attention, and experts. transformers' own layer is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import array, load, write_config
from mtp_targets import GLM, QWEN, TARGETS, full_layer, one_by_one, save_with_mtp
from safetensors.torch import save_file
from torch import Tensor

from soothsay import LLM, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import find_head
from soothsay.drafters.heads.mtp import MTPHead


@pytest.mark.parametrize(("name", "stacked"), [*((name, False) for name in TARGETS), ("qwen3_5_moe", True)])
@torch.no_grad()
def test_the_module_computes_what_transformers_does(name: str, stacked: bool, tmp_path: Path) -> None:
    oracle, module = save_with_mtp(tmp_path, name, stacked=stacked)
    config, length = oracle.config, 30
    model = load(tmp_path)
    target = Target(model, None, EngineConfig(max_context=256), 16, tmp_path)
    head, _ = find_head(MTPHead, "", target)
    embedded, hidden = torch.randn(2, length, config.hidden_size, generator=torch.Generator().manual_seed(1))
    batch = Batch.pack([Rows(array([0] * length), 0)], group=head.config.block.group)
    ours = head(embedded, hidden, batch, None)

    fc, embedding_norm, hidden_norm, last_norm, block = GLM if name == "glm4_moe" else QWEN

    def normed(x: Tensor, norm: str) -> Tensor:
        weight = module[f"{norm}.weight"]
        return F.rms_norm(x, weight.shape, weight + (name != "glm4_moe"), config.rms_norm_eps)

    layer = full_layer(oracle)
    layer.load_state_dict({key: module[block + key] for key in layer.state_dict()})
    if name == "glm4_moe":
        embedded[1] = 0  # the first row that a request has
    parts = [normed(embedded, embedding_norm), normed(hidden, hidden_norm)]
    x = F.linear(torch.cat(parts, dim=-1), module[f"{fc}.weight"])[None]
    positions = torch.arange(length)[None]
    positions = positions.expand(3, 1, length) if name.startswith("qwen3_5") else positions
    rope = oracle.model.rotary_emb(x, positions)
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    out = layer(x, position_embeddings=rope, attention_mask=mask)
    expected = normed(out[0], last_norm)
    assert (ours - expected).abs().max() < 1e-4


SPECULATORS = {
    "mtp.fc": "input_proj",
    "mtp.pre_fc_norm_embedding": "token_layernorm",
    "mtp.pre_fc_norm_hidden": "hidden_layernorm",
    "mtp.norm": "final_layernorm",
}
"""Parts of a module, as vLLM's speculators names them in `mtp_layers.0`."""


@pytest.mark.parametrize(
    ("name", "stacked"), [(name, stacked) for name in TARGETS[:3] for stacked in (False, True)]
)
def test_speculators_layout_of_the_same_module(name: str, stacked: bool, tmp_path: Path) -> None:
    """The same weights, whether its experts are stacked as in the package's own files or not."""
    oracle, module = save_with_mtp(tmp_path, name)
    target = Target(load(tmp_path), None, EngineConfig(max_context=256), 16, tmp_path)
    expected, _ = find_head(MTPHead, "", target)
    held = {}
    for full, tensor in module.items() if stacked else one_by_one(module):
        stem, _, suffix = full.rpartition(".")
        own = f"{SPECULATORS[stem]}.{suffix}" if stem in SPECULATORS else full.removeprefix("mtp.layers.0.")
        held[f"mtp_layers.0.{own}"] = tensor.contiguous()
    (tmp_path / "mtp").mkdir()
    save_file(held, tmp_path / "mtp" / "model.safetensors")
    config = {
        "speculators_model_type": "mtp",
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": None, "architectures": []}},
        "transformer_layer_config": oracle.config.to_dict(),
    }
    write_config(tmp_path / "mtp", config)
    found, _ = find_head(MTPHead, tmp_path / "mtp", target)
    assert found.config.block == expected.config.block
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


@pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_targets_own_module_drafts(name: str, dtype: Any, tmp_path: Path) -> None:
    save_with_mtp(tmp_path, name)
    model, prompt = load(tmp_path, dtype), [*range(20, 32)] * 3
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    plain = LLM(model, drafter="none", kv_tokens=512).generate(prompt, params)
    drafted = LLM(model, drafter="none", kv_tokens=512).generate(
        prompt, params, drafter=f"mtp(model={tmp_path})"
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.drafted > 20
