"""`soothsay inspect TARGET --drafter DIRECTORY` describes a trained drafter, and checks whether it fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from families import random_oracle
from heads import random_dflash, random_peagle
from public_models import public_configs
from tiny import adapted
from typer.testing import CliRunner, Result

from soothsay import LLM
from soothsay.cli.app import app
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.heads.eagle import EagleConfig, EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.heads.medusa import MedusaConfig, MedusaHead
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def config() -> ModelSpec:
    """The configuration of one decoder block that fits the bundled model."""
    whole = parse_model_config(open_checkpoint("sibyl").config)
    return adapted(whole, num_layers=1, windows=(None,), tie_embeddings=False)


def inspect(*args: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *args], env={"COLUMNS": "300"})


def facts(result: Result) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    lines = [re.split(r"  +", line.rstrip(), maxsplit=1) for line in result.stdout.splitlines()]
    return {line[0] or f"{lines[i - 1][0]}, more": line[-1] for i, line in enumerate(lines)}


def test_an_eagle3_head(config: ModelSpec, tmp_path: Path) -> None:
    head = Eagle3Head(Eagle3Config(config, 384, 512, (2, 4, 8)), StockKernels())
    write_head(head, tmp_path / "eagle3", "sibyl", "speculators")
    told = facts(inspect("sibyl", "--drafter", str(tmp_path / "eagle3")))
    weights = sum(p.numel() for p in head.parameters())
    assert told["drafter"] == "eagle3: EAGLE-3 (speculators)"
    assert told["its weights"] == f"{weights / 1e6:.3g}M parameters, stored as bfloat16"
    assert told["reads"] == "what goes into layer 2, what goes into layer 4, what comes out of the last layer"
    assert told["can say"] == "512 of 8,192 tokens"
    assert told["drafters"] == f"✓ fits: --drafter 'eagle3(model={tmp_path / 'eagle3'})'"
    assert (told["model"], told["family"]) == ("sibyl", "llama")
    assert "note" not in told


def test_eagle_serves_two_methods_and_a_short_context_is_noted(config: ModelSpec, tmp_path: Path) -> None:
    short = replace(config, max_positions=512)
    write_head(EagleHead(EagleConfig(short, True, 8), StockKernels()), tmp_path / "eagle", "sibyl")
    told = facts(inspect("sibyl", "-d", str(tmp_path / "eagle")))
    assert told["reads"] == "what comes out of the last layer"
    assert told["drafters, more"] == f"✓ fits: --drafter 'eagle2(model={tmp_path / 'eagle'})'"
    assert "was made for contexts of 512 tokens, requests may have 2,048" in told["note"]
    assert "note" not in facts(inspect("sibyl", "-d", str(tmp_path / "eagle"), "--context", "500"))


def test_what_does_not_fit_ends_with_the_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_head(MedusaHead(MedusaConfig(64, 8192, 8, 2)), tmp_path / "medusa", "another")
    result = inspect("sibyl", "-d", str(tmp_path / "medusa"))
    assert result.exit_code == 2
    assert "made for a model of hidden size 64; the target's is 384" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    (tmp_path / "empty").mkdir()
    result = inspect("sibyl", "-d", str(tmp_path / "empty"))
    assert (result.exit_code, "has no config.json" in result.stderr) == (2, True)


def test_how_blocks_and_rotary_positions_differ_from_llamas(tmp_path: Path) -> None:
    random_oracle("phi4_mini").save_pretrained(tmp_path / "phi")
    told = facts(inspect(str(tmp_path / "phi")))
    assert told["rotary"] == (
        "base 10,000, scaled by longrope, factor 8, long factors (short with max_context=32 or less), "
        "24 of 32 dimensions"
    )
    assert told["blocks"] == "attention, then the feed-forward part; norms before them"
    assert "short factors (" in facts(inspect(str(tmp_path / "phi"), "--context", "32"))["rotary"]
    random_oracle("gpt2").save_pretrained(tmp_path / "gpt2")
    assert facts(inspect(str(tmp_path / "gpt2")))["rotary"] == "none, positions are learned"
    random_oracle("cohere2").save_pretrained(tmp_path / "cohere")
    told = facts(inspect(str(tmp_path / "cohere")))
    assert told["rotary, more"] == "none in 1 of 5 layers"
    assert told["blocks"] == "attention, beside the feed-forward part; norms before them"


def test_layers_that_keep_a_state(tmp_path: Path) -> None:
    random_oracle("granite4_hybrid").save_pretrained(tmp_path)
    told = facts(inspect(str(tmp_path)))
    assert told["recurrent"] == "3 of 5 layers of Mamba-2, 4 heads with states of 32 x 16"
    random_oracle("falcon_h1").save_pretrained(tmp_path / "falcon")
    told = facts(inspect(str(tmp_path / "falcon")))
    assert told["recurrent"] == "3 of 3 layers of Mamba-2 beside attention, 4 heads with states of 24 x 16"
    random_oracle("nemotron_h").save_pretrained(tmp_path / "nemotron")
    told = facts(inspect(str(tmp_path / "nemotron")))
    assert told["recurrent"] == "2 of 5 layers of Mamba-2, 4 heads with states of 24 x 16"
    assert told["blocks"] == "a single part each, the feed-forward part in 2 of 5; a norm before it"
    random_oracle("kimi_linear").save_pretrained(tmp_path / "kimi")  # whose first layer has no latent states
    told = facts(inspect(str(tmp_path / "kimi")))
    assert told["attention"] == "4 heads over latent states of 64 and 32 rotated"
    assert told["recurrent"] == "4 of 5 layers, 2 heads with states of 32 x 32"


def test_several_streams(tmp_path: Path) -> None:
    random_oracle("gemma3n").save_pretrained(tmp_path)
    assert facts(inspect(str(tmp_path)))["streams"] == "3 of 64, predicted and corrected in each layer"


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_numeric_mode_has_one_name(dtype: Any) -> None:
    told = facts(inspect("sibyl", "--dtype", dtype))["runs here"].partition("; ")[0]
    assert told == LLM("sibyl", dtype=dtype, drafter="none").about()["dtype"]


def test_a_configuration_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(public_configs()["openai/gpt-oss-20b"]))
    told = facts(inspect(str(file), "--context", "1000", "--requests", "1"))
    assert (told["family"], told["parameters"]) == ("gpt_oss", "20.9B")
    assert told["runs here"].startswith("MXFP4 experts beside plain weights")
    assert told["weights"].startswith("1")  # 13.7 GB, where all of it in bfloat16 takes 41.8
    assert "for a context of 1,000" in told["KV cache"]
    assert "int8 weights" in facts(inspect(str(file), "--dtype", "int8", "--requests", "1"))["runs here"]
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    file.write_text(json.dumps(public_configs()["mistralai/Mixtral-8x7B-v0.1"] | gptq))
    told = facts(inspect(str(file)))["runs here"]
    assert told.startswith("int4, groups of 128 (GPTQ) beside plain weights, int8 activations")
    file.write_text(json.dumps(public_configs()["deepseek-ai/DeepSeek-V4-Pro"]))
    result = inspect(str(file))
    assert result.exit_code == 2
    assert "compressed keys" in result.output
    endless = public_configs()["mistralai/Mixtral-8x7B-v0.1"] | {"num_local_experts": 65_536}
    file.write_text(json.dumps(endless))
    assert "100,000 are the limit" in inspect(str(file)).output


def test_heads_that_fill_masks() -> None:
    dspark, peagle = random_dflash(markov=True), random_peagle()
    told = facts(inspect("sibyl", "--drafter", str(dspark)))
    assert told["drafter"] == "dflash: DSpark (original)"
    assert told["reads"] == "what goes into layer 1, what goes into layer 3"
    assert told["drafters"] == f"✓ fits: --drafter 'dflash(model={dspark})'"
    assert "can say" not in told
    told = facts(inspect("sibyl", "--drafter", str(peagle)))
    assert told["drafter"] == "peagle: P-EAGLE (original)"
    assert told["can say"] == "2,000 of 8,192 tokens"
    assert told["drafters"] == f"✓ fits: --drafter 'peagle(model={peagle})'"


@pytest.mark.filterwarnings("ignore:drafter auto goes without")
def test_drafters_that_fit_are_in_one_line(tmp_path: Path) -> None:
    told = facts(inspect("sibyl"))
    assert told["drafters"].startswith("✓ auto, none, ")
    assert "eagle3" in told["drafters"]
    assert told["drafters, more"].startswith("- no files beside the model: rest, ")
    model = tmp_path / "model"
    copytree(open_checkpoint("sibyl").path, model, ignore=lambda *_: ["drafters"])
    (model / "drafters" / "medusa").mkdir(parents=True)
    told = facts(inspect(str(model)))
    assert "medusa" not in told["drafters"]
    assert re.match("✗ medusa: .*medusa has no config.json", told["drafters, more"])
