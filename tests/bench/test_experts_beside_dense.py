"""What experts cost: the weights that are counted, and that the command runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay.bench.experts_beside_dense import bench_experts, passing, touched_experts
from soothsay.bench.random_models import LlamaShape, RandomCheckpoint
from soothsay.cli.app import app
from soothsay.model.decoder.feed_forward import Experts
from soothsay.model.weights.load import load_model

SMALL = LlamaShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=32, vocab=80, experts=8, chosen=2)
SPELLED = "layers=2,hidden=64,heads=4,kv_heads=2,ffn=32,vocab=80,experts=8,chosen=2"


def test_bytes_are_those_of_experts_that_run() -> None:
    report = bench_experts(SMALL, dtypes=["float32"], rows=[1, 16], rounds=1, read_bytes=2**16)
    expert, attention, router = 3 * 64 * 32, 2 * 64 * 64 + 2 * 64 * 32, 8 * 64
    for time in report.times:
        assert time.bytes == 4 * 2 * (expert * time.touched + attention + router)
        assert time.of_reading == pytest.approx(time.ms / 1e3 * report.bandwidth / time.bytes)
        assert time.ratio == pytest.approx(time.ms / time.dense_ms)
    one, many = report.times
    assert one.touched == SMALL.chosen
    assert SMALL.chosen < many.touched <= SMALL.experts


def test_counting_leaves_the_model_as_it_was() -> None:
    model = load_model(RandomCheckpoint(SMALL), "float32")
    assert isinstance(model.blocks[0].mlp, Experts)
    before = model.blocks.recorded is None
    run = passing(model, 3, 8)
    touched = touched_experts(model, run)
    assert len(touched) == SMALL.layers
    assert all(SMALL.chosen <= count <= 3 * SMALL.chosen for count in touched)
    assert (model.blocks.recorded is None) == before
    assert touched_experts(model, run) == touched


def test_command(tmp_path: Path) -> None:
    out = tmp_path / "times.json"
    arguments = [
        "bench",
        "experts",
        "--shape",
        SPELLED,
        "--dtype",
        "float32",
        "--rows",
        "1,2",
        "--rounds",
        "1",
    ]
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 of 8 experts of 32" in result.output
    assert [time["rows"] for time in json.loads(out.read_text())["times"]] == [1, 2]
    result = CliRunner().invoke(app, ["bench", "experts", "--shape", "layers=2"])
    assert result.exit_code != 0
    assert "no experts" in result.output
