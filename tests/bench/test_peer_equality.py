"""`bench equality`: engines whose answers change, and where; llama.cpp's server as an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams
from soothsay.bench.bench_plans import EqualityPlan
from soothsay.bench.peers.engines.llama_server import LlamaServer
from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.bench.peers.equality_bench import EqualityBench
from soothsay.bench.peers.equality_results import (
    AnswerRecord,
    EqualityResults,
    Parting,
    equality_chart,
    equality_table,
    parting,
)
from soothsay.cli.app import app
from soothsay.plotting import save_png

ENGINE = """#!{python}
# An engine whose answers change in batches of 4, and by lookup in half precision from the third token on.
import json, sys
name, setup = sys.argv[3], json.loads(sys.argv[4])
def reply(**line):
    print(json.dumps(line), flush=True)
if name == "openvino":
    reply(unavailable="openvino-genai is not installed")
    sys.exit()
reply(result=dict(version="7", modes=["plain", *(setup["drafters"] if name == "soothsay" else ["lookup"])]))
for line in sys.stdin:
    call, args = json.loads(line).values()
    print(name, setup["dtype"], call, *map(str, args[1:]), file=open({calls!r}, "a"), flush=True)
    if call == "load":
        reply(result=None)
        continue
    prompts, count, mode = args
    answers = [list(range(300, 300 + count)) for _ in prompts]
    if name != "soothsay" and mode == "lookup" and setup["dtype"] != "float32":
        answers[0][2] = 7
    if name == "soothsay" and setup["drafters"] == ["wrong"] and mode == "wrong" or len(prompts) == 4:
        answers[-1][0] = 7
    reply(result=answers)
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EqualityPlan:
    """A plan whose engines, also ours, are not real."""
    engine, questions = tmp_path / "engine", tmp_path / "questions.jsonl"
    engine.write_text(ENGINE.format(python=sys.executable, calls=str(tmp_path / "calls")))
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    asked = [{"question_id": n, "category": "qa", "turns": [f"What is {n}?"]} for n in range(1, 6)]
    questions.write_text("".join(json.dumps(one) + "\n" for one in asked))
    peers = ["transformers", "openvino"]
    return EqualityPlan(
        model="sibyl",
        prompts=questions,
        per_task=5,
        max_tokens=6,
        peers=peers,
        work=tmp_path / "work",
        threads=1,
    )


def record(tokens: list[int], **other: Any) -> AnswerRecord:
    fixed = {"engine": "soothsay", "dtype": "auto", "mode": "plain", "batch": 1, "item": "1", "task": "qa"}
    return AnswerRecord(**fixed | other, tokens=tokens)


def test_answers_part_at_the_first_token_that_differs() -> None:
    plain = record([5, 6, 7], margins=[1.0, 0.25, 2.0])
    assert parting(plain, record([5, 6, 7])) is None
    assert parting(plain, record([5, 8, 7])) == Parting(1, 0.25)
    assert parting(plain, record([5, 6])) == Parting(2, 2.0)  # it has ended
    assert parting(plain, record([5, 6, 7, 8])) == Parting(3, None)  # plain decoding's has ended


def test_rows_compare_with_the_same_engine_alone(tmp_path: Path) -> None:
    results = EqualityResults({})
    for engine, own in (("other", 0), ("soothsay", 9)):
        for item in "123":
            results.add(record([own, 1, 2], engine=engine, item=item, margins=[0.5, 0.25, 3.0]))
            last = 5 if (engine, item) == ("other", "2") else 2
            results.add(record([own, 1, last], engine=engine, item=item, batch=4))
    results.add(record([4, 1, 2], engine="other", mode="lookup"))
    results.add(record([4], engine="other", mode="lookup", item="9"))  # plain decoding has not answered it
    ours, batch, lookup = results.rows()
    assert (ours.way, ours.share) == (("soothsay", "auto", "plain", 4), 0)
    assert (batch.answers, batch.partings, batch.share) == (3, (Parting(2, 3.0),), 1 / 3)
    assert (lookup.answers, lookup.partings) == (1, (Parting(0, 0.5),))
    table = equality_table(results)
    assert table.rows[0] == ["soothsay", "auto", "plain, batch of 4", "3", "0", "0%", "", "", "", ""]
    assert table.rows[1][2:] == ["plain, batch of 4", "3", "1", "33%", "2", "2", "3.000", "3.000"]
    save_png(equality_chart(results), tmp_path / "chart.png", dpi=50)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_engines_answer_in_all_ways_and_a_file_is_continued(plan: EqualityPlan, tmp_path: Path) -> None:
    path, calls = tmp_path / "out.jsonl", tmp_path / "calls"
    bench = EqualityBench(plan, path)
    rows = {row.way: row for row in bench.run().rows()}
    assert [note.split(":")[0] for note in bench.notes] == [
        f"openvino, {dtype}" for dtype in ("bfloat16", "float16", "float32")
    ]
    expected = {"plain, again": 0, "lookup": 5, "plain": None}
    for dtype in ("bfloat16", "float16"):
        for mode in ("plain, again", "lookup"):
            assert len(rows["transformers", dtype, mode, 1].partings) == expected[mode]
        (part,) = rows["transformers", dtype, "plain", 4].partings
        assert part.position == 0
        assert part.margin is not None
        assert part.margin > 0
    assert not rows["transformers", "float32", "lookup", 1].partings
    assert not rows["transformers", "float32", "plain", 16].partings
    assert rows["soothsay", "float32", "auto", 16].answers == 5  # ours speculates in batches, too
    assert ("transformers", "float32", "lookup", 16) not in rows
    record = next(one for one in bench.results.by_key.values() if one.margins)
    assert len(record.margins) == len(record.tokens) == 6

    lines = path.read_text().splitlines(keepends=True)
    lost = [line for line in lines if '"lookup"' in line and '"float16"' in line and '"item": "2"' in line]
    path.write_text("".join(line for line in lines if line not in lost))
    calls.unlink()
    again = EqualityBench(plan, path)
    assert {row.way: row for row in again.run().rows()} == rows
    assert calls.read_text().splitlines() == [
        "transformers float16 load",
        "transformers float16 answers 6 lookup",
    ]


def test_an_answer_is_compared_up_to_its_end(plan: EqualityPlan) -> None:
    bench = EqualityBench(replace(plan, dtypes=["bfloat16"]))
    bench.ends = {302}
    assert all(one.tokens[:2] == [300, 301] for one in bench.run().by_key.values() if one.mode == "lookup")
    assert {len(one.tokens) for one in bench.results.by_key.values() if one.mode == "plain"} == {3}


def test_margins_are_those_of_the_tokens(plan: EqualityPlan) -> None:
    bench, llm = EqualityBench(plan), LLM("sibyl", dtype="float32", drafter="none")
    _, ids = bench.questions[0]
    result = llm.generate(ids, SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    assert result.logprobs is not None
    best = [sorted(one.top.values(), reverse=True) for one in result.logprobs]
    expected = [first - second for first, second, *_ in best]
    assert bench._margins(ids, result.token_ids) == pytest.approx(expected, abs=1e-3)


def test_command(plan: EqualityPlan, tmp_path: Path) -> None:
    def run(*more: str) -> Any:
        options = ["--spec-bench", str(plan.prompts), "--work", str(plan.work), "--peer", "transformers"]
        options += ["--threads", "1", "--per-task", "3", "--max-tokens", "4", "--dtype", "bfloat16", *more]
        return CliRunner().invoke(app, ["bench", "equality", "sibyl", *options], env={"COLUMNS": "160"})

    result = run("--markdown", "-", "--png", str(tmp_path / "chart.png"))
    assert result.exit_code == 0, result.output
    assert "| soothsay | bfloat16 | auto | 3 | 0 | 0% |" in result.stdout
    assert "| transformers | bfloat16 | lookup | 3 | 3 | 100% | 2 | 2 | " in result.stdout
    assert (tmp_path / "chart.png").is_file()
    assert run("-d", "wrong").exit_code == 1
    assert "| transformers | float16 | lookup | 3 |" in run("--dtype", "float16", "--markdown", "-").stdout
    assert "choose from auto" in run("--dtype", "int3").stderr


SERVER = """#!{python}
# llama-server, as far as LlamaServer knows it. Tokens count up from the prompt's first.
import http.server, json, sys
if "--version" in sys.argv:
    sys.exit(print("version: 1 (abc)", file=sys.stderr))
if "ngram-simple" in sys.argv and "77" in sys.argv:
    sys.exit("77 is too many")
class Handler(http.server.BaseHTTPRequestHandler):
    loading = 2
    def do_GET(self):
        Handler.loading -= 1
        self.send_response(503 if Handler.loading > 0 else 200)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["temperature"], asked["cache_prompt"], asked["return_tokens"]) == (0, False, True)
        shift = 100 if "ngram-simple" in sys.argv else 200 if "draft-simple" in sys.argv else 0
        replies = [
            dict(index=i, tokens=[shift + ids[0] + n for n in range(asked["n_predict"])],
                 timings=dict(predicted_ms=500.0, predicted_n=5, prompt_ms=250.0))
            for i, ids in enumerate(asked["prompt"])
        ][::-1]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(replies if len(replies) > 1 else replies[0]).encode())
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_llama_server_answers_in_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    setup = Setup("model.gguf", "auto", 1, 64, "model.gguf", draft_model="draft.gguf")
    with pytest.raises(UnavailableError, match="llama-server is not on the PATH"):
        LlamaServer(setup)
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    server = LlamaServer(setup)
    assert (server.version, server.modes) == ("version: 1 (abc)", ("plain", "n-grams", "draft model"))
    server.load()
    assert server.answers([[5], [9]], 2, "plain") == [[5, 6], [9, 10]]
    assert server.generate([5], 2, "n-grams")[1] == [105, 106]
    assert server.generate([5], 2, "draft model")[1] == [205, 206]
    assert server.decode([5], 4) == (0.4, [5, 6, 7, 8, 9])
    assert server.prompt([5]) == 0.25
    refused = LlamaServer(replace(setup, threads=77))
    refused.load()
    with pytest.raises(UnavailableError, match="ends at once with --spec-type ngram-simple"):
        refused.answers([[5]], 2, "n-grams")
