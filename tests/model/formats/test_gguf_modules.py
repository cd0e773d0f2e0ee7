"""MTP modules in GGUF files, against the same modules in safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_gguf_architectures
import test_gguf_hybrid
import torch
from mtp_targets import save_with_mtp
from safetensors.torch import load_file, save_file
from tiny import adapted

from soothsay import LLM, SamplingParams
from soothsay.config import EngineConfig
from soothsay.drafters.base import Target
from soothsay.drafters.heads.feature_drafter import find_head
from soothsay.drafters.heads.mtp import MTPHead
from soothsay.errors import DrafterError, MissingDrafterError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe")


def write(directory: Path, name: str, kind: str = "F32", more: str = "") -> Path:
    """Write a target with a module as safetensors, and in another folder as GGUF; return the latter.

    `more` is the name of a further tensor.
    """
    own = {"mlp_only_layers": []} if name == "qwen3_next" else {}
    oracle, _ = save_with_mtp(directory, name, attention_bias=name == "glm4_moe", **own)
    if more:
        tensors = load_file(directory / "model.safetensors") | {more: torch.ones(64)}
        save_file(tensors, directory / "model.safetensors")
    path = directory / "gguf" / "model.gguf"
    path.parent.mkdir()
    if name in test_gguf_hybrid.ARCHITECTURES:
        test_gguf_hybrid.write(path, name, directory, oracle.config, kind, modules=1)
        return path
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    test_gguf_architectures.write(path, name, directory, kind)
    return path


def target_of(path: Path) -> Target:
    model = load_model(open_checkpoint(path), "float32")
    return Target(model, None, EngineConfig(max_context=256), 16, path)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_that_of_the_original(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    ours, _ = find_head(MTPHead, "", target_of(path))
    expected, _ = find_head(MTPHead, "", target_of(tmp_path))
    block = expected.config.block  # GGUF has names and numbers of its own
    own = adapted(ours.config.block, norm_eps=block.norm.eps, family=block.family)
    assert replace(ours.config, block=own) == expected.config
    values = ours.state_dict()
    assert values.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(values[key], value, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_module_drafts_for_its_file(kind: str, tmp_path: Path) -> None:
    path, prompt = write(tmp_path, "qwen3_5", kind), [*range(20, 32)] * 3
    params: Any = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    llm = LLM(str(path), drafter="none", kv_tokens=512)
    plain, drafted = (llm.generate(prompt, params, drafter=name) for name in ("none", "mtp"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.stats.drafted > 20


def test_a_file_without_modules(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_5")
    path = tmp_path / "plain.gguf"
    oracle, _ = save_with_mtp(tmp_path, "qwen3_5", attention_bias=False)
    oracle.save_pretrained(tmp_path)
    test_gguf_hybrid.write(path, "qwen3_5", tmp_path, oracle.config)
    with pytest.raises(MissingDrafterError, match="no MTP modules"):
        find_head(MTPHead, "", target_of(path))


def test_a_module_that_is_not_understood_is_refused_and_the_model_runs(tmp_path: Path) -> None:
    target = target_of(write(tmp_path, "qwen3_5", more="blk.5.nextn.other.weight"))
    with pytest.raises(DrafterError, match=r"nextn\.other\.weight"):
        find_head(MTPHead, "", target)
