"""Drafters that the package ships for a model that it does not."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch

from soothsay import LLM, SamplingParams
from soothsay.config import EngineConfig
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.directory import read_head
from soothsay.drafters.heads.modules.redrafter import RedrafterHead
from soothsay.drafters.places import drafter_directory
from soothsay.model.families import parse_model_config
from soothsay.model.packaged import PACKAGED, PackagedModel, pulled, shipped_with
from soothsay.model.transformer import Transformer

HEAD = Path(str(resources.files("soothsay"))) / "bundled" / "smollm2" / "drafters" / "redrafter"
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def test_the_head_fits_the_model_that_it_is_for() -> None:
    with torch.device("meta"):
        model = Transformer(parse_model_config(SMOLLM2))
    head = read_head(HEAD, Target(model, None, EngineConfig(), 0))
    assert isinstance(head, RedrafterHead)
    assert all(weights.isfinite().all() for weights in head.parameters())
    assert sum(file.stat().st_size for file in HEAD.iterdir()) < 12e6


def test_a_packaged_model_is_known_by_name_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackagedModel("p", "w", "", 0, "Small.gguf", "", num_bytes=5)
    monkeypatch.setitem(PACKAGED, "smollm2", model)
    file = tmp_path / "Small.gguf"
    target = Target(None, None, EngineConfig(), 0, file)  # type: ignore[arg-type]
    file.write_bytes(b"other model")
    assert shipped_with(file) is None
    file.write_bytes(b"model")
    assert drafter_directory("redrafter", "", target) == HEAD
    (tmp_path / "drafters" / "redrafter").mkdir(parents=True)
    assert drafter_directory("redrafter", "", target) == tmp_path / "drafters" / "redrafter"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding(temperature: float) -> None:
    if pulled("smollm2") is None:
        pytest.skip("smollm2 is not on this machine: `soothsay pull smollm2` downloads it")
    llm = LLM("smollm2", drafter="none")
    params = SamplingParams(temperature=temperature, max_tokens=64, seed=3)
    prompt = llm.chat_prompt([{"role": "user", "content": "Name three rivers and say where they begin."}])
    plain = llm.generate(prompt, params)
    for drafter in ("redrafter", "auto"):
        drafted = llm.generate(prompt, params, drafter=drafter)
        assert drafted.token_ids == plain.token_ids
    assert llm.generate(prompt, params, drafter="redrafter").stats.mean_accepted > 1.2
