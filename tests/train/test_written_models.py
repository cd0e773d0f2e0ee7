"""Models that training writes, and their configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import load, random_oracle, read_config, write_config

from soothsay.errors import TrainingError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.train.sequences import TrainingKernels
from soothsay.train.whole_models import draft_config, write_model


@pytest.mark.parametrize(
    "family", ["llama3", "gemma2", "gemma3", "gpt_oss", "olmo3", "gpt2", "falcon_heads", "qwen2_5_vl"]
)
def test_a_draft_model_is_smaller_than_its_target(family: str, tmp_path: Path) -> None:
    """Targets may list the kinds of their layers, have own names for sizes, or read images too."""
    random_oracle(family).save_pretrained(tmp_path / "target")
    target = open_checkpoint(tmp_path / "target")
    config = draft_config(target.config, 2, 32, 2, 48)
    write_model(
        Transformer(parse_model_config(config), TrainingKernels()), target, config, tmp_path / "draft"
    )
    draft = load(tmp_path / "draft").spec
    assert (draft.num_layers, draft.hidden_size) == (2, 32)
    assert draft.vocab_size == parse_model_config(target.config).vocab_size


def test_sizes_that_a_family_does_not_have() -> None:
    config = json.loads(json.dumps(random_oracle("nemotron_h_experts").config.to_dict()))
    pattern = {"layers_block_type": None, "hybrid_override_pattern": "M*-M*"}
    with pytest.raises(
        TrainingError, match="draft models of family nemotron_h cannot be made in other sizes"
    ):
        draft_config({**config, **pattern}, 2, 32, 2, 48)


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_weights_of_a_quantized_target_are_written_as_plain(key: str, tmp_path: Path) -> None:
    random_oracle("llama3").save_pretrained(tmp_path)
    gptq: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    write_config(tmp_path, {**read_config(tmp_path), key: gptq})
    (tmp_path / "quantize_config.json").write_text(json.dumps(gptq))
    target = open_checkpoint(tmp_path)
    model = Transformer(parse_model_config(target.config), TrainingKernels())
    write_model(model, target, target.config, tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert key not in written.config
    assert written.weight_format() is None
