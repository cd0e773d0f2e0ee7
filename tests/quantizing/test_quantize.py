"""`soothsay quantize`: what it writes, how large the errors are, and what it refuses."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from functools import partial
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

import soothsay
from soothsay import LLM, SoothsayError
from soothsay.cli.app import app
from soothsay.core.batch import Batch, Rows
from soothsay.core.params import SamplingParams
from soothsay.errors import ModelError, RequestError
from soothsay.model.decoder.blocks import unrecord
from soothsay.model.formats.declared import open_format
from soothsay.model.ops.linear import Dense
from soothsay.model.transformer import Transformer
from soothsay.model.weights import writing
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.progress import progress_shown_by
from soothsay.quantizing import quantize_model as sampling
from soothsay.quantizing import quantized_layers
from soothsay.quantizing.quantize_model import QuantizationReport, quantize, read_samples, write_samples
from soothsay.quantizing.quantized_layers import gptq
from soothsay.tokenizer import Tokenizer

PILOT = Path(soothsay.__file__).parent / "bundled" / "sibyl"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> transformers' class, its own settings
    "llama": ("Llama", {}),
    "biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "intermediate_size": 128},
    ),
    "gemma3": ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("Qwen3Moe", MOE),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {  # models with fused matrices
    "glm": ("Glm", {"pad_token_id": None, "num_hidden_layers": 3}),
}
EXPERTS = {"qwen3_moe": 4, "mixtral": 3}

Sources = Callable[[str], Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Directories with random models."""
    made: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            family, settings = (MODELS | FUSED)[name]
            suffix = "TextConfig" if family == "Gemma3" else "Config"
            config = getattr(transformers, family + suffix)(**{**SIZES, **settings})
            torch.manual_seed(0)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data.mul_(4.0)  # so that layers matter to each other
                else:
                    parameter.data.add_(0.2 * torch.randn(parameter.shape))
            model.save_pretrained(made[name])
        return made[name]

    return source


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(PILOT)


def run(source: Path, out: Path, **options: Any) -> QuantizationReport:
    options = {"dtype": "int4", "group_size": 32, "samples": 8, "tokens": 32, **options}
    return quantize(open_checkpoint(source), out, **options)


def tensors(directory: Path) -> dict[str, Tensor]:
    held = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return held


def read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def restored(source: Path, out: Path, blocks: int = 99) -> Transformer:
    """The model with the weights of the first blocks as `out` has them, in float32."""
    checkpoint, written = open_checkpoint(source), open_checkpoint(out)
    model = load_model(checkpoint, "float32")
    unrecord(model)
    names, stored = TensorNames(model.spec, checkpoint), open_format(written.config, out)
    assert stored is not None
    with checkpoint.open() as plain, written.open() as read:
        for name, layer in list(model.named_modules()):
            if not name.startswith("blocks.") or not hasattr(layer, "out_features"):
                continue
            weights = [plain(f"{part}.weight").float() for part in names.of(name)]
            if int(name.split(".")[1]) < blocks and not name.endswith("router"):
                weights = [stored.read(read, part).dequantize() for part in names.of(name)]
            model.set_submodule(name, Dense(torch.cat(weights), layer.bias))
    return model


@torch.no_grad()
def run_text(model: Transformer, text: Tensor) -> Tensor:
    """Final states of samples `[n, tokens]`, normed: `[n, tokens, hidden]`."""
    rows = [Rows(sample.numpy(), 0) for sample in text]
    hidden, _ = model(Batch.pack(rows, group=model.spec.group, windows=model.spec.windows))
    return hidden.view(*text.shape, -1)


def perplexity(model: Transformer, text: Tensor) -> float:
    logits = model.logits(run_text(model, text)[:, :-1].flatten(0, 1))
    return exp(float(F.cross_entropy(logits, text[:, 1:].flatten())))


def sampled(source: Path, count: int, tokens: int = 32) -> Tensor:
    return write_samples(load_model(open_checkpoint(source)), None, count, tokens)


# what is written


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_every_linear_layer_and_nothing_else(name: str, dtype: str, sources: Sources, tmp_path: Path) -> None:
    source, out = sources(name), tmp_path / "deep" / "out"
    report = run(source, out, dtype=dtype)
    before, after, config = tensors(source), tensors(out), read_json(out / "config.json")
    stored, declared = open_format(config, out), config.pop("quantization_config")
    assert stored is not None
    kinds = {"int4": "int4, groups of 32", "int8": "int8, a scale per channel"}
    assert stored.name == f"{kinds[dtype]} (compressed-tensors)"
    linear = {n.removesuffix(".weight") for n, t in before.items() if t.ndim == 2}
    kept = {n for n in linear if n.endswith(("embed_tokens", "lm_head", "mlp.gate", "block_sparse_moe.gate"))}
    assert len(linear - kept) >= 14
    for part in linear - kept:
        assert stored.holds(frozenset(after), part)
        weight = stored.read(after.__getitem__, part).dequantize()
        error = float((weight - before[f"{part}.weight"]).norm() / before[f"{part}.weight"].norm())
        assert error < (0.01 if dtype == "int8" else 0.2)
    plain = {n: t for n, t in after.items() if not any(n in stored.tensors(part) for part in linear - kept)}
    assert plain.keys() == before.keys() - {f"{part}.weight" for part in linear - kept}
    assert all(torch.equal(tensor, before[n]) for n, tensor in plain.items())
    ignored = {"lm_head", *(part for part in kept if not part.endswith("embed_tokens"))}
    assert set(declared["ignore"]) == ignored
    assert config == read_json(source / "config.json")
    mlp = ["mlp.experts.gate_up", "mlp.experts.down"] if name in EXPERTS else ["mlp.gate_up", "mlp.down"]
    assert list(report.errors) == ["attention.qkv", "attention.o", *mlp]
    each = [len(errors) for errors in report.errors.values()]
    assert each == [2, 2, 2 * EXPERTS.get(name, 1), 2 * EXPERTS.get(name, 1)]
    sizes = [sum(file.stat().st_size for file in where.glob("*.safetensors")) for where in (source, out)]
    assert [report.bytes_before, report.bytes_after] == sizes
    assert sizes[1] < sizes[0]
    assert (report.perplexity is None) == (dtype == "int8")


def test_it_loads_as_it_was_written(sources: Sources, tmp_path: Path) -> None:
    run(sources("llama"), tmp_path / "out")
    text = sampled(sources("llama"), 2)
    loaded = run_text(load_model(open_checkpoint(tmp_path / "out")), text)
    expected = run_text(restored(sources("llama"), tmp_path / "out"), text)
    likeness = F.cosine_similarity(loaded.flatten(), expected.flatten(), dim=0)
    assert likeness > 0.999  # products are of int8 activations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_transformers_loads_it(dtype: str, sources: Sources, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source, out = sources("biases"), tmp_path / "out"
    run(source, out, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours, ids = restored(source, out), torch.arange(1, 33)[None]
    with torch.no_grad():
        said = theirs(ids).logits[0]
    expected = ours.logits(run_text(ours, ids)[0])
    likeness = F.cosine_similarity(said.flatten(), expected.flatten(), dim=0)
    assert likeness > (0.999 if dtype == "int8" else 0.999999)


def test_files(sources: Sources, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources("llama"), source)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(PILOT / file, source / file)
    (source / "additional_chat_templates").mkdir()
    for file in ("LICENSE.txt", "source.spm", "additional_chat_templates/tool_use.jinja"):
        (source / file).write_text(file)
    (source / "pytorch_model.bin").write_text("no")
    (source / "README.md").write_text("of the other model")
    shard = (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(source), shard.name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "out").mkdir()  # an empty directory is accepted
    run(source, tmp_path / "out", method="round")
    copied = {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE.txt",
        "source.spm",  # Marian's tokenizer
        "additional_chat_templates/tool_use.jinja",
    }
    out = tmp_path / "out"
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert written == copied | {"config.json", "model.safetensors"}
    assert all((out / file).read_bytes() == (source / file).read_bytes() for file in copied)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "source"]


def test_shards(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sources("llama"), tmp_path / "one", method="round")
    whole = tensors(tmp_path / "one")
    monkeypatch.setattr(writing, "SHARD_BYTES", 20_000)
    run(sources("llama"), tmp_path / "many", method="round")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors(tmp_path / "many").items())
    index = read_json(tmp_path / "many" / "model.safetensors.index.json")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    sizes = [sum(whole[n].nbytes for n, f in index["weight_map"].items() if f == file.name) for file in files]
    largest = max(tensor.nbytes for tensor in whole.values())
    assert all(size <= max(20_000, largest) for size in sizes)
    assert len(files) <= 2 + 2 * sum(sizes) // 20_000
    assert open_checkpoint(tmp_path / "many").names() == whole.keys()


@pytest.mark.parametrize("method", ["gptq", "round"])
def test_the_same_again(method: str, sources: Sources, tmp_path: Path) -> None:
    first, second = (run(sources("llama"), tmp_path / out, method=method) for out in "ab")
    assert first == second
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def test_groups_that_divide_all_inputs(sources: Sources, tmp_path: Path) -> None:
    for name, asked, given in (("llama", 128, 32), ("biases", 128, 64), ("biases", 32, 32)):
        out = tmp_path / f"{name}-{asked}"
        assert run(sources(name), out, method="round", group_size=asked).scheme.group_size == given
    source = tmp_path / "source"
    shutil.copytree(sources("llama"), source)
    config = read_json(source / "config.json")
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(
        ModelError, match=r"100 inputs of blocks\.0\.mlp\.down .* groups of 64 .* 32; choose int8"
    ):
        run(source, tmp_path / "b", group_size=64)


# errors


def test_gptq_loses_less_than_rounding(sources: Sources, tmp_path: Path) -> None:
    source = sources("llama")
    unseen = sampled(source, 80)[72:]
    plain = run_text(load_model(open_checkpoint(source), "float32"), unseen)
    errors = {}
    for method in ("gptq", "round"):
        run(source, tmp_path / method, method=method, samples=64)
        errors[method] = float((run_text(restored(source, tmp_path / method), unseen) - plain).norm())
    assert errors["gptq"] < 0.8 * errors["round"]


@pytest.mark.parametrize("name", ["biases", "gemma3", "qwen3_moe"])
def test_layers_meet_the_inputs_that_earlier_ones_give(
    name: str, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = sources(name), []

    def watch(weight: Tensor, hessian: Tensor, bits: int, group_size: int | None) -> Any:
        seen.append(hessian.clone())
        return gptq(weight, hessian, bits, group_size)

    monkeypatch.setattr(quantized_layers, "gptq", watch)
    monkeypatch.setattr(quantized_layers, "ROWS", 100)  # three samples at a time
    report = run(source, tmp_path / "out")
    errors = {kind: iter(values) for kind, values in report.errors.items()}
    text, hessians = sampled(source, 9)[1:], iter(seen)
    plain, done = (restored(source, tmp_path / "out", blocks) for blocks in (0, 2))
    for number in range(2):
        model = restored(source, tmp_path / "out", blocks=number)
        paths = [
            n
            for n, m in model.blocks[number].named_modules()
            if hasattr(m, "out_features") and "router" not in n
        ]
        inputs: dict[str, list[Tensor]] = {}
        for path in paths:
            model.blocks[number].get_submodule(path).register_forward_pre_hook(
                partial(lambda into, _, args: into.append(args[0]), inputs.setdefault(path, []))
            )
        run_text(model, text)
        for path in paths:
            x = torch.cat(inputs[path])
            products, largest = x.t() @ x, float(x.square().sum(0).max())
            assert torch.allclose(next(hessians), products, rtol=1e-3, atol=1e-3 * largest), path
            old, new = (
                x @ m.get_parameter(f"blocks.{number}.{path}.weight").detach().t() for m in (plain, done)
            )
            error = next(errors[".".join(part for part in path.split(".") if not part.isdigit())])
            assert error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-2), path
    assert next(hessians, None) is None


def test_experts_that_no_text_comes_to_are_rounded(sources: Sources, tmp_path: Path) -> None:
    report = run(sources("qwen3_moe"), tmp_path / "out", samples=1, tokens=2)
    assert len(report.errors["mlp.experts.down"]) == 8
    assert all(0 < error < 0.3 for error in report.errors["mlp.experts.down"])
    assert report.perplexity is None  # nothing was held back


def test_perplexity_is_of_text_held_back(sources: Sources, tmp_path: Path) -> None:
    source = sources("llama")
    report = run(source, tmp_path / "out", samples=16)
    held = sampled(source, 18)[:2]
    before, after = load_model(open_checkpoint(source), "float32"), restored(source, tmp_path / "out")
    assert report.perplexity == pytest.approx((perplexity(before, held), perplexity(after, held)), rel=1e-4)


def test_blocks_that_run_in_one_call_are_taken_apart(tmp_path: Path) -> None:
    """Blocks that run in one call show neither the inputs of their layers nor layers that were replaced."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=128, num_hidden_layers=2, max_position_embeddings=64, **sizes
    )
    torch.manual_seed(0)
    source = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in source.parameters():
        parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0)
    source.save_pretrained(tmp_path / "source")
    model = load_model(open_checkpoint(tmp_path / "source"))
    if model.blocks.recorded is None:
        pytest.skip("blocks do not run in one call here")
    report = run(tmp_path / "source", tmp_path / "out", samples=16)
    held = sampled(tmp_path / "source", 18)[:2]
    before = load_model(open_checkpoint(tmp_path / "source"), "float32")
    after = restored(tmp_path / "source", tmp_path / "out")
    assert report.perplexity == pytest.approx((perplexity(before, held), perplexity(after, held)), rel=0.02)
    assert report.perplexity is not None
    assert abs(report.perplexity[1] / report.perplexity[0] - 1) > 1e-3


def test_errors_of_rounding(sources: Sources, tmp_path: Path) -> None:
    source = sources("llama")
    report = run(source, tmp_path / "out", method="round")
    plain, model = load_model(open_checkpoint(source), "float32"), restored(source, tmp_path / "out")
    stored, names = open_checkpoint(source), TensorNames(plain.spec, open_checkpoint(source))
    with stored.open() as read:
        for number, error in enumerate(report.errors["attention.qkv"]):
            weight = torch.cat(
                [read(f"{part}.weight") for part in names.of(f"blocks.{number}.attention.qkv")]
            )
            lost = model.get_parameter(f"blocks.{number}.attention.qkv.weight").detach() - weight
            assert error == pytest.approx(float(lost.norm() / weight.norm()), rel=1e-4)


def test_layers_that_are_zero(sources: Sources, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(sources("llama"), source)
    held = tensors(source)
    for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"):  # all inputs of down are zeros
        held[f"model.layers.1.{part}.weight"].zero_()
    save_file(held, source / "model.safetensors")
    report = run(source, tmp_path / "out")
    assert report.errors["attention.o"][1] == report.errors["mlp.gate_up"][1] == 0
    assert 0 < report.errors["mlp.gate_up"][0] < 0.2
    model = restored(source, tmp_path / "out")
    assert not model.get_parameter("blocks.1.attention.o.weight").any()
    assert model.get_parameter("blocks.1.mlp.down.weight").any()


def test_progress(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "AT_ONCE", 4)
    told: list[tuple[str, int, int]] = []
    with progress_shown_by(lambda *step: told.append(step)):
        run(sources("llama"), tmp_path / "out")
    assert [step for step in told if step[0] == "quantizing"] == [("quantizing", i, 8) for i in range(1, 9)]
    writing = [done for what, done, total in told if what == "writing calibration text" and total == 9 * 32]
    assert writing == sorted(writing)
    assert writing[-1] == 9 * 32


# calibration text


def test_the_model_writes_its_own(tokenizer: Tokenizer, sibyl: LLM, sources: Sources) -> None:
    samples = write_samples(sibyl.model, tokenizer, 2, 40)
    assert samples.shape == (2, 40)
    for seed, sample in enumerate(samples.tolist()):
        text = tokenizer.decode(sample, skip_special=False)
        assert text.startswith("<|user|>")
        begin = sample.index(tokenizer.vocabulary()["<|assistant|>"]) + 1
        params = SamplingParams(temperature=1, seed=seed, max_tokens=40 - begin, ignore_eos=True)
        assert sibyl.generate(sample[:begin], params).token_ids == sample[begin:]
    bare = Tokenizer(tokenizer.backend)
    assert write_samples(sibyl.model, bare, 1, 8)[0, 0] not in (samples[0, 0], 0)
    many = sampled(sources("llama"), 40)  # more than are written at once
    assert many.shape == (40, 32)
    assert len(set(many[:, 0].tolist())) > 20
    assert torch.equal(many[:5], sampled(sources("llama"), 5))


def test_samples_from_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    entries: list[Any] = [{"text": f"line {i} \u2028 of many"} for i in range(50)]
    entries[7] = {
        "messages": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Bye."}]
    }
    file = tmp_path / "text.jsonl"
    file.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n\n")
    everything = read_samples(file, tokenizer, 10**6, 4)
    said = tokenizer.decode(everything.flatten().tolist(), skip_special=False)
    assert "<|user|>Hello!<|end|><|assistant|>Bye.<|end|>" in said
    assert said.count("<|assistant|>") == 1
    order = [int(word) for word in said.replace("line", " line ").split() if word.isdecimal()]
    assert sorted(order) == [i for i in range(50) if i != 7] != order
    assert torch.equal(read_samples(file, tokenizer, 3, 4), everything[:3])
    packed = tmp_path / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert torch.equal(read_samples(packed, tokenizer, 10**6, 4), everything)
    bare = tokenizer.decode(read_samples(file, Tokenizer(tokenizer.backend), 10**6, 4).flatten().tolist())
    assert "Hello!\n\nBye." in bare


class CountingTokenizer(Tokenizer):
    """Counts the texts that it encodes."""

    encoded = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.encoded += 1
        return super().encode(text, special=special)


def test_no_more_is_read_than_needed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "A man in a blue shirt."}\n' * 100)
    counting = CountingTokenizer(tokenizer.backend)
    read_samples(file, counting, 2, 10)
    assert 2 <= counting.encoded <= 5


def test_samples_from_plain_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("A man in a blue shirt. " * 40)
    ids = tokenizer.encode(file.read_text())
    samples = read_samples(file, tokenizer, 5, 16)
    assert samples.flatten().tolist() == ids[:80]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "not JSON: Expecting property name"),
        ("[1, 2]", "a JSON object is expected, not '[1, 2]'"),
        ('{"prompt": "x"}', "neither a 'text' nor 'messages'"),
        ('{"text": 5}', "neither a 'text' nor 'messages'"),
        ('{"messages": [{"role": "user"}]}', "a message has no content"),
        ('{"messages": "hello"}', "neither a 'text' nor 'messages'"),
    ],
)
def test_lines_that_are_refused(line: str, said: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    with pytest.raises(RequestError) as caught:
        read_samples(file, tokenizer, 10**6, 4)
    assert str(caught.value).startswith(f"{file}, line 3: {said}")


def test_files_that_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    short, binary, packed = tmp_path / "short.txt", tmp_path / "binary.txt", tmp_path / "packed.txt.gz"
    short.write_text("Hello!")
    binary.write_bytes(b"\xff\xfe\x00")
    packed.write_bytes(b"not packed")
    with pytest.raises(RequestError, match=r"short\.txt has \d tokens, less than one sample of 64"):
        read_samples(short, tokenizer, 4, 64)
    for file in (binary, packed, tmp_path / "nowhere.txt"):
        with pytest.raises(RequestError, match=f"{file.name} cannot be read as text"):
            read_samples(file, tokenizer, 4, 4)
    with pytest.raises(RequestError, match="no tokenizer"):
        read_samples(short, None, 4, 4)


# what is refused


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "int3"}, ModelError, "dtype 'int3' .* choose int8 or int4"),
        ({"group_size": 16}, ModelError, r"groups of 16 .* \(128, 64, 32\)"),
        ({"dtype": "int8", "calibration": Path("x")}, RequestError, "no calibration text"),
        ({"tokens": 65}, RequestError, "65 tokens .* 2 to 64"),
        ({"tokens": 1}, RequestError, "1 tokens .* 2 to 64"),
        ({"calibration": Path("x.txt")}, RequestError, "x.txt cannot be used: the model has no tokenizer"),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], error: type[SoothsayError], said: str, sources: Sources, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        run(sources("llama"), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_places_that_are_taken(sources: Sources, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out in (file, tmp_path):
        with pytest.raises(ModelError, match=f"{out.name} exists and is not an empty directory"):
            run(sources("llama"), out, method="round")
    assert file.read_text() == "mine"


def test_sources_that_are_refused(sources: Sources, tmp_path: Path) -> None:
    run(sources("llama"), tmp_path / "once", method="round")
    with pytest.raises(ModelError, match=r"once is quantized already, to int4, groups of 32 \(compressed"):
        run(tmp_path / "once", tmp_path / "twice", dtype="int8")
    file: Any = SimpleNamespace(path=tmp_path / "model.gguf", config={})
    with pytest.raises(
        ModelError, match=r"model\.gguf is not a Hugging Face directory, .* give one, or OWNER/NAME"
    ):
        quantize(file, tmp_path / "out", "int8")


def test_nothing_is_left_of_a_failure(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.CheckpointWriter, "finish", fail)
    with pytest.raises(KeyboardInterrupt):
        run(sources("llama"), tmp_path / "out", method="round")
    assert not list(tmp_path.iterdir())


# the command


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["quantize", *args], env={"COLUMNS": "200"})


def test_command(sources: Sources, tmp_path: Path) -> None:
    options = ["--dtype", "int4", "--group-size", "64", "--samples", "8", "--tokens", "16"]
    result = command(str(sources("llama")), str(tmp_path / "a"), *options)
    assert result.exit_code == 0, result.output
    report = run(sources("llama"), tmp_path / "b", tokens=16)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line.split()[0] for line in lines] == [*report.errors, "size", "perplexity", "written"]
    assert report.perplexity is not None
    assert f"{report.perplexity[0]:.3f} before, {report.perplexity[1]:.3f} now" in result.stdout
    assert lines[-1].endswith("a: int4, groups of 32")
    assert result.stderr == ""


def test_command_in_int8(sources: Sources, tmp_path: Path) -> None:
    result = command(str(sources("llama")), str(tmp_path / "out"), "--dtype", "int8")
    assert result.exit_code == 0, result.output
    assert "perplexity" not in result.stdout
    assert open_checkpoint(tmp_path / "out").config["quantization_config"]["format"] == "int-quantized"


def test_command_says_what_is_wrong(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command(str(sources("llama")), str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {tmp_path} exists and is not an empty directory")
    assert len(result.stderr.splitlines()) == 1


def test_rows_that_loading_reorders(sources: Sources, tmp_path: Path) -> None:
    """The blocks after one with integers read its output: in the wrong order, it would be another model's."""
    report = run(sources("glm"), tmp_path / "out", dtype="int8", method="gptq")
    assert report.perplexity is not None
    before, after = report.perplexity
    assert after == pytest.approx(before, rel=0.01)
