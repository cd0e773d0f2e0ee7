"""The whole gain in one table: factors by hand, wrong answers found, an empty cache at the start."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValue, GGUFValueType
from gguf_files import write_gguf
from typer.testing import CliRunner

from soothsay import LLM, DraftTree, Request, RequestError, SamplingParams, Target
from soothsay.bench import stack_bench
from soothsay.bench.peers.engines.hugging_face import Transformers
from soothsay.bench.peers.engines.peer import Setup
from soothsay.bench.stack_bench import Ours, StackBench, StackPlan, choose_prompts
from soothsay.bench.stack_results import Rung, Spread, StackResults, StackRun, stack_chart
from soothsay.cli.app import app
from soothsay.drafters.base import NoDrafter
from soothsay.errors import SoothsayError
from soothsay.model.ops.linear import multiplies_bfloat16
from soothsay.plotting import save_png

SMALL = StackPlan(model="sibyl", requests=4, tokens=3, rounds=2, prefix=40, peer=False)
FLOATS = "bfloat16" if multiplies_bfloat16() else "float32"
"""What plain weights are computed in here."""

NAMES = ["plain", "integers", "speculation", "4 at once", "prefix without cache", "prefix cache"]
RUNGS = (
    Rung("transformers", "theirs"),
    Rung("plain", "ours", "transformers"),
    Rung("integers", "integers", "plain"),
    Rung("speculation", "speculation", "integers", "integers"),
    Rung("prefix without cache", "no cache"),
    Rung("prefix cache", "cache", "prefix without cache", "prefix without cache"),
)
SECONDS = {  # of ten tokens, by round
    "transformers": (10.0, 20.0, 10.0),
    "plain": (5.0, 10.0, 2.0),
    "integers": (5.0, 5.0, 1.0),
    "speculation": (2.0, 10.0, 0.5),
    "prefix without cache": (30.0, 90.0, 30.0),
    "prefix cache": (10.0, 30.0, 10.0),
}

FAKE = """#!{python}
# An engine that answers with the tokens from 100 on.
import json, sys
if {missing}:
    sys.exit(print(json.dumps(dict(unavailable="transformers is not installed"))))
print(json.dumps(dict(result=dict(version="7.1, torch 3", modes=["plain"]))), flush=True)
for line in sys.stdin:
    call, args = json.loads(line).values()
    answer = None if call == "load" else [0.25, list(range(100, 100 + args[1]))]
    print(json.dumps(dict(error="ValueError: unknown" ) if {strange} else dict(result=answer)), flush=True)
"""


def measured() -> StackResults:
    results = StackResults(RUNGS, {})
    for rung, times in SECONDS.items():
        for number, seconds in enumerate(times, start=1):
            results.add(StackRun(rung, number, seconds, [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]))
    return results


# factors


def test_factors_are_of_one_round_and_medians_over_rounds() -> None:
    rows = {row.rung.name: row for row in measured().rows()}
    assert [*rows] == [rung.name for rung in RUNGS]
    assert rows["plain"].rate == 2.0  # of 2, 1 and 5
    assert rows["transformers"].factor is rows["prefix without cache"].factor is None
    factors = {name: row.factor.median for name, row in rows.items() if row.factor is not None}
    # by round: 2, 2, 5; then 1, 2, 2; then 2.5, 0.5, 2; then 3, 3, 3
    assert factors == {"plain": 2.0, "integers": 2.0, "speculation": 2.0, "prefix cache": 3.0}
    products = {name: rows[name].product for name in factors}
    # by round: 2, 2, 5; 2, 4, 10; 5, 2, 20; 15, 6, 60
    assert products == {"plain": 2.0, "integers": 4.0, "speculation": 5.0, "prefix cache": 15.0}
    assert rows["speculation"].factor == Spread(1.25, 2.0, 2.25)


def test_the_chart_is_a_staircase(tmp_path: Path) -> None:
    figure = stack_chart(measured().rows(), "a title")
    (panel,) = figure.axes
    assert panel.get_xscale() == "log"
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in panel.patches]
    assert bars == [(1.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 5.0), (5.0, 15.0), (1.0, 15.0)]
    names = [label.get_text() for label in panel.get_yticklabels()]
    assert names == ["theirs", "ours", "integers", "speculation", "cache", "all together"]
    texts = [text.get_text() for text in panel.texts]
    assert texts == ["1.0 tokens a second", "2.00x", "2.00x", "2.00x", "3.00x", "15.0x"]
    save_png(figure, tmp_path / "x.png", dpi=60)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# answers


@pytest.mark.parametrize(
    ("rung", "number", "message"),
    [
        ("speculation", 1, "'speculation' in round 1 and 'integers' in round 1 .* prompt 2, from token 3 on"),
        ("integers", 4, "'integers' in round 4 and 'integers' in round 1 give different"),
        ("plain", 4, "'plain' in round 4 and 'plain' in round 1 give different"),
        ("prefix cache", 4, "'prefix cache' in round 4 and 'prefix without cache' in round 1"),
    ],
)
@pytest.mark.parametrize("answer", [[5, 6, 0, 8, 9, 10], [5, 6]])
def test_other_answers_are_an_error(rung: str, number: int, message: str, answer: list[int]) -> None:
    results = measured()
    with pytest.raises(SoothsayError, match=message):
        results.add(StackRun(rung, number, 1.0, [[1, 2, 3, 4], answer]))


def test_answers_that_may_differ() -> None:
    """Those of transformers, of floats and integers, and of other prompts."""
    results = StackResults(RUNGS, {})
    for token, rung in enumerate(("transformers", "plain", "integers", "prefix cache")):
        results.add(StackRun(rung, 1, 1.0, [[9], [token]]))
    results.add(StackRun("transformers", 2, 1.0, [[9], [7]]))
    assert results.agreement() == (1, 2)
    assert StackResults(RUNGS[1:], {}).agreement() is None


@pytest.mark.parametrize("answers", [3, [[1]]])
def test_files_of_something_else(answers: object, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    runs = [StackRun("plain", 1, 1.0, [[1], [2]]), StackRun("plain", 2, 1.0, answers)]  # type: ignore[arg-type]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in ({"a": 1}, *map(asdict, runs))))
    with pytest.raises(SoothsayError, match="runs of 'bench stack' are expected"):
        StackResults(RUNGS, {"a": 1}, file)


# prompts


def test_prompts_are_those_that_fit(sibyl: LLM, tmp_path: Path) -> None:
    assert sibyl.tokenizer is not None
    ours = choose_prompts(replace(SMALL, requests=32), sibyl.tokenizer, 100)
    assert len({tuple(prompt) for prompt in ours}) == 32
    file = tmp_path / "prompts.jsonl"
    texts = [("a", "Hi!"), ("a", "no " * 90), ("b", "Why?"), ("b", "no " * 90), ("b", "How?")]
    file.write_text("".join(json.dumps({"category": c, "prompt": text}) + "\n" for c, text in texts))
    plan = replace(SMALL, prompts=file, requests=3)
    expected = [sibyl.tokenizer.encode(text) for text in ("Hi!", "Why?", "How?")]
    assert choose_prompts(plan, sibyl.tokenizer, 60) == expected
    with pytest.raises(RequestError, match=r"3 of 5 prompts fit .* 40 shared tokens .* of 3; 4 are needed"):
        choose_prompts(replace(plan, requests=4), sibyl.tokenizer, 60)


# contenders


def test_a_run_begins_with_an_empty_cache_and_fills_it(sibyl: LLM) -> None:
    hits: list[int] = []

    class Noting(NoDrafter):
        resets = 0

        def release(self, request: Request) -> None:
            hits.append(request.num_prefix_hits)

        def reset(self) -> None:
            self.resets += 1

    llm = LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="none", kv_tokens=1024)
    noting = Noting(llm.engine.target)
    ours = Ours(llm, noting, at_once=2)
    shared = [*range(300, 340)]
    prompts = [[*shared, last] for last in (1, 2, 3)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected = [sibyl.generate(prompt, params).token_ids for prompt in prompts]
    for run in range(2):
        assert ours.answer(prompts[:2], 2, run)[1] + ours.answer(prompts[2:], 2, run)[1] == expected
    assert hits == [0, 32, 32] * 2  # two full blocks of 16 tokens
    assert noting.resets == 4


def test_transformers_reads_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    needed = {"llama.vocab_size": 48, "llama.attention.head_count_kv": 2}  # transformers does not guess them
    write_gguf(file, more={key: GGUFValue(value, GGUFValueType.UINT32) for key, value in needed.items()})
    peer = Transformers(Setup(str(file), "float32", 1, 64, draft_model=str(file)))
    peer.load()
    llm = LLM(file, dtype="float32", drafter="none")
    prompt = np.random.default_rng(0).integers(48, size=9).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [llm.generate(ids, params).token_ids for ids in (prompt, prompt[:4])]
    assert all(peer.generate(prompt, 20, mode)[1] == expected[0] for mode in peer.modes)
    assert peer.answers([prompt, prompt[:4]], 20, "plain") == expected


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that lets another program take the place of transformers."""

    def install(missing: bool = False, strange: bool = False) -> None:
        path = tmp_path / "fake"
        path.write_text(FAKE.format(python=sys.executable, missing=missing, strange=strange))
        path.chmod(0o755)
        monkeypatch.setattr(stack_bench.sys, "executable", str(path))
        monkeypatch.setattr(stack_bench.tempfile, "tempdir", str(tmp_path))

    return install


def test_transformers_is_the_first_rung(fake: Callable[..., None]) -> None:
    fake()
    plan = replace(SMALL, peer=True, rounds=1, requests=3)
    with StackBench(plan) as bench:
        results = bench.run()
    first, second, *_ = results.rows()
    assert (first.rung.name, first.rung.title, first.rate) == (
        "transformers",
        f"transformers 7.1, {FLOATS}",
        3 / 0.25,
    )
    assert second.product == pytest.approx(second.rate / 12)
    assert results.agreement() == (0, 3)
    assert [row.rung.name for row in results.rows()][-3:] == ["speculation", *NAMES[-2:]]
    assert bench.notes == [f"{n} requests at once were left out: there are 3." for n in (4, 16)]


@pytest.mark.parametrize("kind", ["missing", "strange"])
def test_without_transformers_a_note_says_why(fake: Callable[..., None], kind: str, tmp_path: Path) -> None:
    fake(**{kind: True})
    with StackBench(replace(SMALL, peer=True, requests=1)) as bench:
        reason = {"missing": "transformers is not installed", "strange": "ValueError: unknown"}[kind]
        assert bench.notes[0].startswith("transformers was left out: ")
        assert reason in bench.notes[0]
        assert bench.results.rungs[0].name == "plain"
    logs = [str(log) for log in tmp_path.glob("soothsay-stack-*.log")]
    assert len(logs) == (kind == "strange")  # where the reason names it
    assert all(log in bench.notes[0] for log in logs)


# the whole


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    file, told = tmp_path / "r.jsonl", list[tuple[int, int, int]]()
    with StackBench(SMALL, file, lambda *state: told.append(state)) as bench:
        rows = bench.run().rows()
    assert [row.rung.name for row in rows] == NAMES
    assert [bool(row.factor) for row in rows] == [False, True, True, True, False, True]
    assert told[0] == (0, 48, 0)
    assert told[-1] == (48, 48, 48 * 3)
    lines = file.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines[1:]]
    # the rung that starts rotates
    assert [entry["rung"] for entry in entries] == NAMES + NAMES[1:] + NAMES[:1]
    assert {(len(entry["answers"]), *map(len, entry["answers"])) for entry in entries} == {(4, 3, 3, 3, 3)}
    file.write_text("".join(lines[:-3]))
    with StackBench(SMALL, file) as bench:
        bench.run()
    again = file.read_text().splitlines(keepends=True)
    assert again[:-3] == lines[:-3]
    assert [json.loads(line)["rung"] for line in again[-3:]] == NAMES[4:] + NAMES[:1]
    with pytest.raises(SoothsayError, match="of another run: other tokens"):
        StackBench(replace(SMALL, tokens=4), file)


def test_only_the_last_rung_has_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[
        tuple[bool, int, int]
    ] = []  # by request: a long prompt, requests that run, tokens from the cache

    class Noting(NoDrafter):
        def __init__(self, spec: str, target: Target):
            super().__init__(target)

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            for request in requests:
                if request.num_output == 2:  # by then all of a group run
                    seen.append((request.num_prompt > 40, len(requests), request.num_prefix_hits))
            return super().propose(requests)

    monkeypatch.setattr(stack_bench, "build_drafter", Noting)
    with StackBench(replace(SMALL, tokens=4, rounds=1)) as bench:
        seen.clear()
        bench.run()
    warm_up = 3 * 1 + 3 * 4
    runs = seen[warm_up:]
    assert len(runs) == 6 * 4
    alone, together = [(False, 1, 0)] * 4, [(False, 4, 0)] * 4
    assert runs[:16] == alone * 3 + together
    assert [hits for _, _, hits in runs[16:20]] == [0] * 4
    assert sorted(hits for _, _, hits in runs[20:]) == [0, 32, 32, 32]  # two full blocks


def test_the_command(tmp_path: Path) -> None:
    files: dict[str, Any] = {kind: tmp_path / f"out.{kind}" for kind in ("json", "png")}
    small = ["--requests=4", "--tokens=3", "--rounds=2", "--prefix=40", "--no-transformers", "-dsuffix"]
    outputs = [f"--{kind}={file}" for kind, file in files.items()]
    result = CliRunner().invoke(app, ["bench", "stack", "sibyl", *small, *outputs], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for title in (f"soothsay, {FLOATS}", "integers: int8", "speculation: suffix", "4 requests at once"):
        assert title in result.output
    assert "sibyl: 4 greedy answers of 3 tokens" in result.output
    assert "16 requests at once were left out" in result.output
    assert "all answers to a prompt are equal" in result.output
    rows = [line for line in result.output.split("\n") if line.rstrip().endswith("x")]
    assert len(rows) == 4  # those with factors
    assert json.loads(files["json"].read_text().partition("\n")[0])["rungs"]["integers"] == "integers: int8"
    assert files["png"].read_bytes().startswith(b"\x89PNG")
