"""Accepted tokens by task: counted by hand, the same questions for all drafters, differences found."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay import LLM, Drafter, DraftTree, Request, RequestError, SamplingParams, Target
from soothsay.bench.accepted import Question, Report, Row, Score, bench_accepted, read_questions
from soothsay.cli import app
from soothsay.train.evaluate import measuring

QUESTIONS = [
    Question("conversation", ("Hello!", "And why?")),
    Question("qa", ("What is the sky?",)),
    Question("conversation", ("Tell me a story.", "Go on.")),
    Question("rag", ("a " * 80,)),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("sibyl", dtype="float32", drafter="none", config=measuring(2), kv_tokens=4096)


class Hasty(Drafter):
    """Guesses two tokens that are hardly ever right."""

    max_nodes = 3

    def __init__(self, target: Target):
        self.target = target

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.extend([7, 7])
        return trees


def test_scores_by_task_and_turn(llm: LLM, sibyl: LLM) -> None:
    seen: list[list[int]] = []

    def lookup(target: Target) -> Drafter:
        from soothsay.drafters.prompt_lookup import PromptLookup

        class Noting(PromptLookup):
            def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
                seen.extend(r.tokens[: r.num_prompt].tolist() for r in requests if not r.num_output)
                return super().propose(requests)

        return Noting(target, min_ngram=1)

    for temperature in (0.0, 1.0):
        seen.clear()
        told: list[tuple[int, int, int]] = []
        report = bench_accepted(
            llm,
            QUESTIONS,
            {"lookup": lookup, "plain": "none"},
            temperatures=[temperature],
            max_tokens=10,
            seed=11,
            progress=lambda *state, told=told: told.append(state),
        )
        # by hand: one request after the other
        expected: dict[str, list[tuple[int, int]]] = {}
        prompts = []
        turns = [(i, 0, []) for i in range(4)] + [(0, 1, []), (2, 1, [])]
        for place, (i, turn, _) in enumerate(turns):
            messages = [{"role": "user", "content": QUESTIONS[i].turns[0]}]
            if turn:
                first = SamplingParams(temperature=temperature, max_tokens=10, seed=11 + i)
                messages.append({"role": "assistant", "content": sibyl.chat(messages, first).text})
                messages.append({"role": "user", "content": QUESTIONS[i].turns[1]})
            seed = 11 + i if not turn else 11 + 4 + (place - 4)
            params = SamplingParams(temperature=temperature, max_tokens=10, seed=seed)
            prompts.append(sibyl.chat_prompt(messages))
            stats = sibyl.generate(prompts[-1], params, drafter="prompt-lookup(min_ngram=1)").stats
            expected.setdefault(QUESTIONS[i].task, []).append((stats.emitted, stats.first, stats.steps))
        assert sorted(seen) == sorted(prompts)
        looked, plain = report.rows
        for task, counts in expected.items():
            emitted, first, steps = (sum(column) for column in zip(*counts, strict=True))
            tokens, steps = emitted - first, steps - len(counts)
            assert looked.tasks[task] == Score(len(counts), 0, tokens, steps)
            assert looked.tasks[task].accepted == tokens / steps
            assert plain.tasks[task] == Score(len(counts), 0, emitted - len(counts), emitted - len(counts))
        every = [count for counts in expected.values() for count in counts]
        tokens, first, steps = (sum(column) for column in zip(*every, strict=True))
        assert looked.overall.accepted == (tokens - first) / (steps - len(every))
        assert (looked.drafter, looked.temperature) == ("lookup", temperature)
        assert [state[:2] for state in told] == [(i, 18) for i in (*range(19), 18)]
        assert told[-1][2] == 3 * tokens
    assert looked.overall.steps <= plain.overall.steps


def test_a_difference_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that accepts a guess although it is wrong."""
    from soothsay.engine import engine
    from soothsay.engine.verify import Verdict

    match = engine.match

    def credulous(tree: DraftTree, draws: Sequence[int]) -> Verdict:
        if len(tree) > 1 and tree.tokens[1] == 7:
            draws = [7, *draws[1:]]
        return match(tree, draws)

    monkeypatch.setattr(engine, "match", credulous)
    report = bench_accepted(llm, QUESTIONS, {"plain": "none", "hasty": Hasty}, max_tokens=6)
    plain, hasty = report.rows
    assert plain.overall.different == 0
    assert hasty.overall.different == hasty.overall.answers == 6
    assert {task: score.different for task, score in hasty.tasks.items()} == {
        "conversation": 4,
        "qa": 1,
        "rag": 1,
    }


def test_questions_without_room_are_skipped_with_their_later_turns(sibyl: LLM) -> None:
    def report(context: int) -> tuple[Report, list[tuple[int, int]]]:
        small = LLM(
            sibyl.model,
            tokenizer=sibyl.tokenizer,
            drafter="none",
            config=measuring(2, max_context=context),
            kv_tokens=512,
        )
        told: list[tuple[int, int]] = []
        questions = [Question("rag", ("a " * 80, "And?")), *QUESTIONS[:2]]
        found = bench_accepted(
            small, questions, {"x": "none"}, max_tokens=4, progress=lambda *state: told.append(state[:2])
        )
        return found, told

    found, told = report(60)
    assert found.skipped == 2  # the long one's, and the one behind it
    assert {task: score.answers for task, score in found.rows[0].tasks.items()} == {
        "conversation": 2,
        "qa": 1,
    }
    assert told[0] == (0, 10)
    assert told[-1] == (6, 6)
    found, told = report(12)  # no second turn has room
    assert found.skipped == 3
    assert told[-1] == (4, 4)
    with pytest.raises(RequestError, match="none of 3 prompts can be answered"):
        report(3)


def test_trees_have_as_many_nodes_as_are_asked_for(sibyl: LLM) -> None:
    """However many requests there are."""
    for nodes in (1, 3, 40):
        llm = LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="none", config=measuring(32, nodes))
        granted: list[int] = []

        class Greedy(Hasty):
            max_nodes = 64

            def propose(self, requests: Sequence[Request], granted: list[int] = granted) -> list[DraftTree]:
                granted += [request.max_nodes for request in requests]
                return super().propose(requests)

        bench_accepted(llm, QUESTIONS[:2] * 16, {"greedy": Greedy}, max_tokens=3)
        assert {*granted} == {nodes, 1}  # 1: nothing can come behind the last token


# questions


def test_questions_of_spec_bench(shared: Path) -> None:
    path = shared / "data" / "spec_bench.jsonl"
    questions = read_questions(path)
    assert Counter(question.task for question in questions) == dict.fromkeys(
        ("conversation", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )
    assert Counter(len(q.turns) for q in questions if q.task == "conversation") == {2: 80}
    some = read_questions(path, 8)
    assert {*Counter(question.task for question in some).values()} == {8}
    assert set(some) < set(questions)
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    starts = {line["turns"][0]: line["category"] for line in lines}
    assert len({starts[q.turns[0]] for q in some if q.task == "conversation"}) == 8  # each of MT-bench's
    assert read_questions(path, 1000) == questions


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"turns": ["a"]}',
        '{"category": "qa"}',
        '{"category": "qa", "turns": []}',
        '{"category": "qa", "turns": [""]}',
        '{"category": "qa", "turns": "a"}',
        '{"category": "qa", "turns": ["a", 2]}',
    ],
)
def test_lines_that_are_no_questions(line: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f'{{"category": "qa", "turns": ["a"]}}\n\n{line}\n')
    with pytest.raises(RequestError, match=r"questions.jsonl, line 3: no question of Spec-Bench"):
        read_questions(file)
    file.write_text("\n")
    with pytest.raises(RequestError, match="has no questions"):
        read_questions(file)


# the command


def run(tmp_path: Path, *options: str, width: str = "80") -> tuple[int, str]:
    file = tmp_path / "questions.jsonl"
    lines = [
        {"category": "writing", "turns": ["Hello!", "And why?"]},
        {"category": "math", "turns": ["One and one?", "And two?"]},
        {"category": "math_reasoning", "turns": ["How many are three?"]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    result = CliRunner().invoke(
        app,
        ["bench", "accepted", "sibyl", "--dtype=float32", f"--spec-bench={file}", "-n8", *options],
        env={"COLUMNS": width},
    )
    return result.exit_code, result.output


def test_the_command(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    itself = "draft-model(model=sibyl, depth=2)"
    code, output = run(tmp_path, f"-d{itself}", "-dnone", "-t0", "-t1", "--nodes=4", f"--json={numbers}")
    assert code == 0
    assert "trees of at most 4 nodes" in output
    heading = next(line for line in output.split("\n") if "drafter" in line)
    assert heading.split() == ["drafter", "T", "chat", "math", "overall", "equal"]
    assert output.count("5/5") == 4
    assert [line.split() for line in output.split("\n") if line.startswith(" none")] == [
        ["none", temperature, "1.00", "1.00", "1.00", "5/5"] for temperature in "01"
    ]
    saved = json.loads(numbers.read_text())
    assert (saved["nodes"], saved["max_tokens"], saved["skipped"]) == (4, 8, 0)
    assert [(row["drafter"], row["temperature"]) for row in saved["rows"]] == [
        (itself, 0), ("none", 0), (itself, 1), ("none", 1)
    ]  # fmt: skip
    for row in saved["rows"]:
        scores = row["scores"]
        assert (
            scores["overall"]["tokens"]
            == scores["conversation"]["tokens"] + scores["math_reasoning"]["tokens"]
        )
        assert f"{scores['overall']['accepted']:.2f}" in output
    assert saved["rows"][0]["scores"]["overall"]["accepted"] > 1
    code, output = run(tmp_path, "-dnone", "--markdown", "--per-task=1")
    assert code == 0
    assert output.strip().split("\n") == [
        "| drafter | T | chat | math | overall | equal |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| none | 0 | 1.00 | 1.00 | 1.00 | 3/3 |",
    ]


def test_a_terminal_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, output = run(tmp_path, "-dnone", "--per-task=1", width="200")
    assert code == 0
    bars = re.findall(r"answering .*?(\d+)/6 answers, (\d+) tokens/s", re.sub(r"\x1b\[[\d;?]*\w", "", output))
    assert bars[-1][0] == "6"
    assert int(bars[-1][1]) > 0


def test_the_command_ends_with_1_where_answers_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from soothsay.bench import accepted

    bad = Report((Row("a|b", 0.0, {"qa": Score(3, 1, 30, 20), "rag": Score(1, 0, 8, 2)}),), skipped=2)
    monkeypatch.setattr(accepted, "bench_accepted", lambda *_, **__: bad)
    code, output = run(tmp_path, "-dnone")
    assert code == 1
    assert "3/4" in output
    assert "1.73" in output  # 38 / 22
    assert "DIFFERENT ANSWERS" in output
    assert "2 turns were skipped" in output
    code, output = run(tmp_path, "-dnone", "--markdown")
    assert code == 1
    assert r"| a\|b | 0 | 1.50 | 4.00 | 1.73 | 3/4 |" in output


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-dnobody")
    assert code == 2
    assert "drafter 'nobody' is unknown" in output
