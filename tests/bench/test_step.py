"""t(M) and its floor: random models are what they claim, the arithmetic is right, and it all runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from soothsay.bench import step as step_module
from soothsay.bench.measure import Rates, Workload
from soothsay.bench.random_models import LlamaShape, RandomCheckpoint
from soothsay.bench.step import bench_step, multiplying
from soothsay.cli.app import app
from soothsay.core.batch import Batch, Rows
from soothsay.errors import ModelError
from soothsay.model.ops.linear import Packed, multiplies_bfloat16
from soothsay.model.specs.attention_spec import AttentionSpec, RopeSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.state_specs import DeltaSpec
from soothsay.model.timing.pass_measuring import VerifyPass, filled_cache
from soothsay.model.timing.pass_predicting import Work, held_bytes, linear_layers
from soothsay.model.transformer import Transformer
from soothsay.model.weights.load import load_model

SMALL = LlamaShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=80)
SPELLED = "layers=2,hidden=64,heads=4,kv_heads=2,ffn=96,vocab=80"


def test_shapes_are_read() -> None:
    assert LlamaShape.parse(SPELLED) == SMALL
    assert LlamaShape.parse("1.1B") == LlamaShape() == LlamaShape.parse("1B")
    assert LlamaShape.parse("layers=3") == replace(LlamaShape(), layers=3)
    assert LlamaShape.parse("3B").hidden == 3072
    mixture = replace(SMALL, experts=8, chosen=2)
    assert LlamaShape.parse(f"{SPELLED},experts=8,chosen=2") == mixture
    assert mixture.dense == replace(SMALL, ffn=192)
    for wrong in ("experts=8", "experts=2,chosen=3", "chosen=1"):
        with pytest.raises(ModelError, match=f"shape '{wrong}'"):
            LlamaShape.parse(wrong)
    for wrong in ("2B", "layers", "layers=x", "layers=0", "depth=3", "heads=3", "heads=64,kv_heads=3"):
        with pytest.raises(ModelError, match=f"shape '{wrong}'"):
            LlamaShape.parse(wrong)


def test_layers_with_states() -> None:
    """A shape of Qwen3.5's proportions runs: three of four layers keep states."""
    shape = LlamaShape.parse("hybrid")
    assert (shape.layers, shape.state_heads) == (20, 16)
    small = LlamaShape.parse("layers=4,hidden=128,heads=2,kv_heads=1,ffn=128,vocab=128,state_heads=2")
    model = load_model(RandomCheckpoint(small), "float32")
    rules = model.spec.parts(DeltaSpec)
    assert [*rules] == [0, 1, 2]
    assert (rules[0].value_heads, rules[0].key_size) == (2, 128)
    cache = filled_cache(model, 3, 4)
    assert VerifyPass(model, cache, rows=4, context=3, layout="binary")().isfinite().all()
    for wrong in ("state_heads=2,experts=4,chosen=2", "state_heads=0"):
        with pytest.raises(ModelError, match=f"shape '{wrong}'"):
            LlamaShape.parse(wrong)


def test_random_weights_depend_on_name_and_seed_only() -> None:
    first, second, other = RandomCheckpoint(SMALL), RandomCheckpoint(SMALL), RandomCheckpoint(SMALL, seed=1)
    names = sorted(first.names())
    with first.open() as read, second.open() as again, other.open() as differently:
        made = {name: read(name) for name in names}
        for name in reversed(names):
            assert torch.equal(made[name], again(name)), name
        matrices = [name for name in names if made[name].ndim == 2]
        assert not any(torch.equal(made[name], differently(name)) for name in matrices)
    first_row = {tuple(made[name][0, :8].tolist()) for name in matrices}
    assert len(first_row) == len(matrices) == 2 + 2 * 7
    assert sum(count for _, count in first.stored()) == sum(tensor.numel() for tensor in made.values())


def test_random_weights_are_made_on_their_device() -> None:
    with RandomCheckpoint(SMALL, device="meta").open() as read:
        assert all(read(name).is_meta for name in RandomCheckpoint(SMALL).names())


def test_random_weights_are_scaled_and_have_no_equal_rows() -> None:
    with RandomCheckpoint(replace(SMALL, hidden=1000, heads=2, vocab=3000)).open() as read:
        weight = read("lm_head.weight").float()
    assert weight.shape == (3000, 1000)
    assert weight.std() == pytest.approx(1000**-0.5, rel=0.01)
    assert len(weight.unique(dim=0)) == 3000
    assert torch.linalg.matrix_rank(weight[:100]) > 80


def test_a_random_model_loads_like_any_other() -> None:
    model = load_model(RandomCheckpoint(SMALL), "float32")
    assert isinstance(model, Transformer)
    assert model.spec.rotation.rope == RopeSpec(original_max_positions=32_768)
    hidden, _ = model(Batch.pack([Rows(torch.arange(8).numpy(), 0)], group=2))
    logits = model.logits(hidden)
    assert logits.isfinite().all()
    assert 0.2 < logits.std() < 5


@pytest.mark.parametrize(("layout", "leaves"), [("chain", 1), ("binary", 8)])
def test_a_step_gives_logits_for_every_row(layout: step_module.Layout, leaves: int) -> None:
    model = load_model(RandomCheckpoint(SMALL), "float32")
    step = VerifyPass(model, filled_cache(model, 32, 16), rows=16, context=32, layout=layout)
    logits = step()
    assert logits.shape == (16, 80)
    assert torch.equal(logits, step())
    assert step.rows.tree is not None
    assert len(step.rows.tree.paths()) == leaves


def test_a_step_attends_to_its_context() -> None:
    model = load_model(RandomCheckpoint(SMALL), "float32")
    cache = filled_cache(model, 36, 4)
    assert all(layer.ne(0).float().mean() > 0.99 for layer in cache.layers)
    step = VerifyPass(model, cache, rows=4, context=32)
    before = step()
    for layer in cache.layers:
        layer[:, 32:40] = 7.0  # its own, written anew
    assert torch.equal(step(), before)
    for layer in cache.layers:
        layer[:, 31] += 1.0
    assert not torch.equal(step(), before)


def parameters(model: Transformer) -> int:
    c = model.spec
    a, units = c.first(AttentionSpec), c.first(DenseSpec).size
    block = c.hidden_size * ((2 * a.heads + 2 * a.kv_heads) * a.size + 3 * units)
    return c.num_layers * block + c.vocab_size * c.hidden_size


def test_work_counts_weights_and_context(tiny: Callable[..., Transformer]) -> None:
    model = tiny()
    work = Work.of(model, rows=5, context=100)
    keys = 2 * 100  # of both layers
    assert work.bytes == 4 * parameters(model) + keys * 2 * (2 * 16) * 4
    assert work.operations == 5 * (2 * parameters(model) + keys * 2 * 2 * (4 * 16))
    windowed = Work.of(tiny(windows=(10, None)), rows=5, context=100)
    assert work.bytes - windowed.bytes == 90 * 2 * (2 * 16) * 4


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 16), ("bfloat16", 16), ("int8", 8), ("int4", 4)])
def test_work_counts_what_layers_hold(dtype: step_module.DType, bits: int) -> None:
    if dtype == "bfloat16" and not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    shape = LlamaShape(layers=1, hidden=128, heads=2, kv_heads=1, ffn=256, vocab=128)
    model = load_model(RandomCheckpoint(shape), dtype)
    for layer, size in linear_layers(model):
        head = layer is model.head
        least = size.numel() * (8 if head and bits == 4 else bits) // 8
        stored = least
        if not type(layer).__name__.startswith("Native"):  # stock operations need more
            stored = {16: 4, 4: 8}.get(bits, 0) * size.numel()
        assert least <= held_bytes(layer) <= max(stored, least) * 1.2, (layer, size)


def test_held_bytes_of_a_packed_layer() -> None:
    assert held_bytes(Packed(torch.ones(64, 32), torch.ones(64))) == 4 * (64 * 32 + 64)


def test_the_floor_is_the_longer_time() -> None:
    work = Work(bytes=600, operations=5000)
    assert work.floor(bandwidth=100, rate=1000) == 6
    assert work.floor(bandwidth=100, rate=500) == 10


def test_the_product_counts_its_operations() -> None:
    model = load_model(RandomCheckpoint(SMALL), "float32")
    assert multiplying(model)() == 2 * 256 * (2 * 96) * 64


def test_reports_medians_ratios_and_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"float32 32 1": [0.002, 0.004, 0.008], "float32 32 4": [0.003, 0.006, 0.012]}

    def measured(contenders: Mapping[str, Workload], rounds: int) -> Rates:
        assert rounds == 3
        assert all(run() > 0 for run in contenders.values())
        rates = {"read": [1e6, 2e6, 1e6], "float32 product": [1e8, 1e8, 4e8]}
        assert contenders.keys() == {*rates, *seconds}
        return Rates(rates | {name: [1 / second for second in times] for name, times in seconds.items()})

    monkeypatch.setattr(step_module, "interleave", measured)
    report = bench_step(SMALL, dtypes=["float32"], rows=[4], contexts=[32], rounds=3, read_bytes=64)
    model = load_model(RandomCheckpoint(SMALL), "float32")
    one, four = report.times
    assert (report.bandwidth, report.rates) == (2e6, {"float32": 4e8})
    assert (one.rows, one.ms, one.ratio) == (1, pytest.approx(4), 1)
    assert (four.rows, four.ms, four.ratio) == (4, pytest.approx(6), pytest.approx(1.5))
    for time in (one, four):
        work = Work.of(model, time.rows, 32)
        assert (time.bytes, time.operations) == (work.bytes, work.operations)
        assert time.floor_ms == pytest.approx(1e3 * max(work.bytes / 2e6, work.operations / 4e8))


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_module, "reading", lambda size: lambda: size)
    options = [
        "--dtype",
        "float32",
        "--dtype",
        "bfloat16",
        "--rows",
        "2, 4",
        "--context",
        "16",
        "--context",
        "40",
    ]
    out = tmp_path / "steps.json"
    arguments = ["bench", "step", "--shape", SPELLED, *options, "--rounds", "2", "--tree", "binary"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    keys = [(time["dtype"], time["context"], time["rows"]) for time in report["times"]]
    assert keys == [(d, c, m) for d in ("float32", "bfloat16") for c in (16, 40) for m in (1, 2, 4)]
    assert report["layout"] == "binary"
    assert set(report) == {
        *("model", "layout", "kernels", "threads", "rounds", "bandwidth", "rates", "times")
    }
    assert set(report["times"][0]) >= {
        "ms",
        "ratio",
        "floor_ms",
        "bytes",
        "operations",
        "experts",
        "of_dense",
    }
    assert re.search(r"\n +40 +1 +[\d.]+ +1\.00x +[\d.]+ +[\d.]+x +0\.000", result.stdout)
    assert "median of 2 rounds" in result.stdout


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [(["my.gguf"], ["auto"]), ([], ["bfloat16"]), (["my.gguf", "--dtype", "float32"], ["float32"])],
)
def test_a_file_runs_in_its_own_type(
    options: list[str], dtypes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def bench(model: object, types: list[str], *others: object, **more: object) -> step_module.StepReport:
        asked.append(types)
        return step_module.StepReport(str(model), "chain", "native", 2, 1, 1.0, {"auto": 1.0}, [])

    monkeypatch.setattr(step_module, "bench_step", bench)
    monkeypatch.setattr(step_module, "step_table", lambda report: "")
    assert CliRunner().invoke(app, ["bench", "step", *options]).exit_code == 0
    assert asked == [dtypes]


def test_the_models_own_type_is_named() -> None:
    model = load_model(RandomCheckpoint(SMALL), "int4")
    assert step_module._shown("auto", model) == "auto (int4)"
    assert step_module._shown("int4", model) == "int4"
    assert step_module._shown("auto", load_model(RandomCheckpoint(SMALL), "float32")) == "auto (float32)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["sibyl", "--shape", "1.1B"], "not both"),
        (["--rows", "1,x"], "--rows 1,x"),
        (["--rows", "0"], "--rows 0"),
        (["--dtype", "int3"], "--dtype int3: choose from auto, float32"),
        (["--shape", "huge"], "write 1.1B"),
    ],
)
def test_command_refuses(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


MIXTURE, MIXED = replace(SMALL, ffn=32, experts=8, chosen=2), f"{SPELLED},experts=8,chosen=2"


def test_experts_count_that_run_and_a_dense_model_goes_beside() -> None:
    report = bench_step(MIXTURE, ["float32"], [16], rounds=1, dense=MIXTURE.dense, read_bytes=2**16)
    assert [(time.dtype, time.rows) for time in report.times] == [
        *(("float32", 1), ("float32", 16), ("float32, dense", 1), ("float32, dense", 16)),
    ]
    model, expert = load_model(RandomCheckpoint(MIXTURE), "float32"), 3 * 64 * 32
    for time, dense in zip(report.times[:2], report.times[2:], strict=True):
        work, experts = Work.of(model, time.rows, 128), time.experts or 0
        assert time.bytes == work.bytes - 4 * MIXTURE.layers * expert * (8 - experts)
        assert time.operations == work.operations - 2 * time.rows * MIXTURE.layers * expert * (8 - 2)
        assert time.of_dense == pytest.approx(time.ms / dense.ms)
        assert (dense.experts, dense.of_dense) == (None, None)
    one, many = report.times[:2]
    assert one.experts == MIXTURE.chosen < (many.experts or 0) <= MIXTURE.experts


def test_the_command_for_experts(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    options = ["--dtype", "float32", "--rows", "1,2", "--rounds", "1", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "experts", "--shape", MIXED, *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert re.search(r"of dense +experts", result.stdout)
    assert [time["rows"] for time in json.loads(out.read_text())["times"]] == [1, 2, 1, 2]
    result = CliRunner().invoke(app, ["bench", "experts", "--shape", "layers=2"])
    assert result.exit_code != 0
    assert "no experts" in result.output
