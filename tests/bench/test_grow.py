"""Grown models: the same function, against their source and `transformers`, at another size."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import (
    CASES,
    MULTIMODAL,
    array,
    load,
    make_multimodal,
    older_spelling,
    random_oracle,
    random_tokens,
    read_config,
    run,
    write_config,
)
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams
from soothsay.bench.grow import Grown, grow
from soothsay.bench.grown_tensors import SHAPES, GrownShape
from soothsay.cli.app import app
from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights import writing
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.model.weights.writing import write_tokenizer
from soothsay.tokenizer import Tokenizer

TOLERANCE = 1e-4  # of logits of order 1 to 10, float32
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3")
DENSE = [name for name, (family, _) in CASES.items() if family in FAMILIES]
WIDER = "layers=8,hidden=96,heads=6,kv_heads=3,ffn=112"
OTHERWISE = {  # heads that must fill the stream, or larger groups
    "llama1": "layers=5,hidden=96,heads=6,kv_heads=6,ffn=112",
    "llama3": "layers=8,hidden=96,heads=12,kv_heads=4,ffn=112",
    "qwen2": "layers=8,hidden=96,heads=12,kv_heads=4,ffn=112",
    "gemma3": "layers=10,hidden=96,heads=6,kv_heads=3,ffn=112",
}
SMALL = "layers=11,hidden=512,heads=8,kv_heads=4,ffn=1280"  # of the bundled model
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
PROMPTS = ["A man in a blue shirt is standing", "Why is the sky blue?", "Once upon a time"]


@dataclass(frozen=True)
class Source:
    """A tiny random model of transformers', saved."""

    directory: Path
    oracle: Any

    def shape(self, text: str) -> GrownShape:
        return GrownShape.parse(text, self.config)

    @property
    def config(self) -> ModelSpec:
        return parse_model_config(read_config(self.directory))


def make_source(name: str, directory: Path) -> Source:
    oracle = random_oracle("gemma3" if name == MULTIMODAL else name)
    oracle.save_pretrained(directory)
    if name == MULTIMODAL:
        make_multimodal(directory)
        config = read_config(directory)
        del config["text_config"]["architectures"]  # as in published ones
        write_config(directory, config)
    return Source(directory, oracle)


@pytest.fixture
def llama(tmp_path: Path) -> Source:
    return make_source("llama_biases", tmp_path / "source")


def grown(directory: Path, text: str, out: Path) -> Grown:
    checkpoint = open_checkpoint(directory)
    return grow(checkpoint, GrownShape.parse(text, parse_model_config(checkpoint.config)), out)


def logits_of(model: Transformer) -> Tensor:
    """Compute the logits of a sequence that is longer than every window."""
    (sequence,) = random_tokens(np.random.default_rng(5), 40)
    return run(model, [Rows(array(sequence), 0)])[0][0]


def oracle_logits(oracle: Any) -> Tensor:
    (sequence,) = random_tokens(np.random.default_rng(5), 40)
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([sequence]), use_cache=False).logits[0]
    return logits


def load_oracle(directory: Path) -> Any:
    """Raises where a tensor is missing, is left over or has another shape."""
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return oracle.eval()


def weights(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


# the same function


@pytest.mark.parametrize("name", [*DENSE, MULTIMODAL])
def test_every_family_computes_the_same(name: str, tmp_path: Path) -> None:
    source, out = make_source(name, tmp_path / "source"), tmp_path / "out"
    expected = oracle_logits(source.oracle)
    assert expected.std() > 0.5  # big enough for errors to show
    text = OTHERWISE.get(name.removesuffix("_multimodal"), WIDER)
    made = grown(source.directory, text, out)
    config = parse_model_config(read_config(out))
    assert GrownShape.of(config) == made.shape == source.shape(text)
    assert config.vocab_size == source.config.vocab_size
    assert read_config(out)["head_dim"] == source.config.first(AttentionSpec).size
    assert read_config(out)["architectures"] == [type(source.oracle).__name__]
    assert (logits_of(load(out)) - logits_of(load(source.directory))).abs().max() < TOLERANCE
    assert (oracle_logits(load_oracle(out)) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (6, 2),  # a query head more in each group
        (6, 3),  # a group more
        (6, 6),  # a group for each query head
        (8, 4),  # groups of the same size
        (12, 3),  # both
    ],
)
def test_heads_keep_their_keys_and_values(llama: Source, heads: int, kv_heads: int, tmp_path: Path) -> None:
    text = f"heads={heads},kv_heads={kv_heads},hidden={heads * 16}"
    grown(llama.directory, text, tmp_path / "out")
    expected = logits_of(load(llama.directory))
    assert (logits_of(load(tmp_path / "out")) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("text", ["layers=9", "hidden=96,heads=6", "ffn=81"])
def test_one_size_at_a_time(llama: Source, text: str, tmp_path: Path) -> None:
    grown(llama.directory, text, tmp_path / "out")
    expected = logits_of(load(llama.directory))
    assert (logits_of(load(tmp_path / "out")) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2_windows", "gemma2", "gemma3"])
def test_blocks_keep_their_windows_where_the_configuration_implies_them(name: str, tmp_path: Path) -> None:
    source = make_source(name, tmp_path / "source")
    write_config(source.directory, older_spelling(read_config(source.directory), "rope_type"))
    assert len(set(source.config.windows)) == 2
    grown(source.directory, "layers=13", tmp_path / "out")
    expected = logits_of(load(source.directory))
    assert (logits_of(load(tmp_path / "out")) - expected).abs().max() < TOLERANCE
    assert (oracle_logits(load_oracle(tmp_path / "out")) - expected).abs().max() < TOLERANCE


def test_blocks_are_spread_evenly(llama: Source, tmp_path: Path) -> None:
    grown(llama.directory, "layers=8", tmp_path / "out")
    made = weights(tmp_path / "out")
    adding = [
        bool(made[f"model.layers.{i}.{part}"].any())
        for i in range(8)
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.bias")
    ]
    assert adding[::2] == adding[1::2] == [True, False, False, True, False, False, True, False]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3"])
def test_weights_of_16_bits_are_not_rounded(name: str, tmp_path: Path) -> None:
    source, out = make_source(name, tmp_path / "source"), tmp_path / "out"
    config = read_config(source.directory)
    write_config(source.directory, {**config, "rms_norm_eps": 1e-6})
    file = source.directory / "model.safetensors"
    save_file({key: tensor.bfloat16() for key, tensor in load_file(file).items()}, file)
    grown(source.directory, OTHERWISE.get(name, WIDER), out)
    expected = logits_of(load(source.directory))
    assert (logits_of(load(out)) - expected).abs().max() < TOLERANCE
    for key, tensor in weights(out).items():
        assert tensor.dtype is (torch.float32 if key.endswith("norm.weight") else torch.bfloat16)


# what it costs


def test_what_is_new_is_no_cheaper_than_what_is_old(llama: Source, tmp_path: Path) -> None:
    grown(llama.directory, WIDER, tmp_path / "out")
    old = weights(llama.directory)
    for name, tensor in weights(tmp_path / "out").items():
        if not name.endswith(("norm.weight", "embed_tokens.weight", "o_proj.bias", "down_proj.bias")):
            values = tensor[:64, :64] if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
            if values.any() or "_proj.weight" not in name:
                assert (values.abs() > 1e-6).float().mean() > 0.99
        if name.endswith(("q_proj.weight", "up_proj.weight", "lm_head.weight")):
            origin = re.sub(r"\d+", lambda layer: str(int(layer[0]) * 3 // 8), name)
            assert tensor.std() == pytest.approx(float(old[origin].std()), rel=0.1)


def test_the_size_that_it_tells(llama: Source, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    made = grow(
        open_checkpoint(llama.directory),
        llama.shape(WIDER),
        tmp_path / "out",
        progress=lambda done, total: calls.append((done, total)),
    )
    stored = weights(tmp_path / "out").values()
    assert made.parameters == sum(tensor.numel() for tensor in stored)
    assert made.bytes == sum(tensor.nbytes for tensor in stored)
    assert len(set(calls)) == len(stored)
    assert calls == sorted(calls)
    assert calls[-1] == (made.bytes, made.bytes)
    assert {total for _, total in calls} == {made.bytes}


# the files


def test_files_are_always_the_same(llama: Source, tmp_path: Path) -> None:
    for out in ("one", "two"):
        grown(llama.directory, WIDER, tmp_path / out)
    files = {file.name for file in (tmp_path / "one").iterdir()}
    assert files == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    noise = weights(tmp_path / "one")
    first, second = (noise[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert torch.equal(first[:80, :64], second[:80, :64])  # a new block continues the old one
    assert not torch.isclose(first[80:], second[80:]).any()  # but what is new is its own


def test_shards(llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown(llama.directory, WIDER, tmp_path / "whole")
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    made = grown(llama.directory, WIDER, tmp_path / "parts")
    sizes = [file.stat().st_size for file in (tmp_path / "parts").glob("*.safetensors")]
    assert 3 < len(sizes) < 2 * made.bytes / 100_000
    assert max(sizes) < 110_000  # headers
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.bytes
    assert len(set(index["weight_map"].values())) == len(sizes)
    assert torch.equal(logits_of(load(tmp_path / "parts")), logits_of(load(tmp_path / "whole")))
    load_oracle(tmp_path / "parts")


def test_an_interrupted_one_leaves_nothing(llama: Source, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(open_checkpoint(llama.directory), llama.shape(WIDER), tmp_path / "out", progress=interrupt)
    assert not any("out" in path.name for path in tmp_path.iterdir())


# the bundled model


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grown(open_checkpoint("sibyl").path, SMALL, tmp_path_factory.mktemp("sibyl") / "large").path


@pytest.fixture(scope="module")
def larger(large: Path) -> LLM:
    return LLM(large, dtype="float32", drafter="none", kv_tokens=4096)


def test_it_says_what_the_bundled_model_says(sibyl: LLM, larger: LLM) -> None:
    for prompt in PROMPTS:
        expected, result = (llm.generate(prompt, GREEDY) for llm in (sibyl, larger))
        assert result.token_ids == expected.token_ids
        for ours, theirs in zip(result.logprobs or (), expected.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        turn = [{"role": "user", "content": prompt}]
        assert larger.chat_prompt(turn) == sibyl.chat_prompt(turn)


@pytest.mark.parametrize(("temperature", "share"), [(0.0, 1.0), (1.0, 0.95)])
def test_the_bundled_model_drafts_for_it(larger: LLM, temperature: float, share: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=64, ignore_eos=True)
    result = larger.generate(
        PROMPTS[1], params, drafter="draft-model(model=sibyl, dtype=float32, width=1, branch=1)"
    )
    assert min(result.stats.acceptance) >= share
    assert result.stats.mean_accepted > 4.5


# shapes


def test_named_shapes_fit_any_size_of_a_head(sibyl: LLM) -> None:
    config = sibyl.engine.target.model.spec
    assert GrownShape.parse("1B", config) == GrownShape(22, 2048, 32, 4, 5632)
    assert GrownShape.parse("layers=9, ffn=2048", config) == GrownShape(9, 384, 6, 2, 2048)
    assert GrownShape.parse("intermediate=2048", config) == GrownShape(8, 384, 6, 2, 2048)
    assert SHAPES["3B"].with_head_dim(128) == SHAPES["3B"]
    assert SHAPES["3B"].with_head_dim(64) == GrownShape(28, 3072, 48, 16, 8192)
    assert SHAPES["1B"].with_head_dim(128) == GrownShape(22, 2048, 16, 2, 5632)
    assert SHAPES["1B"].with_layers(22) == SHAPES["1B"]
    assert SHAPES["1B"].with_layers(30) == GrownShape(30, 2048, 32, 4, 3840)
    for shape in SHAPES.values():
        for head_dim in (32, 64, 128):
            fitted = shape.with_head_dim(head_dim)
            assert fitted.heads * head_dim == fitted.hidden
            assert fitted.heads % fitted.kv_heads == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2B", "'2B' is not understood; write 0.5B, 1B, 3B or layers=22"),
        ("layers=many", "'layers=many' is not understood"),
        ("layers=4,depth=2", "'depth=2' is not understood"),
        ("layers=2", "layers=2 is less than the 3 that the model has"),
        ("hidden=32", "hidden=32 is less than the 64"),
        ("heads=2", "heads=2 is less than the 4"),
        ("kv_heads=1", "kv_heads=1 is less than the 2"),
        ("ffn=79", "intermediate=79 is less than the 80"),
        ("heads=5", "heads=5 cannot share kv_heads=2 evenly"),
        ("hidden=100,heads=6", "hidden=100 is not a multiple of heads=6"),
        ("hidden=96", "hidden=96 is not a multiple of heads=4|heads=4 of 16.*it takes 6 heads"),
        ("hidden=128,heads=4", "heads=4 of 16, a size that cannot change.* hidden=128.* it takes 8 heads"),
        ("kv_heads=4,heads=4", None),
        ("hidden=80,heads=5,kv_heads=5", None),
    ],
)
def test_shapes_that_cannot_be(llama: Source, text: str, message: str | None, tmp_path: Path) -> None:
    if message is None:
        grown(llama.directory, text, tmp_path / "out")
        return
    with pytest.raises(ModelError, match=message):
        grown(llama.directory, text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_groups_that_would_need_more_keys(tmp_path: Path) -> None:
    source = make_source("qwen2", tmp_path / "source")  # 8 heads of 8 in groups of 4
    with pytest.raises(ModelError, match=r"groups of 3: for the model's groups of 4 it takes 4 key-value"):
        grown(source.directory, "hidden=72,heads=9,kv_heads=3", tmp_path / "out")


# what cannot grow


def test_a_family_that_cannot_grow(tmp_path: Path) -> None:
    source = make_source("granite", tmp_path / "source")
    with pytest.raises(ModelError, match="a model of family granite cannot grow, only one of llama"):
        grown(source.directory, WIDER, tmp_path / "out")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_not_supported(name: str, tmp_path: Path) -> None:
    source = make_source(name, tmp_path / "source")
    with pytest.raises(ModelError, match=r"a mixture of experts .* not supported"):
        grown(source.directory, WIDER, tmp_path / "out")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1])
def test_a_gguf_file_grows(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Blocks of integers become floats of the same values."""
    (file,) = write_gguf(tmp_path / "small.gguf", kind=kind)
    grown(file, "layers=3,hidden=64,heads=4,kv_heads=4,ffn=96", tmp_path / "out")
    small, large = (load_model(open_checkpoint(path), "float32") for path in (file, tmp_path / "out"))
    rows = [Rows(array([3, 14, 15, 9, 2, 6, 40]), 0)]
    expected, logits = (run(model, rows)[0][0] for model in (small, large))
    assert float((expected - logits).abs().max()) < 1e-4 * float(expected.abs().max())


def test_the_tokenizer_in_a_file_gets_files_of_its_own(sibyl: LLM, tmp_path: Path) -> None:
    tokenizer = sibyl.tokenizer
    assert tokenizer is not None
    write_tokenizer(tmp_path, tokenizer, (5, 7))
    read = Tokenizer.from_directory(tmp_path)
    text = [{"role": "user", "content": "Once upon a time"}]
    assert read.fingerprint == tokenizer.fingerprint
    assert read.encode_chat(text) == tokenizer.encode_chat(text)
    assert (read.templates, read.special) == (tokenizer.templates, tokenizer.special)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [5, 7]}
    both = Tokenizer(tokenizer.backend, {"default": "a", "tool_use": "b"}, {})
    write_tokenizer(tmp_path, both, ())
    assert Tokenizer.from_directory(tmp_path).templates == both.templates


def test_a_directory_in_use_stays_as_it_is(llama: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (llama.directory, tmp_path / "file"):
        with pytest.raises(ModelError, match="exists and is not an empty directory"):
            grown(llama.directory, WIDER, out)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    grown(llama.directory, WIDER, tmp_path / "empty")


def test_a_full_disk(llama: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = writing.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"takes 0\.0 GB, and 0\.0 GB of disk are left"):
        grown(llama.directory, WIDER, tmp_path / "out")


def test_weights_that_are_no_floating_point_or_do_not_fit(llama: Source, tmp_path: Path) -> None:
    file = llama.directory / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**stored, name: stored[name].to(torch.int8)}, file)
    with pytest.raises(ModelError, match=f"{name} is torch.int8; grow the model that it was made from"):
        grown(llama.directory, WIDER, tmp_path / "int8")
    save_file({**stored, name: stored[name][:40].clone()}, file)
    with pytest.raises(ModelError, match=rf"{name} is \[40, 64\]; by config.json it should be \[80, 64\]"):
        grown(llama.directory, WIDER, tmp_path / "short")
    del stored[name]
    save_file(stored, file)
    with pytest.raises(ModelError, match=f"has no tensor '{name}'"):
        grown(llama.directory, WIDER, tmp_path / "missing")
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    write_config(llama.directory, {**read_config(llama.directory), "quantization_config": quantized})
    with pytest.raises(ModelError, match="is quantized and cannot grow"):
        grown(llama.directory, WIDER, tmp_path / "quantized")


# the command


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["grow", *args], env={"COLUMNS": "200"})


def test_the_command(sibyl: LLM, tmp_path: Path) -> None:
    out = tmp_path / "large"
    result = command("sibyl", str(out), "--shape", SMALL)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    shape = asdict(GrownShape.parse(SMALL, sibyl.engine.target.model.spec))
    count = sum(tensor.numel() for tensor in weights(out).values())
    assert f"{out}: {count:,} parameters, 69.0 MB\n" in result.stdout
    assert f"{shape['layers']} layers of {shape['hidden']} hidden" in result.stdout
    assert f"soothsay bench step {out}\n" in result.stdout
    assert "draft-model(model=sibyl)" in result.stdout
    assert "drafters: block, draft-model, eagle, eagle3, hydra, medusa, mtp\n" in result.stdout
    told = CliRunner().invoke(app, ["inspect", str(out), "-d", str(out / "drafters" / "mtp")]).stdout
    assert "the first 384 of 512 dimensions" in told
    assert "computes the same function as `sibyl`" in (out / "README.md").read_text()
    source = open_checkpoint("sibyl").path
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope", "out"], "no model at 'nope'"),
        (["sibyl", "out", "--shape", "huge"], "shape 'huge'"),
        (["sibyl", "out", "--shape", "layers=1"], "layers=1 is less than the 8"),
        (["sibyl", "."], "exists and is not an empty directory"),
    ],
)
def test_its_errors_are_one_line(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    result = command(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
