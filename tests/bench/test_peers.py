"""Peers: their model files, processes, records and tables.

The only real engines are those of the development environment.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import write_gguf
from typer.testing import CliRunner, Result

from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.bench.peers.peer_bench import CONTEXT, PROMPT, VERIFIED, PeerBench, PeerPlan, turns
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.peers.peer_results import (
    ANSWER,
    OURS,
    PeerRecord,
    PeerResults,
    equal_tokens,
)
from soothsay.cli.app import app
from soothsay.errors import SoothsayError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.progress import progress_shown_by

IDS = list(range(300, 332))

FAKE = """#!{python}
# An engine whose tokens count up from the prompt's length, if it is not ours. It notes each call.
import json, sys
name, setup = sys.argv[3], json.loads(sys.argv[4])
calls = open({calls!r}, "a")
def note(call):
    print(name, setup["dtype"], call, file=calls, flush=True)
def reply(**line):
    print(json.dumps(line), flush=True)
print("noise of", name, file=sys.stderr)
reply(result=dict(version="7", modes=["plain", "auto" if name == "soothsay" else "lookup"]))
for line in sys.stdin:
    call, args = json.loads(line).values()
    note(call)
    first = len(args[0]) + (1000 if name == "soothsay" else 0) if args else 0
    tokens = list(range(first, first + 200))
    if call == "load":
        reply(result=None)
    elif call == "decode":
        reply(result=[0.5, tokens[: args[1] + 1]])
    elif call == "prompt":
        reply(result=0.25)
    elif call == "verify":
        reply(result=None if name == "transformers" else [0.001 * args[1], 9.0, 0.0])
    elif call == "generate" and args[2] == "lookup" and setup["drafters"] == ["none"]:
        reply(unavailable="it cannot")
    elif call == "generate" and args[1] == 14:
        sys.exit("a crash")
    elif call == "generate" and args[1] != 13:
        reply(result=[2.0 if args[2] == "plain" else 1.0, tokens[: args[1]]])
    elif call == "generate":
        reply(error="ValueError: thirteen")
    else:
        sys.exit("no such call")
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """An interpreter that is no interpreter, but an engine."""
    path = tmp_path / "fake"
    path.write_text(FAKE.format(python=sys.executable, calls=str(tmp_path / "calls")))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[str]]:
    """A function that returns the calls to fake engines since its last call."""

    def take() -> list[str]:
        path = tmp_path / "calls"
        lines = path.read_text().splitlines() if path.is_file() else []
        path.unlink(missing_ok=True)
        return lines

    return take


# results


def record(engine: str = OURS, item: str = "1", seconds: float = 1.0, **other: Any) -> PeerRecord:
    fixed = {"measure": "decode", "dtype": "int8", "mode": "plain", "tokens": 4}
    return PeerRecord(**fixed | other, engine=engine, item=item, seconds=seconds)


def test_results_survive(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = PeerResults({"model": "a"}, path)
    first.add(record(output=[1, 2]))
    first.add(record(item="2"))
    again = PeerResults({"model": "a"}, path)
    own = "decode", "int8", OURS, "plain"
    assert [*again.by_key] == [(*own, "1"), (*own, "2")]
    assert (*own, "2") in again
    assert (*own, "3") not in again
    assert ("decode", "int4", *own[2:], "1") not in again
    with path.open("a") as file:
        file.write('{"measure": "dec')  # killed while it wrote
    cut = PeerResults({"model": "a"}, path)
    cut.add(record(item="3"))
    assert [json.loads(line).get("item") for line in path.read_text().splitlines()] == [None, "1", "2", "3"]
    with pytest.raises(SoothsayError, match="another run: other model"):
        PeerResults({"model": "b"}, path)
    path.write_text("not of this kind\n")
    with pytest.raises(SoothsayError, match="does not hold measurements"):
        PeerResults({"model": "a"}, path)


def test_results_are_medians_of_rounds() -> None:
    results = PeerResults({})
    for item, seconds in enumerate((1.0, 5.0, 2.0)):
        results.add(record(item=str(item), seconds=seconds))
        results.add(record("other", str(item), 2 * seconds))
        results.add(record("other", str(item), 100.0, dtype="int4"))
        results.add(record("other", str(item), 100.0, measure="prompt"))
    assert results.medians("decode", "int8") == {OURS: (2.0, 4), "other": (4.0, 4)}


def test_agreement_is_the_median_of_leading_tokens() -> None:
    assert equal_tokens([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert equal_tokens([], [1]) == 0
    results = PeerResults({})
    for item, same in enumerate((0, 30, 32)):
        results.add(record(item=str(item), output=[5] * 32))
        results.add(record("other", str(item), output=[5] * same + [6] * (32 - same)))
    assert results.agreement("int8") == {"other": 30}
    assert results.agreement("int4") == {}


def test_rates_are_means_over_prompts_that_all_have_answered() -> None:
    results = PeerResults({})
    for item, task, seconds in (("1", "qa", 1.0), ("2", "qa", 2.0), ("3", "rag", 4.0), ("4", "rag", 8.0)):
        results.add(record(item=item, seconds=seconds, measure=ANSWER, task=task))
        if item != "4":
            results.add(record("other", item, seconds / 2, measure=ANSWER, task=task, mode="lookup"))
    ours, theirs = (OURS, "plain"), ("other", "lookup")
    assert results.rates("int8") == {
        "qa": {ours: 3.0, theirs: 6.0},
        "rag": {ours: 1.0, theirs: 2.0},
        "overall": {ours: pytest.approx(7 / 3), theirs: pytest.approx(14 / 3)},
    }


# processes


def setup(dtype: str = "float32") -> Setup:
    return Setup(model=str(open_checkpoint("sibyl").path), dtype=dtype, threads=1, context=128)


@pytest.mark.slow
def test_engines_of_this_environment_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as commands do
    with (
        PeerProcess(OURS, setup(), sys.executable, tmp_path / "ours.log") as ours,
        PeerProcess("transformers", setup(), sys.executable, tmp_path / "theirs.log") as theirs,
    ):
        assert theirs.version == f"{transformers.__version__}, torch {torch.__version__}"
        for engine in (ours, theirs):
            engine.call("load")
            seconds, decoded = engine.call("decode", IDS, 11)
            assert seconds > 0
            assert len(decoded) == 12
            assert all(engine.call("generate", IDS, 12, mode)[1] == decoded for mode in engine.modes)
            assert engine.call("prompt", IDS) > 0
            passes = engine.call("verify", IDS, 4, 3)
            assert passes is not None
            assert len(passes) == 3
            assert min(passes) > 0
        assert ours.modes == ("plain", "auto")
        assert ours.call("decode", IDS, 11)[1] == theirs.call("decode", IDS, 11)[1]
        with pytest.raises(
            SoothsayError, match=r"soothsay: RequestError: the prompt has token 9999;.*ours\.log"
        ):
            ours.call("generate", [9999], 1, "plain")
        with pytest.raises(SoothsayError, match="drafter 'bogus' is unknown"):
            ours.call("generate", IDS, 1, "bogus")
        assert ours.call("generate", IDS, 1, "plain")[1] == decoded[:1]


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("llama.cpp", "llama_cpp", "llama-cpp-python"),
        ("openvino", "openvino", "openvino-genai"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_a_missing_engine_says_how_to_install_it(
    name: str, module: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text("print('noise')\nraise ImportError('gone')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = rf"{package} is not installed \(gone\): {re.escape(sys.executable)} -m pip install {package}"
    with pytest.raises(UnavailableError, match=message):
        PeerProcess(name, setup(), sys.executable, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "noise\n"


def test_an_engine_without_a_dtype_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="transformers runs no int8"):
        PeerProcess("transformers", setup("int8"), sys.executable, tmp_path / "log")


def test_an_engine_that_runs_on_a_cpu_alone_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="it is not run on cuda here"):
        PeerProcess("openvino", replace(setup(), device="cuda"), sys.executable, tmp_path / "log")


def test_a_process_that_fails_says_so(fake: str, tmp_path: Path) -> None:
    with pytest.raises(SoothsayError, match="cannot be run with /no/python"):
        PeerProcess(OURS, setup(), "/no/python", tmp_path / "log")
    with PeerProcess("llama.cpp", setup(), fake, tmp_path / "log") as client:
        with pytest.raises(SoothsayError, match=r"llama\.cpp: ValueError: thirteen; see .*log"):
            client.call("generate", IDS, 13, "plain")
        with pytest.raises(SoothsayError, match=r"llama\.cpp ended with a crash; see .*log"):
            client.call("generate", IDS, 14, "plain")
        with pytest.raises(SoothsayError, match=r"ended"):
            client.call("prompt", IDS)


@pytest.fixture
def only_fakes(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own engine is a fake too, so that no process loads a model."""
    monkeypatch.setattr(sys, "executable", fake)


# the whole


QUESTIONS = [("81", "writing"), ("82", "coding"), ("241", "qa"), ("242", "qa"), ("243", "qa"), ("300", "rag")]


@pytest.fixture
def plan(fake: str, tmp_path: Path) -> PeerPlan:
    questions = tmp_path / "questions.jsonl"
    texts = {"300": "word " * 3000}
    questions.write_text(
        "".join(
            json.dumps(
                {"question_id": int(name), "category": kind, "turns": [texts.get(name, f"What is {name}?")]}
            )
            + "\n"
            for name, kind in QUESTIONS
        )
    )
    return PeerPlan(
        model="sibyl",
        work=tmp_path / "work",
        threads=1,
        pythons=[fake],
        tokens=8,
        rounds=2,
        peers=["transformers", "openvino", "llama.cpp"],
        prompts=questions,
        per_task=2,
        max_tokens=4,
    )


@pytest.mark.usefixtures("only_fakes")
def test_peers_take_turns_and_a_file_is_continued(
    plan: PeerPlan, tmp_path: Path, calls: Callable[[], list[str]]
) -> None:
    told: list[tuple[str, int, int]] = []
    path = tmp_path / "out.jsonl"
    bench = PeerBench(plan, path)
    with progress_shown_by(lambda *step: told.append(step)):
        results = bench.run()
    assert bench.notes == [
        "1 of 5 prompts left out: with 4 tokens to answer they are longer than the model's context of 2048",
        "llama.cpp, bfloat16: llama.cpp runs GGUF files: convert this model with its convert_hf_to_gguf.py, "
        "and measure that file",
    ]
    assert [(one.id, one.task) for one, _ in bench.questions] == [
        ("81", "conversation"),
        ("241", "qa"),
        ("82", "conversation"),
        ("243", "qa"),
    ]
    assert results.medians("decode", "bfloat16")["openvino"] == (0.5, 8)
    assert results.medians("prompt", "bfloat16")["transformers"] == (0.25, PROMPT)
    assert results.medians("verify 8", "bfloat16")["openvino"] == (0.008, 8)
    assert results.medians("verify 8", "bfloat16").keys() == {OURS, "openvino"}
    assert results.medians("decode", "bfloat16")[OURS] == (0.5, 8)
    assert results.agreement("bfloat16") == {"transformers": 0, "openvino": 0}
    rates = results.rates("bfloat16")["qa"]
    assert rates[OURS, "auto"] == 4
    assert rates["openvino", "plain"] == 2
    assert rates["openvino", "lookup"] == 4
    assert len(rates) == 6
    steps = [step for step in told if step[0] == "bfloat16: answers"]
    assert steps == [("bfloat16: answers", done, 24) for done in range(25)]
    asked = calls()
    assert asked.count("openvino bfloat16 decode") == 3  # one to warm up
    assert asked.count("openvino bfloat16 verify") == 3 * len(VERIFIED)
    assert asked.count("openvino bfloat16 generate") == 2 * (1 + 4)

    lines = path.read_text().splitlines(keepends=True)
    assert {one["item"] for one in map(json.loads, lines[1:]) if one["measure"] == "decode"} == {"1", "2"}
    lost = [line for line in lines if '"243"' in line and '"lookup"' in line]
    assert len(lost) == 2
    path.write_text("".join(line for line in lines if line not in lost))
    before = results.rates("bfloat16")
    assert PeerBench(plan, path).run().rates("bfloat16") == before
    assert calls().count("openvino bfloat16 generate") == 2  # one to warm up, one that was lost
    assert sorted(path.read_text().splitlines()) == sorted("".join(lines).splitlines())


@pytest.mark.usefixtures("only_fakes")
def test_a_gguf_file_is_run_as_it_is(plan: PeerPlan, tmp_path: Path, calls: Callable[[], list[str]]) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    plan = replace(plan, model=str(file), dtypes=None, peers=["llama.cpp"], draft_model=str(file))
    bench = PeerBench(replace(plan, prompts=None))
    assert bench.run().medians("decode", "auto").keys() == {OURS, "llama.cpp"}
    assert not [*plan.work.glob("*/*.gguf")]
    assert calls().count("llama.cpp auto decode") == 3


@pytest.mark.usefixtures("only_fakes")
def test_a_mode_that_turns_out_to_be_impossible_is_left_out(plan: PeerPlan) -> None:
    bench = PeerBench(replace(plan, peers=["openvino"], drafters=["none"]))
    rates = bench.run().rates("bfloat16")["qa"]
    assert rates.keys() == {(OURS, "plain"), (OURS, "auto"), ("openvino", "plain")}
    assert "openvino, bfloat16, lookup: it cannot" in bench.notes


def test_each_round_begins_with_another() -> None:
    assert list(turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_peers_get_the_same_prompts(plan: PeerPlan) -> None:
    bench = PeerBench(plan)
    assert len(bench.ids) == PROMPT
    assert bench.context % 16 == 0
    assert bench.context >= max(CONTEXT + plan.tokens + 1, PROMPT + 1)


def test_peers_need_weights_that_they_can_read_and_known_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    file = str(tmp_path / "model.gguf")
    with pytest.raises(SoothsayError, match="a GGUF file as it is, and not in bfloat16"):
        PeerBench(PeerPlan(model=file, work=tmp_path, threads=1, dtypes=["bfloat16"]))
    bench = PeerBench(PeerPlan(model=file, work=tmp_path, threads=1, draft_model=file))
    assert (bench.is_file, bench.dtypes) == (True, ["auto"])
    with pytest.raises(SoothsayError, match="at equal weights; name their element type"):
        PeerBench(PeerPlan(model="sibyl", work=tmp_path, threads=1, dtypes=["auto"]))
    with pytest.raises(
        SoothsayError, match=r"a draft model is a GGUF file beside another one; other\.gguf is"
    ):
        PeerBench(PeerPlan(model=file, work=tmp_path, threads=1, dtypes=["auto"], draft_model="other.gguf"))
    with pytest.raises(SoothsayError, match="no peer is named vllm; there are transformers, openvino"):
        PeerBench(PeerPlan(model="sibyl", work=tmp_path, threads=1, peers=["vllm"]))
    with pytest.raises(SoothsayError, match="no peer is named jax"):
        PeerBench(PeerPlan(model="sibyl", work=tmp_path, threads=1, pythons=["jax=python"]))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "peers", *arguments], env={"COLUMNS": "160"})


@pytest.mark.usefixtures("only_fakes")
def test_command(plan: PeerPlan, tmp_path: Path) -> None:
    result = run(
        *("sibyl", "--work", str(plan.work), "--peer-python", plan.pythons[0], "--threads", "1"),
        *("--peer", "openvino", "--peer", "llama.cpp", "--tokens", "4", "--rounds", "1"),
        *("--spec-bench", str(plan.prompts), "--per-task", "1", "--max-tokens", "4"),
        *("--json", str(tmp_path / "out.jsonl")),
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert re.search(
        r"one token, context 128 +soothsay +[\d.]+ +[\d.]+ *\n +openvino +125.00 +8.0 +[\d.]+x +0",
        result.stdout,
    )
    assert re.search(r"a pass of 16 rows, context 128 +soothsay +[\d.]+ *\n +openvino +16.00 ", result.stdout)
    assert "openvino agrees in 0 of 32 leading tokens only: does it run the same model?" in result.stdout
    assert re.search(r"chat +QA +overall", result.stdout)
    assert re.search(r"openvino, lookup +4\.0 +4\.0 +4\.0", result.stdout)
    assert re.search(r"soothsay, auto / plain( +[\d.]+x){3}", result.stdout)
    assert re.search(r"our best / theirs( +[\d.]+x){3}", result.stdout)
    assert "llama.cpp, bfloat16: llama.cpp runs GGUF files" in result.stdout
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert records[0]["max_tokens"] == 4
    assert {one["measure"] for one in records[1:]} == {"decode", "prompt", ANSWER} | {
        f"verify {m}" for m in VERIFIED
    }


def test_command_refuses() -> None:
    assert "name their element type" in run("sibyl", "--dtype", "auto").stderr
    assert "choose from auto, float32" in run("sibyl", "--dtype", "int3").stderr
    assert "no peer is named vllm" in run("sibyl", "--peer", "vllm").stderr
