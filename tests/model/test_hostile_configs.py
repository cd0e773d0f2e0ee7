"""Damaged and hostile model directories: every one is refused by `ModelError`, or loads."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from odd_tensors import ODD_TENSORS
from safetensors.torch import load_file, save_file

from soothsay.core.params import SamplingParams
from soothsay.errors import ModelError
from soothsay.llm import LLM
from soothsay.model.families.parsing import FAMILIES, parse_model_config
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.hub import bundled_models
from soothsay.model.weights.load import load_model

HOSTILE: list[Any] = [
    *(0, -1, 1, 3, 10**9, 2**63, 10**400, -(10**400)),
    *(0.5, 1e308, -1e308, float("nan"), float("inf"), 5e-324),
    *("x", "", "1", [], {}, None, True, False),
    *([[]], [None], {"x": {}}, [10**9], {"rope_type": "yarn", "factor": 1e308}, [[[[{}]]]]),
]
CONFIG: dict[str, Any] = {
    **json.loads((Path(str(open_checkpoint("sibyl").path)) / "config.json").read_text()),
    "eos_token_id": 0,
}
SMALL = {**CONFIG, "num_hidden_layers": 2, "vocab_size": 64}
MORE: dict[str, Any] = {  # fields of other families
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "sliding_window": 64,
    "use_sliding_window": True,
    "sliding_window_pattern": 6,
    "max_window_layers": 4,
    "no_rope_layers": [1, 0] * 4,
    "no_rope_layer_interval": 4,
    "shared_intermediate_size": 64,
    "position_embedding_type": "rope",
    "partial_rotary_factor": 0.5,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
    "logit_scale": 0.5,
    "layer_norm_eps": 1e-5,
    "use_qk_norm": False,
    "layer_types": ["full_attention"] * 8,
    "query_pre_attn_scalar": 64,
    "use_bias": True,
    "attention_out_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 1e4,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "text_config": None,
    "quantization_config": None,
}
UNGATED = {"arcee", "falcon", "gpt2", "gpt_neox", "gptj", "jais2", "nemotron", "opt", "phi", "starcoder2"}
OWN: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {
        **{"use_bias": False, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2},
    },
    "hunyuan_v1_moe": {"moe_topk": [2] * 8},
    "hy_v3": {"router_scaling_factor": 1.5, "mlp_layer_types": ["dense"] + ["sparse"] * 7},
    "afmoe": {
        **{"num_dense_layers": 1, "global_attn_every_n_layers": 4, "num_shared_experts": 1},
        **{"route_scale": 1.5, "mup_enabled": True},
    },
    "bamba": {
        **{"layer_types": None, "attn_layer_indices": [1, 5], "mamba_n_heads": 4, "mamba_n_groups": 2},
        **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_head": "auto"},
    },
    "kimi_linear": {
        **{"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": True},
        **{"num_expert_group": 1, "model_max_length": 256, "mla_use_nope": True, "first_k_dense_replace": 1},
        "linear_attn_config": {
            **{"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 16},
            **{"num_heads": 4, "short_conv_kernel_size": 4},
        },
    },
    "jamba": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4},
        **{"mamba_expand": 2, "mamba_dt_rank": 16, "mamba_conv_bias": True, "mamba_proj_bias": False},
        "use_bias": False,
    },
    "minicpm": {"num_experts": None, "sparse_config": None},
    "falcon_mamba": {"use_bias": False, "time_step_rank": "auto", "mixer_rms_eps": 1e-6},
    "mamba": {
        **{"state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 16, "use_bias": False},
        **{"use_conv_bias": True, "layer_norm_epsilon": 1e-5},
    },
    "mamba2": {
        **{"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 16, "conv_kernel": 4},
        **{"use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5},
    },
    "phimoe": {"router_jitter_noise": 0.01, "lm_head_bias": True},
    "exaone": {"num_layers": 8, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
}
"""Fields that only these families read."""
ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0] * 16,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 0.5,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with two layers and a small vocabulary, so that it loads fast."""
    source, copy = open_checkpoint("sibyl").path, tmp_path_factory.mktemp("model")
    kept = {
        name: tensor[:64].clone() if "embed" in name else tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not any(f"layers.{i}." in name for i in range(2, 8))
    }
    save_file(kept, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(SMALL))
    return copy


def loads(directory: Path, config: dict[str, Any], expected: ModelSpec | None = None) -> ModelSpec | None:
    """The parsed configuration if the model loads and answers; None if it is refused by `ModelError`.

    A model of the `expected` configuration need not answer.
    """
    (directory / "config.json").write_text(json.dumps(config))
    try:
        parsed = load_model(open_checkpoint(directory), "float32").spec
        if parsed != expected:
            llm = LLM(directory, dtype="float32", drafter="none", kv_tokens=256)
            result = llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            assert 1 <= len(result.token_ids) <= 2
    except ModelError:
        return None
    return parsed


@pytest.mark.parametrize("field", sorted(CONFIG))
def test_every_field_of_a_model_with_hostile_values(directory: Path, field: str) -> None:
    expected = loads(directory, SMALL)
    assert expected is not None
    for value in HOSTILE:
        loads(directory, {**SMALL, field: value}, expected)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_every_family_is_parsed_or_refused(family: str, step: int) -> None:
    """The quick test has an eighth of the values: another one for the next family, and the next field."""
    good = {**CONFIG, **MORE, "model_type": family}
    if family == "granitemoehybrid":  # without experts; its twin for GGUF files has some
        good |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    if family.startswith("granitemoehybrid"):
        good |= {"layer_types": ["mamba", "attention"] * 4, "mamba_n_heads": 4, "mamba_n_groups": 2}
        good |= {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_head": "auto"}
        good |= {"mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": [0, float("inf")]}
    if family == "falcon_h1":
        good |= {"mlp_multipliers": [1.0, 0.5], "ssm_multipliers": [0.5] * 5, "key_multiplier": 0.4}
        good |= {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_rms_norm": True}
    if family == "nemotron_h":
        good |= {"hybrid_override_pattern": "MEM*-EME", "mlp_hidden_act": "relu2", "moe_latent_size": 32}
        good |= {
            "use_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "n_routed_experts": 4,
        }
    good |= OWN.get(family, {})
    if family == "apertus":
        good |= {"hidden_act": "xielu"}
    if family == "bitnet":
        good |= {"hidden_act": "relu2"}
    if family in UNGATED:
        good |= {"hidden_act": "relu2"}
    if family == "gemma3n_text":
        good |= {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5] * 8, "altup_num_inputs": 4}
    if family in ("bart", "mbart", "marian", "m2m_100", "pegasus"):
        stack = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
        good |= {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in stack.items()}
        good |= {"d_model": 64, "pad_token_id": 1, "decoder_start_token_id": 2, "forced_bos_token_id": 3}
        good |= {"scale_embedding": True, "activation_function": "gelu"}
    parse_model_config(good)
    number = [*FAMILIES].index(family)
    for place, field in enumerate(good, number):
        for value in HOSTILE[place % step :: step]:
            if field != "model_type":
                parse(good | {field: value})
    for place, field in enumerate(ROPE, number):
        for turn, kind in enumerate(("linear", "llama3", "yarn", "longrope", "dynamic", "default"), place):
            for value in HOSTILE[turn % step :: step]:
                rope = {**ROPE, "rope_type": kind, field: value}
                parse(good | {"rope_parameters": rope})
                parse(good | {"rope_parameters": {"full_attention": rope, "sliding_attention": value}})


def parse(config: dict[str, Any]) -> None:
    """Parse it. A configuration that passes has finite numbers in its rotary positions, too."""
    from soothsay.model.decoder.rope import Rope

    try:
        parsed = parse_model_config(config)
    except ModelError:
        return
    for rotation in parsed.rotations:
        if rotation.size <= 256:
            made = Rope(rotation)
            assert made.signed.isfinite().all()
            assert made.scale.isfinite().all()
    assert len(parsed.windows) == parsed.num_layers <= 10_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, ["num_attention_heads", "0", "from 1 to"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1", "from 1 to 10,000"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000", "10,000"]),
        ({"num_hidden_layers": 9_000}, ["9,000 layers", "tensors"]),
        ({"hidden_size": 2**22, "head_dim": 64, "vocab_size": 2**24}, ["promises", "weights", "bytes"]),
        ({"num_attention_heads": 10}, ["10", "384", "divide"]),
        ({"head_dim": 63}, ["63", "even"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "an object"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, ["factor", "'x'"]),
        ({"vocab_size": 1e308}, ["vocab_size"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
        ({"text_config": 5}, ["text_config", "an object"]),
        ({"eos_token_id": "x"}, ["eos_token_id"]),
        ({"eos_token_id": [0, [1]]}, ["eos_token_id"]),
        ({"eos_token_id": -1}, ["eos_token_id"]),
    ],
)
def test_messages_name_what_is_wrong(directory: Path, change: dict[str, Any], words: list[str]) -> None:
    config = {key: value for key, value in {**CONFIG, **change}.items() if key != "head_dim" or key in change}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        read_model_config(open_checkpoint(directory))
    for word in words:
        assert word in str(caught.value)


def test_experts_that_the_files_do_not_have(directory: Path) -> None:
    config = {**CONFIG, **MORE, "model_type": "mixtral", "num_local_experts": 60_000, "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="layers and experts"):
        read_model_config(open_checkpoint(directory))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": ' * 100 + "1" + "}" * 100,
        '{"a": [' + "[]," * 2_000_001 + "[]]}",
        '{"a": ' + "9" * 5000 + "}",
        "[]",
        "null",
        '"x"',
        "\ud800",
        '{"a": NaN}',
    ],
    ids=["brackets", "objects", "deep", "many", "digits", "list", "null", "text", "surrogate", "NaN"],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_hostile(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"json|model_type|safetensors"):
        load_model(open_checkpoint(tmp_path))


def test_a_json_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ModelError, match="limit"):
        open_checkpoint(tmp_path)


def test_a_directory_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "x.bin",
        5,
        None,
        "a\0.safetensors",
        ["x"],
    ],
)
def test_an_index_that_names_other_places(tmp_path: Path, name: Any) -> None:
    (tmp_path / "inside").mkdir()
    shutil.copy(open_checkpoint("sibyl").path / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "inside" / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "inside" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelError, match=r"index\.json names"):
        open_checkpoint(tmp_path / "inside")


def test_links_out_of_the_directory_are_the_users_own(tmp_path: Path, directory: Path) -> None:
    """A hub's cache is made of links."""
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model-00001.safetensors").symlink_to(directory / "model.safetensors")
    (linked / "config.json").write_text(json.dumps(SMALL))
    names = load_file(directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001.safetensors")}
    (linked / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(open_checkpoint(linked), "float32").spec.num_layers == 2


QUANTIZED: list[Any] = [
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}, "targets": 5}}},
    {"quant_method": "compressed-tensors", "sparsity_config": "x", "config_groups": {}},
    {"quant_method": "gptq", "bits": 4, "dynamic": [5]},
    {"quant_method": "gptq", "bits": 4, "group_size": 10**30},
    {"quant_method": ["gptq"]},
    {"quant_method": "awq", "bits": [4]},
    5,
    [1],
]


@pytest.mark.parametrize("settings", QUANTIZED)
def test_quantization_settings_of_odd_types(directory: Path, settings: Any) -> None:
    config = {**SMALL, "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantized"):
        load_model(open_checkpoint(directory))


@pytest.mark.parametrize("pattern", [r"(\w+\.?)+X", r"(.|\\)+X", ".*" * 20 + "X", "(", "x" * 1000, 5])
def test_patterns_that_take_for_ever_are_refused(directory: Path, pattern: Any) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    target = pattern if pattern == 5 else f"re:{pattern}"
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"0": {"targets": [target], "weights": weights}},
    }
    config = {**SMALL, "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"pattern|target"):
        load_model(open_checkpoint(directory))


@pytest.mark.parametrize("method", ["", "compressed-tensors", "gptq", "awq"])
def test_tensors_of_odd_shapes_and_types(directory: Path, tmp_path: Path, method: str) -> None:
    weights = load_file(directory / "model.safetensors")
    parts = {"gptq": ["qweight", "scales"], "awq": ["qweight", "qzeros", "scales"]}.get(method, ["weight"])
    settings: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32}
    if method == "compressed-tensors":
        parts = ["weight_packed", "weight_shape", "weight_scale"]
        scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        groups = {"0": {"targets": ["Linear"], "weights": scheme}}
        settings |= {"format": "pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(
        json.dumps({**SMALL, "quantization_config": settings if method else None})
    )
    for module in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", "model.norm"):
        for tensor in ODD_TENSORS:
            if method and module != "model.norm":
                own = {f"{module}.{part}": tensor.clone() for part in parts}
                kept = {name: value for name, value in weights.items() if name != f"{module}.weight"}
            else:
                own, kept = {f"{module}.weight": tensor}, weights
            save_file({**kept, **own}, tmp_path / "model.safetensors")
            with pytest.raises(ModelError, match=module):
                load_model(open_checkpoint(tmp_path))


def test_random_damage_of_weights(directory: Path, tmp_path: Path) -> None:
    good, rng = (directory / "model.safetensors").read_bytes(), random.Random(0)
    size = 8 + int.from_bytes(good[:8], "little")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    for _ in range(60):
        damaged = bytearray(good[:size])
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(size)] = rng.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(bytes(damaged) + good[size:])
        try:
            load_model(open_checkpoint(tmp_path), "float32")
        except ModelError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017


def test_bundled_models_promise_what_they_hold() -> None:
    for name in bundled_models():
        checkpoint = open_checkpoint(name)
        promised = read_model_config(checkpoint).num_parameters
        assert 0.99 < 2 * promised / checkpoint.num_bytes() < 1  # bfloat16, with norms and a header besides


def test_memory_and_time_of_a_promise_that_is_not_kept(directory: Path, tmp_path: Path) -> None:
    """Every number is within its range, and together they are 10^15 weights."""
    config = {
        **CONFIG,
        "num_hidden_layers": 22,
        "hidden_size": 2**22,
        "intermediate_size": 2**22,
        "head_dim": 64,
    }
    shutil.copy(directory / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = """
        import resource, sys
        from soothsay import ModelError
        from soothsay.model.weights.checkpoint import open_checkpoint
        from soothsay.model.weights.load import load_model
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        try:
            load_model(open_checkpoint(sys.argv[1]))
        except ModelError as error:
            print(error)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "promises" in run.stdout
