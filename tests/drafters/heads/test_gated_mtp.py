"""MTP modules of Qwen3.5: attention with an output gate. transformers' own layer is the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import array, load, random_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay import LLM, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.drafters.base import Target
from soothsay.drafters.heads.loading import find_head
from soothsay.drafters.heads.modules.mtp import MTPHead

NORMS = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


def save_with_mtp(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Save a random target whose checkpoint has a random MTP module; return its tensors, and the oracle."""
    oracle = random_oracle("qwen3_5_tied", max_position_embeddings=256)
    oracle.save_pretrained(directory)
    full = oracle.config.layer_types.index("full_attention")
    generator = torch.Generator().manual_seed(5)
    hidden = oracle.config.hidden_size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    module = {f"{norm}.weight": random(hidden) for norm in NORMS} | {
        "mtp.fc.weight": random(hidden, 2 * hidden)
    }
    for name, tensor in oracle.model.layers[full].state_dict().items():
        module[f"mtp.layers.0.{name}"] = random(*tensor.shape)
    weights = load_file(directory / "model.safetensors")
    save_file(weights | module, directory / "model.safetensors", metadata={"format": "pt"})
    return oracle, module


def zero_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, 1 + weight, eps)


@torch.no_grad()
def test_the_module_computes_what_transformers_does(tmp_path: Path) -> None:
    oracle, module = save_with_mtp(tmp_path)
    config, length = oracle.config, 30
    model = load(tmp_path)
    target = Target(model, None, EngineConfig(max_context=256), 16, tmp_path)
    head, _ = find_head(MTPHead, "", target)
    embedded, hidden = torch.randn(2, length, config.hidden_size, generator=torch.Generator().manual_seed(1))
    batch = Batch.pack([Rows(array([0] * length), 0)], group=head.config.block.group)
    ours = head(embedded, hidden, batch, None)

    layer = oracle.model.layers[config.layer_types.index("full_attention")]
    layer.load_state_dict(
        {name.removeprefix("mtp.layers.0."): value for name, value in module.items() if "layers" in name}
    )
    eps = config.rms_norm_eps
    parts = [
        zero_centred(embedded, module["mtp.pre_fc_norm_embedding.weight"], eps),
        zero_centred(hidden, module["mtp.pre_fc_norm_hidden.weight"], eps),
    ]
    x = F.linear(torch.cat(parts, dim=-1), module["mtp.fc.weight"])[None]
    rope = oracle.model.rotary_emb(x, torch.arange(length).expand(3, 1, length))
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    out = layer(x, position_embeddings=rope, attention_mask=mask)
    expected = zero_centred(out[0], module["mtp.norm.weight"], eps)
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_targets_own_module_drafts(dtype: Any, tmp_path: Path) -> None:
    save_with_mtp(tmp_path)
    model, prompt = load(tmp_path, dtype), [*range(20, 32)] * 3
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    plain = LLM(model, drafter="none", kv_tokens=512).generate(prompt, params)
    drafted = LLM(model, drafter="none", kv_tokens=512).generate(
        prompt, params, drafter=f"mtp(model={tmp_path})"
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.drafted > 20
