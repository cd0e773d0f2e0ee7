"""Opening checkpoints: what goes wrong by name, what comes with the weights, and what loading costs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families import random_oracle
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM

from soothsay.errors import ModelError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.ops.linear import Dense, Integer, multiplies_bfloat16
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model, weight_bytes
from soothsay.model.weights.numeric_mode import NumericMode

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
FITTING: dict[str, Any] = {**CONFIG, "hidden_size": 128, "intermediate_size": 96}  # native kernels


def llama_weights(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocab, hidden, size = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size"))
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (size, hidden),
            "mlp.up_proj": (size, hidden),
            "mlp.down_proj": (hidden, size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(directory: Path, config: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """A small Llama in one file."""
    config = CONFIG if config is None else config
    write_json(directory / "config.json", config)
    save_file(llama_weights(config, dtype), directory / "model.safetensors")
    return directory


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


def shard(directory: Path) -> Path:
    """The same in two shards with an index."""
    single = directory / "model.safetensors"
    weights = load_file(single)
    single.unlink()
    names = sorted(weights)
    index: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, directory / file)
        index |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": index})
    return directory


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(weights)
    save_file(weights, directory / "model.safetensors")


def cut(file: Path, size: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:size])


def assert_refused(directory: Path, *named: str, dtype: Any = "float32") -> None:
    """Opening or loading raises `ModelError`, whose message has every word of `named`."""
    with pytest.raises(ModelError) as caught:
        load_model(open_checkpoint(directory), dtype=dtype)
    for word in named:
        assert word in str(caught.value)


def test_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    write(tmp_path)
    single = load_model(open_checkpoint(tmp_path))
    shard(tmp_path)
    sharded = load_model(open_checkpoint(str(tmp_path)))
    assert torch.equal(sharded.embedding.weight, single.embedding.weight)
    assert single.spec.num_layers == 2
    assert not any(parameter.requires_grad for parameter in single.parameters())


def test_missing_directory(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", ".gguf", "soothsay models")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert_refused(tmp_path / "notes.txt", "notes.txt")


def test_missing_config(tmp_path: Path) -> None:
    (write(tmp_path) / "config.json").unlink()
    assert_refused(tmp_path, "config.json", "missing")


@pytest.mark.parametrize("text", ['{"model_type": "lla', "\xff\xfe", ""])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_invalid_json(tmp_path: Path, file: str, text: str) -> None:
    (write(tmp_path) / file).write_text(text, encoding="latin-1")
    assert_refused(tmp_path, file, "JSON")


def test_json_that_is_no_object(tmp_path: Path) -> None:
    write_json(write(tmp_path) / "config.json", ["llama"])
    assert_refused(tmp_path, "config.json", "object", "list")


def test_an_index_of_a_model_that_was_saved_before(tmp_path: Path) -> None:
    """transformers deletes the shards of such a model, and leaves their index."""
    shard(write(tmp_path))
    whole = open_checkpoint(tmp_path)
    for file in whole.files:
        file.unlink()
    assert_refused(tmp_path, whole.files[0].name, "missing")
    write(tmp_path)
    assert [file.name for file in open_checkpoint(tmp_path).files] == ["model.safetensors"]
    load_model(open_checkpoint(tmp_path))


def test_an_index_without_a_map(tmp_path: Path) -> None:
    write_json(shard(write(tmp_path)) / "model.safetensors.index.json", {"metadata": {}})
    assert_refused(tmp_path, "model.safetensors.index.json", "weight_map")


def test_missing_weights(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").unlink()
    assert_refused(tmp_path, str(tmp_path), "model.safetensors", "pytorch_model.bin")


def test_missing_shard(tmp_path: Path) -> None:
    (shard(write(tmp_path)) / "model-00002-of-00002.safetensors").unlink()
    assert_refused(tmp_path, "model-00002-of-00002.safetensors", "download")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_truncated_weights(tmp_path: Path, size: int) -> None:
    cut(write(tmp_path) / "model.safetensors", size)
    assert_refused(tmp_path, "model.safetensors", "damaged or cut short")


def test_truncated_shard(tmp_path: Path) -> None:
    cut(shard(write(tmp_path)) / "model-00001-of-00002.safetensors", -1)
    assert_refused(tmp_path, "model-00001-of-00002.safetensors", "damaged or cut short")


def test_a_shard_without_what_the_index_says(tmp_path: Path) -> None:
    index = shard(write(tmp_path)) / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    name = "model.layers.1.mlp.up_proj.weight"
    other = next(file for file in files.values() if file != files[name])
    write_json(index, {"weight_map": {**files, name: other}})
    assert_refused(tmp_path, other, name)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    change_weights(write(tmp_path), lambda weights: weights.pop(name))
    assert_refused(tmp_path, str(tmp_path), name.removeprefix("model."))


def test_missing_bias(tmp_path: Path) -> None:
    write_json(write(tmp_path) / "config.json", {**CONFIG, "attention_bias": True})
    assert_refused(tmp_path, "model.layers.0.self_attn.q_proj.bias")


def test_a_tied_head_need_not_be_there(tmp_path: Path) -> None:
    write_json(write(tmp_path) / "config.json", {**CONFIG, "tie_word_embeddings": True})
    change_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    assert load_model(open_checkpoint(tmp_path)).spec.head.tied


@pytest.mark.parametrize("same", [True, False])
def test_a_head_is_tied_only_if_it_has_the_weights_of_the_embedding(tmp_path: Path, same: bool) -> None:
    """transformers 5 does not tie it either, whatever config.json says."""
    write_json(write(tmp_path) / "config.json", {**CONFIG, "tie_word_embeddings": True})
    if same:
        change_weights(tmp_path, lambda own: own["lm_head.weight"].copy_(own["model.embed_tokens.weight"]))
    model = load_model(open_checkpoint(tmp_path), "float32")
    assert model.spec.head.tied == same
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert oracle.lm_head.weight.equal(oracle.model.embed_tokens.weight) == same


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.k_proj.weight", (15, 32)),
        ("model.layers.1.self_attn.k_proj.weight", (16, 31)),
        ("model.layers.0.mlp.down_proj.weight", (40, 32)),
        ("model.norm.weight", (33,)),
        ("model.norm.weight", (32, 1)),
        ("lm_head.weight", (47, 32)),
        ("model.embed_tokens.weight", (48, 30)),
    ],
)
def test_wrong_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    change_weights(write(tmp_path), lambda weights: weights.update({name: torch.zeros(shape)}))
    assert_refused(tmp_path, name, str(list(shape)), "config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "rwkv7"}, "rwkv7"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, "axial"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"use_qk_norm": True}, "Command R+"),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 0},
            "shared_intermediate_size",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = {key: value for key, value in {**CONFIG, **change}.items() if value is not None}
    write_json(write(tmp_path) / "config.json", config)
    assert_refused(tmp_path, named)


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_missing_setting(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in CONFIG.items() if name != key}
    write_json(write(tmp_path) / "config.json", config)
    assert_refused(tmp_path, key, "llama")


def test_unknown_dtype(tmp_path: Path) -> None:
    assert_refused(write(tmp_path), "float8", "bfloat16", dtype="float8")


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype_auto(tmp_path: Path, stored: torch.dtype) -> None:
    lossy = stored == torch.float16 and multiplies_bfloat16()
    with pytest.warns(match="stored in float16 and computed in bfloat16") if lossy else nullcontext():
        model = load_model(open_checkpoint(write(tmp_path, dtype=stored)))
    fast = multiplies_bfloat16() and stored != torch.float32
    assert model.dtype == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_plain_weights_are_rounded_on_loading(tmp_path: Path, dtype: str) -> None:
    model = load_model(open_checkpoint(write(tmp_path, FITTING)), dtype)
    exact = load_model(open_checkpoint(tmp_path), "float32")
    assert model.dtype == (torch.bfloat16 if multiplies_bfloat16() else torch.float32)
    hidden = torch.randn(3, FITTING["hidden_size"])
    for name, bound in [("head", 0.02), ("blocks.0.mlp.down", 0.02 if dtype == "int8" else 0.2)]:
        x = torch.randn(3, FITTING["intermediate_size"]) if name.endswith("down") else hidden
        rounded, plain = model.get_submodule(name)(x).float(), exact.get_submodule(name)(x)
        error = ((rounded - plain).norm() / plain.norm()).item()
        assert 1e-4 < error < bound


def test_a_router_stays_as_it_is() -> None:
    mode = NumericMode(torch.float32, bits=4)
    weight = torch.randn(4, 32)
    assert torch.equal(mode.convert("blocks.0.mlp.router", weight), weight)
    assert mode.convert("head", weight).bits == 8
    assert mode.convert("blocks.0.mlp.down", weight).group_size == 32
    assert mode.convert("blocks.0.mlp.down", torch.randn(4, 48)).group_size == 16


def quantized(tmp_path: Path, **settings: Any) -> Path:
    """A checkpoint whose one quantized weight is the first down projection."""
    write(tmp_path, FITTING)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    values = torch.randint(-128, 128, tensors.pop(f"{name}.weight").shape, dtype=torch.int8)
    tensors |= {f"{name}.weight": values, f"{name}.weight_scale": torch.full((len(values), 1), 0.01)}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    declared = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"0": group},
    }
    write_json(tmp_path / "config.json", {**FITTING, "quantization_config": declared | settings})
    return tmp_path


def test_stored_integers_are_kept(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantized(tmp_path))
    with checkpoint.open() as read:
        stored = read("model.layers.0.mlp.down_proj.weight")
    x = torch.eye(FITTING["intermediate_size"])
    for dtype in ("auto", "int8", "float32"):
        down = load_model(checkpoint, dtype).get_submodule("blocks.0.mlp.down")
        assert torch.allclose(down(x).float(), stored.t() * 0.01, rtol=2**-8)
        if isinstance(down, NativeLinear):
            assert (down.parts[0].scales is not None) == (dtype != "float32")
        else:
            assert isinstance(down, Integer) == (dtype != "float32")


@pytest.mark.parametrize(
    ("settings", "dtype", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "auto", ["bitsandbytes", "soothsay quantize"]),
        ({"format": "float-quantized"}, "auto", ["float-quantized"]),
        ({}, "int4", ["int8", "int4", "auto"]),
    ],
)
def test_quantized_in_a_way_that_cannot_be_served(
    tmp_path: Path, settings: dict[str, Any], dtype: str, words: list[str]
) -> None:
    assert_refused(quantized(tmp_path, **settings), *words, dtype=dtype)


def test_integers_of_which_a_part_is_missing(tmp_path: Path) -> None:
    tensors = load_file(quantized(tmp_path) / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "model.layers.0.mlp.down_proj.weight")


def test_a_projection_with_scales_and_without_integers(tmp_path: Path) -> None:
    tensors = load_file(quantized(tmp_path) / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(128, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_refused(tmp_path, "q_proj [128, 512]", "by config.json it should be")


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    with torch.device("meta"):
        model = Transformer(parse_model_config(checkpoint.config))
    needed = weight_bytes(model, NumericMode(torch.float32))
    assert needed == sum(m.weight.numel() for m in model.modules() if isinstance(m, Dense)) * 4
    monkeypatch.setattr("soothsay.model.weights.load.available_memory", lambda: needed - 1)
    assert_refused(tmp_path, "GB of memory in float32", "dtype='int8'", dtype="float32")
    load_model(checkpoint, "int8")
    monkeypatch.setattr("soothsay.model.weights.load.available_memory", lambda: 10)
    assert_refused(tmp_path, "smaller model", dtype="int4")


def test_a_processor_without_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.model.weights.numeric_mode.multiplies_bfloat16", lambda: False)
    checkpoint = open_checkpoint(write(tmp_path, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="does not multiply bfloat16; computing in float32"):
        assert load_model(checkpoint, "bfloat16").dtype is torch.float32
    assert load_model(checkpoint).dtype is torch.float32
    assert load_model(checkpoint, "int8").dtype is torch.float32


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [5, 7]}, (5, 7)),
        ({"temperature": 0.5}, (2,)),
        ({"eos_token_id": None}, (2,)),
        (None, (2,)),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    write(tmp_path)
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert open_checkpoint(tmp_path).eos_ids == expected


def test_the_end_token_of_a_multimodal_model(tmp_path: Path) -> None:
    write(tmp_path)
    for own, expected in ((None, (5,)), (7, (7,))):
        config = {"eos_token_id": own, "text_config": {**CONFIG, "eos_token_id": 5}}
        write_json(tmp_path / "config.json", config)
        assert open_checkpoint(tmp_path).eos_ids == expected


def test_no_end_tokens_at_all(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    assert open_checkpoint(write(tmp_path, config)).eos_ids == ()


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
OTHER = "something else"


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        (TEMPLATE, None),
        ([{"name": "tool_use", "template": OTHER}, {"name": "default", "template": TEMPLATE}], None),
        (None, TEMPLATE),
        (OTHER, TEMPLATE),  # the file is the newer place
    ],
)
def test_chat_template(tmp_path: Path, settings: Any, file: str | None) -> None:
    write_tokenizer(write(tmp_path))
    write_json(
        tmp_path / "tokenizer_config.json",
        {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": settings},
    )
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert tokenizer is not None
    assert tokenizer.render([{"role": "user", "content": "hello"}]) == "<s>[user] hello "


def test_a_chat_template_for_tools(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path))
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": [*named, {"name": "rag"}]})
    found = [open_checkpoint(tmp_path).tokenizer()]
    (tmp_path / "chat_template.jinja").write_text("none")
    found.append(open_checkpoint(tmp_path).tokenizer())  # the files replace all of the list
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools, in a file")
    found.append(open_checkpoint(tmp_path).tokenizer())
    assert [one and one.render([]) for one in found] == ["none"] * 3
    assert [one and one.render([], tools=[]) for one in found] == ["tools", "none", "tools, in a file"]


def test_without_a_chat_template(tmp_path: Path) -> None:
    write_tokenizer(write(tmp_path))
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert tokenizer is not None
    assert not tokenizer.has_chat_template


def test_without_a_tokenizer(tmp_path: Path) -> None:
    assert open_checkpoint(write(tmp_path)).tokenizer() is None


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    (write(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_checkpoint(tmp_path).tokenizer()


def write_tokenizer(directory: Path) -> None:
    Backend(WordLevel({"<s>": 0, "hello": 1}, unk_token="<s>")).save(str(directory / "tokenizer.json"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_peak_memory_of_loading(tmp_path: Path) -> None:
    """The peak is the weights and little more: files are mapped, and given back block by block."""
    if not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    config = {
        **CONFIG,
        "vocab_size": 4000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
    }
    weights = (write(tmp_path, config, torch.bfloat16) / "model.safetensors").stat().st_size
    assert 180e6 < weights < 220e6
    script = """
        import re, sys
        from pathlib import Path
        import torch
        from soothsay.model.weights.checkpoint import open_checkpoint
        from soothsay.model.weights.load import load_model

        def kilobytes(field):
            return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

        torch.set_num_threads(1)
        load_model(open_checkpoint("sibyl"))  # what is needed once, such as libraries' own memory
        before = kilobytes("VmRSS")
        model = load_model(open_checkpoint(sys.argv[1]), dtype="bfloat16")
        print((kilobytes("VmHWM") - before) * 1024)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 1.3 * weights


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model"])
def test_a_tokenizer_of_another_form_is_not_overlooked(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    assert open_checkpoint(tmp_path).tokenizer() is None
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"and has {name}\. Convert|{name} cannot be read"):
        open_checkpoint(tmp_path).tokenizer()


def in_pickles(directory: Path, *, shards: bool, old: bool = False) -> Path:
    """The same checkpoint with its tensors in PyTorch's pickles."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"pytorch_model.bin": names}
    if shards:
        files = {f"pytorch_model-{i + 1}.bin": names[i::2] for i in range(2)}
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        write_json(directory / "pytorch_model.bin.index.json", index)
    for file, held in files.items():
        state = {name: tensors[name] for name in held}
        torch.save(state, directory / file, _use_new_zipfile_serialization=not old)
    return directory


@pytest.mark.parametrize(("shards", "old"), [(False, False), (True, False), (False, True)])
def test_weights_in_pickles(tmp_path: Path, shards: bool, old: bool) -> None:
    plain = load_model(open_checkpoint(write(tmp_path)), "float32")
    checkpoint = open_checkpoint(in_pickles(tmp_path, shards=shards, old=old))
    assert len(checkpoint.files) == 1 + shards
    model = load_model(checkpoint, "float32")
    x = torch.randn(3, CONFIG["hidden_size"])
    assert torch.equal(model.head(x), plain.head(x))
    assert torch.equal(model.embedding.weight, plain.embedding.weight)


def test_pickles_that_would_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "written"), "w")

    (write(tmp_path) / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds more than tensors"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "written").exists()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="is damaged"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors, no pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    write_json(tmp_path / "pytorch_model.bin.index.json", {"weight_map": {"a": "model.safetensors"}})
    with pytest.raises(ModelError, match=r"which is not a \.bin file beside it"):
        open_checkpoint(tmp_path)


def test_tensors_that_a_model_does_not_use(tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path) / "model.safetensors")
    own = CONFIG["num_hidden_layers"]
    unused = {"self_attn.q_proj.bias": 4, "self_attn.q_norm.weight": 4, "self_attn.rotary_emb.inv_freq": 4}
    for layer in (0, own):  # blocks beyond the model's are of a drafter
        tensors |= {f"model.layers.{layer}.{name}": torch.zeros(size) for name, size in unused.items()}
    save_file({**tensors, "visual.merger.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    named = r"use: model\.layers\.0\.self_attn\.q_norm\.weight, model\.layers\.0\.self_attn\.q_proj\.bias\."
    with pytest.warns(match=named):
        load_model(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_float8_without_scales(tmp_path: Path, name: str) -> None:
    tensors = load_file(write(tmp_path) / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_refused(tmp_path, f"{name} is stored as torch.float8_e4m3fn", "quantization_config")


def test_a_number_for_each_head_of_one_head(tmp_path: Path) -> None:
    """Kimi Linear stores four dimensions, of which all but that of the heads are 1."""
    random_oracle("kimi_linear", linear_num_heads=1).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.A_log"]
    assert held.shape == (1, 1, 1, 1)
    loaded = load_model(open_checkpoint(tmp_path)).blocks.get_parameter("0.attention.rule.log_rates")
    assert torch.equal(loaded, held.flatten())
