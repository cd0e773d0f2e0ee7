"""LoRA adapters against merged models of transformers and against PEFT, and files that are refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import PREFIX, adapter_of, matrices, merge, write_adapter
from families import array, random_oracle, random_tokens, run
from gguf_files import write_gguf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from soothsay import LLM, SamplingParams
from soothsay.core.batch import Rows
from soothsay.errors import ModelError, RequestError
from soothsay.model.weights.checkpoint import open_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT, OTHER = random_tokens(np.random.default_rng(0), 20, 13)


def load(model: Path, adapter: Path, **options: Any) -> LLM:
    return LLM(model, adapters={"own": adapter}, **{"dtype": "float32", "drafter": "none", **options})


def logits(llm: LLM) -> tuple[Tensor, Tensor]:
    """The logits of a prompt by the adapter, and of another one by the model alone, in one pass."""
    rows = [Rows(array(PROMPT), 0, adapter="own"), Rows(array(OTHER), 0)]
    with torch.inference_mode():
        own, alone = run(llm.model, rows)[0]
    return own, alone


@torch.no_grad()
def is_as(llm: LLM, merged: Any, alone: Any) -> None:
    """Assert logits as transformers computes them, by a merged model and by that without the adapter."""
    for found, oracle, prompt in zip(logits(llm), (merged, alone), (PROMPT, OTHER), strict=True):
        torch.testing.assert_close(found, oracle(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=1e-4)
    ids = torch.tensor([PROMPT])
    said = merged.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert llm.generate(PROMPT, GREEDY, adapter="own").token_ids == said[0, len(PROMPT) :].tolist()


FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, float]]] = {
    # family, arguments of `matrices`, settings, scales by the ends of names
    "llama": ("llama3", {}, {}, {"": 2.0}),
    "qwen2": ("qwen2", {}, {"lora_alpha": 5}, {"": 5 / 8}),
    "rslora": ("llama3", {"rank": 3, "size": 0.3}, {"use_rslora": True}, {"": 16 / math.sqrt(3)}),
    "alphas": (
        "llama3",
        {"targets": ("v_proj", "up_proj")},
        {"alpha_pattern": {"layers.1.mlp.up_proj": 4, "v_proj": 24}, "rank_pattern": {"v_proj": 8}},
        {"layers.1.mlp.up_proj": 0.5, "v_proj": 3.0, "": 2.0},
    ),
    "queries_alone": ("qwen2", {"targets": ("q_proj",)}, {}, {"": 2.0}),
    "fused_in_the_checkpoint": ("phi3", {"targets": FUSED}, {}, {"": 2.0}),
    "rotates_neighbours": ("cohere", {}, {}, {"": 2.0}),
    "rotates_a_part": ("glm", {"targets": ("q_proj", "k_proj")}, {}, {"": 2.0}),
    "gates_of_heads": ("qwen3_5", {"targets": ("q_proj", "v_proj", "out_proj")}, {}, {"": 2.0}),
    "gates_apart": (
        "afmoe",
        {"targets": ("q_proj", "k_proj", "v_proj", "self_attn.gate_proj")},
        {},
        {"": 2.0},
    ),
    "keys_are_values": ("gemma4_keys_are_values", {"size": 0.3}, {}, {"": 2.0}),
    "latent": ("deepseek_v3", {"targets": LATENT}, {}, {"": 2.0}),
    "beside_experts": ("qwen3_moe", {"targets": ("q_proj", "o_proj")}, {}, {"": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_of_a_merged_model(case: str, tmp_path: Path) -> None:
    family, given, config, scales = CASES[case]
    oracle = random_oracle(family)
    oracle.save_pretrained(tmp_path)
    tensors = matrices(oracle.state_dict(), **given)
    assert len(tensors) >= 4
    llm = load(tmp_path, write_adapter(tmp_path / "adapter", tensors, **config))
    merged = copy.deepcopy(oracle)
    merge(merged, tensors, scales)
    is_as(llm, merged, oracle)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft itself
@pytest.mark.parametrize(
    ("family", "ranks", "alpha"),
    [
        ("llama3", {"q_proj": 3, "layers.1.mlp.down_proj": 20}, "layers.0.self_attn.k_proj"),
        ("gpt2", {"c_attn": 3, "h.1.mlp.c_proj": 20}, "h.0.mlp.c_fc"),
    ],
)
def test_files_that_peft_writes(family: str, ranks: dict[str, int], alpha: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft: it is not installed")
    oracle = random_oracle(family)
    oracle.save_pretrained(tmp_path)
    config = peft.LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        rank_pattern=ranks,
        alpha_pattern={alpha: 33},
        use_rslora=True,
        fan_in_fan_out=family == "gpt2",
    )
    merged = peft.get_peft_model(copy.deepcopy(oracle), config).eval()
    merged.save_pretrained(tmp_path / "adapter")
    is_as(load(tmp_path, tmp_path / "adapter"), merged, oracle)


def test_weights_in_a_gguf_file(tmp_path: Path) -> None:
    """Its rows of queries and keys are in another order than those of the adapter."""
    [file] = write_gguf(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(file)
    with checkpoint.open() as read:
        weights = {name: read(name).clone() for name in checkpoint.names()}
    oracle = LlamaForCausalLM(LlamaConfig(**{**checkpoint.config, "tie_word_embeddings": True})).eval()
    oracle.load_state_dict(weights, strict=False)
    tensors = matrices(weights)
    llm = load(file, write_adapter(tmp_path / "adapter", tensors))
    merge(merged := copy.deepcopy(oracle), tensors, {"": 2.0})
    rows = [Rows(array([token % 48 for token in PROMPT]), 0, adapter="own")]
    with torch.inference_mode():
        [found], _ = run(llm.model, rows)
        expected = merged(torch.tensor([[token % 48 for token in PROMPT]])).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_pickled_matrices(tmp_path: Path) -> None:
    oracle = random_oracle("llama3")
    oracle.save_pretrained(tmp_path)
    adapter = adapter_of(tmp_path, tmp_path / "adapter")
    expected = logits(load(tmp_path, adapter))[0]
    tensors = matrices(oracle.state_dict())
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    assert torch.equal(logits(load(tmp_path, adapter))[0], expected)


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.03), ("int4", 0.5), ("bfloat16", 0.03)])
def test_beside_weights_in_other_formats(dtype: str, error: float, tmp_path: Path) -> None:
    """What the adapter changes is what it changes in float32, up to the rounding of weights."""
    random_oracle("llama3").save_pretrained(tmp_path)
    adapter = adapter_of(tmp_path, tmp_path / "adapter")
    exact, near = (logits(load(tmp_path, adapter, dtype=own))[0] for own in ("float32", dtype))
    assert (near - exact).square().mean() < error * exact.square().mean()


def test_two_adapters_of_one_model_are_told_apart(tmp_path: Path) -> None:
    random_oracle("llama3").save_pretrained(tmp_path)
    paths = {name: adapter_of(tmp_path, tmp_path / name, seed=seed) for seed, name in enumerate("ab")}
    llm = LLM(tmp_path, dtype="float32", drafter="none", adapters=paths)
    assert llm.adapters == ("a", "b")
    prompts = [PROMPT, OTHER, PROMPT]
    together = llm.generate(prompts, GREEDY, adapter=["a", "b", None])
    assert len({tuple(result.token_ids) for result in together}) == 3
    for name, prompt, result in zip(("a", "b", None), prompts, together, strict=True):
        assert llm.generate(prompt, GREEDY, adapter=name).token_ids == result.token_ids
    others = LLM(tmp_path, dtype="float32", drafter="none", adapters={"a": paths["b"]})
    parts = [one.numeric_mode.partition("adapter a ")[2][:16] for one in (llm, others)]
    assert parts[0] != parts[1]
    assert len(parts[0]) == len(parts[1]) == 16


def test_an_adapter_that_is_not_there(tmp_path: Path) -> None:
    random_oracle("llama3").save_pretrained(tmp_path)
    llm = load(tmp_path, adapter_of(tmp_path, tmp_path / "adapter"))
    with pytest.raises(RequestError, match="no adapter 'other'; this model has own"):
        llm.generate(PROMPT, GREEDY, adapter="other")
    with pytest.raises(RequestError, match="2 adapters for 1 prompt"):
        llm.generate([PROMPT], GREEDY, adapter=["own", None])
    with pytest.raises(RequestError, match="this model has no adapters"):
        LLM(tmp_path, dtype="float32", drafter="none").generate(PROMPT, GREEDY, adapter="own")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_oracle("llama3").save_pretrained(path)
    return path


Q = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
UP = f"{PREFIX}model.layers.0.mlp.experts.1.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"peft_type": "IA3"}, "is of type 'IA3'; only LoRA"),
        ({"use_dora": True}, "uses use_dora, which is not supported; merge it"),
        ({"bias": "all"}, "uses bias, which"),
        ({"lora_bias": True}, "uses lora_bias, which"),
        ({"modules_to_save": ["lm_head"]}, "uses modules_to_save, which"),
        ({"target_parameters": ["experts"]}, "uses target_parameters, which"),
        ({"layer_replication": [[0, 2]]}, "uses layer_replication, which"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes"),
        ({"init_lora_weights": ["pissa"]}, "which changes the model's own"),
        ({"lora_alpha": "16"}, "lora_alpha='16' .* must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern .* does not map names"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern .* does not map names"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha_pattern=True"),
    ],
)
def test_refuses_configurations(config: dict[str, Any], problem: str, model: Path, tmp_path: Path) -> None:
    adapter = adapter_of(model, tmp_path)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(ModelError, match=problem):
        load(model, adapter)


Change = Callable[[dict[str, Tensor]], object]
A, B, FIT = f"{Q}A.weight", f"{Q}B.weight", "of this model has 64 inputs and 192 outputs, and the adapter"


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda own: own.update({name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dict.clear, "has no matrices"),
        (lambda own: own.pop(B), "has no lora_B of model.layers.0.self_attn.q_proj"),
        (put(UP, 8, 64), "experts.1.up_proj.* which is no LoRA matrix"),
        (put(f"{PREFIX}lm_head.lora_A.weight", 8, 64), "lm_head.lora_A.* which is no LoRA matrix"),
        (put(f"{PREFIX}model.embed_tokens.lora_embedding_A", 8, 97), "embedding_A.* which is no LoRA matrix"),
        (put(f"{PREFIX}model.norm.weight", 64), "norm.weight.* which is no LoRA matrix"),
        (put(A.replace("layers.0", "layers.9"), 8, 64), r"layers\.9.* which is no LoRA matrix"),
        (put(A.replace("model.layers", "vision.layers"), 8, 64), "vision.* which is no LoRA matrix"),
        (put(f"{Q}magnitude_vector", 192), "magnitude_vector.* which is no LoRA matrix"),
        (put("x\n.lora_A.weight", 8, 64), r"has 'x\\n.lora_A"),
        (put(A.replace("model.layers", "layers"), 8, 64), "q_proj.* under two names"),
        (put(B, 192, 7), "a rank is between 1 and 1024"),
        (put(A, 8), "a rank is between 1 and 1024"),
        (lambda own: [put(A, 0, 64)(own), put(B, 192, 0)(own)], "a rank is between 1 and 1024"),
        (lambda own: [put(A, 1025, 64)(own), put(B, 192, 1025)(own)], "a rank is between 1 and 1024"),
        (put(A, 8, 63), f"{FIT} 63 and 192"),
        (put(B, 32, 8), f"{FIT} 64 and 32"),
        (put(A, 8, 64, dtype=torch.int8), "is stored as torch.int8"),
        (lambda own: own[A].fill_(math.nan), "numbers that are not finite"),
    ],
)
def test_refuses_matrices(change: Change, problem: str, model: Path, tmp_path: Path) -> None:
    tensors = matrices(random_oracle("llama3").state_dict())
    change(tensors)
    with pytest.raises(ModelError, match=problem):
        load(model, write_adapter(tmp_path, tensors))


def test_refuses_places_where_adapters_do_not_run(model: Path, tmp_path: Path) -> None:
    adapter = adapter_of(model, tmp_path / "adapter")
    with pytest.raises(ModelError, match="several stages cannot have adapters"):
        load(model, adapter, stages=2)
    with pytest.raises(ModelError, match="adapters run on CPUs only, not on meta"):
        load(model, adapter, device="meta")
    with pytest.raises(ModelError, match="give the model by its path"):
        LLM(load(model, adapter).model, adapters={"own": adapter})
    with pytest.raises(ModelError, match="cannot be an adapter's name"):
        LLM(model, adapters={"a b": adapter})
    with pytest.raises(ModelError, match="cannot be an adapter's name"):
        LLM(model, adapters={5: adapter})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="adapters must be a dict of names and directories, not a str"):
        LLM(model, adapters="own")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no adapter at"):
        load(model, tmp_path)
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="damaged or cut short"):
        load(model, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors and no adapter_model\.bin"):
        load(model, adapter)
