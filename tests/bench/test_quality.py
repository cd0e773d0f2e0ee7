"""Quality beside float32: the numbers equal those of transformers, and the command prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from soothsay.bench.bench_plans import QualityPlan
from soothsay.bench.quality import bench_quality
from soothsay.cli.app import app
from soothsay.config import DType
from soothsay.core.batch import Batch, Rows
from soothsay.corpus import STRETCH
from soothsay.errors import ModelError, RequestError
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.quantizing.quantize_model import quantize
from soothsay.tokenizer import Tokenizer

SIBYL = open_checkpoint("sibyl").path
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, " * 24


def test_perplexity_is_that_of_transformers() -> None:
    [found] = bench_quality(QualityPlan(model="sibyl", tokens=128, chunk=64), TEXT, dtypes=())
    tokenizer = open_checkpoint("sibyl").tokenizer()
    assert tokenizer is not None
    begin, ids = tokenizer.encode(""), tokenizer.encode(TEXT)
    other = AutoModelForCausalLM.from_pretrained(SIBYL, dtype=torch.float32)
    losses = []
    for chunk in (ids[:64], ids[64:128]):
        row = torch.tensor([[*begin, *chunk[len(begin) :]]])
        with torch.no_grad():
            logits = other(row).logits[0, 32:-1].double()
        losses += torch.nn.functional.cross_entropy(logits, row[0, 33:], reduction="none").tolist()
    assert found.tokens == len(losses) == 2 * 31
    assert found.perplexity == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-4)
    assert (found.divergence, found.equal_best) == (0, 1)


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    reference, int4 = bench_quality(QualityPlan(model="sibyl", tokens=64, chunk=64), TEXT, dtypes=("int4",))
    checkpoint = open_checkpoint("sibyl")
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    begin = tokenizer.encode("")
    ids = np.array([*begin, *tokenizer.encode(TEXT)[len(begin) : 64]])
    p, q = _distributions("float32", ids), _distributions("int4", ids)
    divergence = (p * (p / q).log()).sum(1).mean()
    assert int4.divergence == pytest.approx(float(divergence), rel=1e-3)
    assert int4.divergence > 0
    assert int4.equal_best == (p.argmax(1) == q.argmax(1)).double().mean()
    model = load_model(checkpoint, "float32")
    assert reference.bits == (16 if isinstance(model.head, NativeLinear) else 32)  # as the file has them
    assert 4 < int4.bits < 6


def test_another_reference(tmp_path: Path) -> None:
    (file,) = write_gguf(tmp_path / "tiny.F32.gguf")
    with pytest.raises(
        RequestError, match=r"sibyl has 8,192 tokens and .*gguf .*; they need the same vocabulary"
    ):
        bench_quality(QualityPlan(model="sibyl", reference=str(file), tokens=64, chunk=64), TEXT, dtypes=())
    quantize(open_checkpoint("sibyl"), tmp_path / "int8", "int8")
    rounded = str(tmp_path / "int8")
    weights_and_inputs = bench_quality(
        QualityPlan(model=rounded, reference="sibyl", tokens=64, chunk=64), TEXT
    )[1].divergence
    inputs = bench_quality(QualityPlan(model=rounded, tokens=64, chunk=64), TEXT)[1].divergence
    assert weights_and_inputs > inputs > 0


def _distributions(dtype: DType, ids: np.ndarray) -> torch.Tensor:
    model = load_model(open_checkpoint("sibyl"), dtype)
    with torch.no_grad():
        hidden, _ = model(Batch.pack([Rows(ids, 0)], group=model.spec.group, windows=model.spec.windows))
        return model.logits(hidden[len(ids) // 2 : -1]).double().softmax(-1)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(RequestError, match="1 tokens of text are less than one chunk of 512; read more"):
        bench_quality(QualityPlan(model="sibyl"), "Hi", dtypes=())


def test_a_long_text_is_tokenized_as_far_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, encode = list[int](), Tokenizer.encode

    def noting(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
        sizes.append(len(text))
        return encode(tokenizer, text, special=special)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    (found,) = bench_quality(QualityPlan(model="sibyl", tokens=64, chunk=64), "ab " * STRETCH, dtypes=())
    assert found.tokens == 31
    assert sum(sizes) <= 2 * STRETCH


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for file in SIBYL.iterdir():
        if file.is_file() and "tokenizer" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelError, match="no tokenizer"):
        bench_quality(QualityPlan(model=str(tmp_path)), TEXT)


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "quality.json"
    file.write_text(TEXT)
    command = ["bench", "quality", "sibyl", str(file), "--dtype", "int8", "--tokens", "64", "--chunk", "32"]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [one["dtype"] for one in written] == ["float32", "int8"]
    shown = re.search(r"int8 +(\S+) +(\S+) +(\S+) +(\S+)%", result.output)
    assert shown is not None
    assert float(shown[2]) == pytest.approx(written[1]["perplexity"], abs=1e-3)
    assert written[1]["tokens"] == 2 * 15
