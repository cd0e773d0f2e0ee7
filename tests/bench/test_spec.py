"""Spec-Bench: counted by hand, the same questions for all, differences found, times of the right things."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heads import untrained
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import soothsay.core.answer as answer_module
from soothsay import LLM, Drafter, DrafterError, DraftTree, Request, RequestError, SamplingParams, Target
from soothsay.bench import measure
from soothsay.bench.prompts import SPEC_BENCH, by_task, in_turns, read_prompts
from soothsay.bench.running import answer_of, running
from soothsay.bench.spec import contenders, spec_bench
from soothsay.bench.spec.run_times import RunTimes
from soothsay.bench.spec.spec_bench import SpecBench, SpecPlan, serving
from soothsay.bench.spec.spec_page import interval_table, slower
from soothsay.bench.spec.spec_results import OVERALL, Lap, Score, SpecResults, SpecRow
from soothsay.cli.app import app
from soothsay.core.sampling import derive_seed
from soothsay.corpus import PromptEntry, user_message
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.lookup.exact_matches import PromptLookup
from soothsay.errors import SoothsayError, VerifierError
from soothsay.model.timing.pass_times import PassTimes
from soothsay.model.weights.checkpoint import open_checkpoint


def Question(task: str, turns: tuple[str, ...], number: int) -> PromptEntry:  # noqa: N802
    return PromptEntry(user_message(turns[0]), task, later=turns[1:], number=number)


QUESTIONS = [
    Question("conversation", ("Hello!", "And why?"), 1),
    Question("qa", ("What is the sky?",), 2),
    Question("conversation", ("Tell me a story.", "Go on."), 5),
    Question("rag", ("a " * 80,), 7),
]
TURNS = [(0, 0), (0, 1), (1, 0), (3, 0), (2, 0), (2, 1)]  # as they are asked: tasks take turns


def small(sibyl: LLM, batch: int = 4, nodes: int = 16, context: int | None = None) -> LLM:
    config = serving(batch, nodes, context)
    llm = LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="none", config=config, kv_tokens=4096)
    llm.eos_ids = sibyl.eos_ids
    return llm


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The first two layers of the bundled model. What it says does not matter here."""
    source, folder = open_checkpoint("sibyl").path, tmp_path_factory.mktemp("model")
    for file in source.glob("*.*"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"layers\.[2-7]\.", name)}
    save_file(kept, folder / "model.safetensors")
    return LLM(folder, dtype="float32", drafter="none", kv_tokens=16_384)


@pytest.fixture(scope="module")
def llm(shallow: LLM) -> LLM:
    return small(shallow)


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


class Diary(NoDrafter):
    """Notes when it is told to forget, and which prompts it sees."""

    def __init__(self, target: Target):
        super().__init__(target)
        self.notes: list[str | tuple[int, ...]] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        for request in requests:
            if not request.num_output:
                self.notes.append(tuple(request.tokens.tolist()))
        return super().propose(requests)

    def reset(self) -> None:
        self.notes.append("reset")


def by_hand(sibyl: LLM, question: int, turn: int, temperature: float, drafter: str):
    """The prompt, and an engine of one request's answer to it."""
    asked, messages = QUESTIONS[question], []
    for number, text in enumerate(asked.turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        seed = derive_seed(11 + asked.number, number)
        params = SamplingParams(temperature=temperature, max_tokens=10, seed=seed)
        prompt = sibyl.chat_prompt(messages)
        plain = sibyl.generate(prompt, params, drafter="none")
        messages.append({"role": "assistant", "content": plain.text})
    result = sibyl.generate(prompt, params, drafter=drafter)
    assert result.token_ids == plain.token_ids
    return prompt, result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_by_task_and_turn(sibyl: LLM, temperature: float) -> None:
    seen: list[list[int]] = []

    class Noting(PromptLookup):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            seen.extend(r.tokens.tolist() for r in requests if not r.num_output)
            return super().propose(requests)

    told: list[tuple[int, int, int]] = []
    lookup = "prompt-lookup(min_ngram=1)"
    plan = SpecPlan(
        {"lookup": lambda target: Noting(target, min_ngram=1)},
        temperatures=[temperature],
        max_tokens=10,
        seed=11,
    )
    bench = SpecBench(small(sibyl), QUESTIONS, plan, progress=lambda *state: told.append(state))
    results = bench.run()
    expected = [by_hand(sibyl, question, turn, temperature, lookup) for question, turn in TURNS]
    assert seen[1:] == [prompt for prompt, _ in expected]  # the first is the warm-up's
    plain, looked = results.rows()
    assert (plain.name, looked.name, looked.temperature, looked.batch) == ("none", "lookup", temperature, 1)
    tasks = {"conversation": [0, 1, 4, 5], "qa": [2], "rag": [3], OVERALL: [0, 1, 2, 3, 4, 5]}
    assert {*looked.scores} == {*tasks}
    for task, places in tasks.items():
        stats = [expected[place][1].stats for place in places]
        tokens, steps = sum(s.emitted - s.first for s in stats), sum(s.steps - 1 for s in stats)
        score = looked.scores[task]
        assert (score.answers, score.different) == (len(places), 0)
        assert score.accepted == tokens / steps
        assert score.drafted == sum(s.drafted for s in stats) / sum(s.steps for s in stats)
        first_right = sum(s.accepted_at[0] for s in stats if s.accepted_at)
        assert score.by_depth[0] == first_right / sum(s.steps for s in stats)
        assert (plain.scores[task].accepted, plain.scores[task].speedup) == (1.0, 1.0)
    assert looked.overall.accepted >= 1.0
    total = sum(result.stats.emitted for _, result in expected)
    assert [state[:2] for state in told] == [(0, 12), *_ticks(12)]
    assert told[-1][2] == 2 * total


def _ticks(total: int) -> list[tuple[int, int]]:
    """After each answer, and once more after each lap of two."""
    return [(done, total) for lap in range(0, total, 2) for done in (lap + 1, lap + 2, lap + 2)]


def test_a_batch_says_and_counts_the_same(llm: LLM) -> None:
    plan = SpecPlan({"x": "prompt-lookup(min_ngram=1)"}, batches=[1, 2, 4], max_tokens=12)
    results = SpecBench(llm, QUESTIONS, plan).run()
    rows = [row for row in results.rows() if row.name == "x"]
    assert [row.batch for row in rows] == [1, 2, 4]
    assert len({row.overall.accepted for row in rows}) == 1
    assert {(row.overall.answers, row.overall.different) for row in results.rows()} == {(6, 0)}
    groups = [entry["group"] for entry in results.entries if entry["batch"] == 2]
    assert groups == [[1, 5], [1, 5], [2], [7]]


def test_a_difference_is_found(shallow: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that makes the engine say something else, which no honest one can."""
    llm = small(shallow)

    class Liar(Hasty):
        def observe(self, observations: Sequence) -> None:
            for seen in observations:
                if seen.verdict is not None:
                    seen.verdict.tokens[-1] = 7

    results = SpecBench(llm, QUESTIONS, SpecPlan({"hasty": Hasty, "liar": Liar}, max_tokens=6)).run()
    plain, hasty, liar = results.rows()
    assert plain.overall.different == hasty.overall.different == 0
    assert {task: score.different for task, score in liar.scores.items()} == {
        "conversation": 4,
        "qa": 1,
        "rag": 1,
        OVERALL: 6,
    }


def test_questions_without_room_are_skipped_with_their_later_turns(shallow: LLM) -> None:
    def run(context: int) -> tuple[SpecResults, list[tuple[int, int]]]:
        told: list[tuple[int, int]] = []
        questions = [Question("rag", ("a " * 80, "And?"), 9), *QUESTIONS[:2]]
        llm, plan = small(shallow, context=context), SpecPlan({"x": Hasty}, max_tokens=4)
        bench = SpecBench(llm, questions, plan, progress=lambda *state: told.append(state[:2]))
        return bench.run(), told

    results, told = run(60)
    assert results.skipped == 2  # the long turn, and the turn after it
    row = results.rows()[1]
    assert {task: score.answers for task, score in row.scores.items()} == {
        "conversation": 2,
        "qa": 1,
        OVERALL: 3,
    }
    assert (told[0], told[-1]) == ((0, 10), (6, 6))
    results, told = run(12)  # no second turn has room
    assert (results.skipped, told[-1]) == (3, (4, 4))
    with pytest.raises(RequestError, match="none of 3 questions can be answered: the prompt has"):
        run(3)


def test_trees_have_as_many_nodes_as_are_asked_for(shallow: LLM) -> None:
    for nodes in (1, 3, 40):
        granted: list[int] = []

        class Greedy(Hasty):
            max_nodes = 64

            def propose(self, requests: Sequence[Request], granted: list[int] = granted) -> list[DraftTree]:
                granted += [request.max_nodes for request in requests if request.num_output]
                return super().propose(requests)

        questions = [Question("qa", ("Hello!",), number) for number in range(16)]
        plan = SpecPlan({"greedy": Greedy}, max_tokens=3, batches=[16])
        SpecBench(small(shallow, 16, nodes), questions, plan).run()
        assert {*granted} == {nodes, 1}  # 1: nothing can come after the last token


def test_the_time_is_shared_by_settings_and_what_was_answered_counts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes a second of a clock that only moves then; 6 turns of 2 contenders at 2 settings."""
    clock = Clock()
    monkeypatch.setattr(spec_bench, "time", clock)
    monkeypatch.setattr(measure, "time", clock)
    told: list[tuple[int, int]] = []
    plan = SpecPlan({"x": Hasty}, max_tokens=2, temperatures=[0.0, 1.0], minutes=8 / 60)
    bench = SpecBench(llm, QUESTIONS, plan, progress=lambda *state: told.append(state[:2]))
    answer = contenders.Contender.answer

    def slow(*given: object) -> object:
        clock.work(1.0)
        return answer(*given)

    monkeypatch.setattr(contenders.Contender, "answer", slow)
    results = bench.run()
    # 4 seconds each: the first two turns of a question, then one of another task
    assert [(row.temperature, row.overall.answers) for row in results.rows() if row.name == "x"] == [
        (0.0, 2),
        (1.0, 2),
    ]
    assert told[0] == (0, 24)
    assert [total for _, total in told].count(24) > 4  # steady until the time of a setting is over
    assert told[-1] == (8, 8)
    alone = SpecBench(llm, QUESTIONS, replace(plan, minutes=0.01)).run()
    assert {row.overall.answers for row in alone.rows()} == {2}  # the first group is always answered
    assert (SpecPlan({}).limit, SpecPlan({}, per_task=2).limit) == (600, math.inf)


def test_without_a_limit_every_setting_measures_every_question(llm: LLM) -> None:
    settings = {"temperatures": [0.0, 1.0], "batches": [1, 2], "rounds": 2}
    results = SpecBench(llm, QUESTIONS, SpecPlan({"x": Hasty}, per_task=9, max_tokens=2, **settings)).run()
    turns = sum(len(question.turns) for question in QUESTIONS)
    assert [row.overall.answers for row in results.rows()] == [2 * turns] * 8  # of each contender and setting


def test_drafters_forget_before_each_answer(llm: LLM) -> None:
    diary = Diary(llm.engine.target)
    SpecBench(llm, QUESTIONS, SpecPlan({"diary": diary}, max_tokens=2)).run()
    notes = "".join("r" if note == "reset" else "a" for note in diary.notes)
    assert notes == "a" + 6 * "ra"  # the first answer warms up


def test_contenders_take_turns_to_begin(llm: LLM) -> None:
    order: list[str] = []

    class Named(NoDrafter):
        name = ""

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            order.extend(self.name for request in requests if not request.num_output)
            return super().propose(requests)

    kinds = {name: type(name, (Named,), {"name": name}) for name in "ab"}
    SpecBench(llm, [QUESTIONS[1], QUESTIONS[3]], SpecPlan(kinds, max_tokens=1, rounds=2)).run()
    # plain decoding (not noted here), a and b: a first, b first; in the second round b first, plain first
    assert "".join(order[2:]) == "ab" + "ba" + "ba" + "ab"


NAP, PASS = 2.0**-8, 2.0**-6
"""Virtual seconds that a drafter sleeps, and that a pass of the target takes; sums of them are exact."""


class Clock:
    """Stands in for the module `time`: time goes by only where a test says so."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        """The thread does nothing."""
        self.wall += seconds

    def work(self, seconds: float) -> None:
        """The thread computes."""
        self.wall += seconds
        self.cpu += seconds


def test_times_are_of_what_they_say(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that dawdles in one place, and in none else."""
    clock = Clock()
    monkeypatch.setattr(contenders, "time", clock)
    monkeypatch.setattr(answer_module, "perf_counter", clock.perf_counter)

    class Slow(NoDrafter):
        def __init__(self, target: Target, where: str):
            super().__init__(target)
            self.where = where

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            if self.where == "propose" and requests[0].num_output:
                clock.sleep(NAP)
            if self.where == "prefill" and not requests[0].num_output:
                clock.sleep(10 * NAP)
            return super().propose(requests)

        def observe(self, observations: Sequence) -> None:
            if self.where == "observe" and observations[0].request.num_output:
                clock.sleep(NAP)

        def release(self, request: Request) -> None:
            if self.where == "release":
                clock.work(NAP)

    places = ("propose", "observe", "prefill", "release")
    plan = SpecPlan({where: lambda t, where=where: Slow(t, where) for where in places}, max_tokens=11)
    passes = llm.model.head.register_forward_hook(lambda *_: clock.work(PASS))
    try:
        entries = SpecBench(llm, QUESTIONS[3:], plan).run().entries
    finally:
        passes.remove()
    runs = {name: RunTimes(**run) for name, run in entries[0]["runs"].items()}
    steps = runs["none"].steps - 1
    assert steps == 10
    verify = steps * PASS
    drafts = {"none": 0.0, "propose": steps * NAP, "observe": steps * NAP, "prefill": 0.0, "release": 0.0}
    assert runs.keys() == drafts.keys()
    for name, run in runs.items():
        prefill = PASS + (10 * NAP if name == "prefill" else 0.0)
        assert (run.prefill, run.draft, run.verify) == (prefill, drafts[name], verify)
        assert run.seconds == prefill + drafts[name] + verify + (NAP if name == "release" else 0.0)
        assert run.cpu == PASS + verify + (NAP if name == "release" else 0.0)  # without what it was asleep
        assert (run.ahead, run.first, run.answers) == (1, 1, 1)


def test_theory_is_right_where_its_model_holds(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Times of passes depend on rows alone, as measured before on a machine of half the speed."""
    clock = Clock()
    monkeypatch.setattr(contenders, "time", clock)
    monkeypatch.setattr(answer_module, "perf_counter", clock.perf_counter)
    asked: list[int] = []

    class Lookup(PromptLookup):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            clock.sleep(NAP)
            return super().propose(requests)

    def measured() -> PassTimes:
        asked.append(1)
        return PassTimes([1, 2], [64], [[2 * PASS * (1 + rows / 8) for rows in (1, 2)]])

    plan = SpecPlan({"x": lambda t: Lookup(t, min_ngram=1), "hasty": Hasty}, max_tokens=24, rounds=2)
    hook = llm.model.head.register_forward_hook(
        lambda _, __, logits: clock.work(PASS * (1 + len(logits) / 8))
    )
    try:
        bench = SpecBench(llm, QUESTIONS, plan, times=measured, path=tmp_path / "r.jsonl")
        results = bench.run()
    finally:
        hook.remove()
    assert len(asked) == 2  # once a round
    again = SpecBench(llm, QUESTIONS, plan, times=measured, path=tmp_path / "r.jsonl").run()
    assert len(asked) == 2  # nothing was left to do
    assert again.rows() == results.rows()
    for row in results.rows():
        for score in row.scores.values():
            assert score.predicted == pytest.approx(score.speedup, rel=1e-9)
        assert score.by_nodes[-1] == pytest.approx(score.decode_speedup, rel=0.05)  # means of other things
    x = results.rows()[1]
    assert x.overall.accepted > 1.1  # so that there is something to predict
    for lap in (Lap(**entry) for entry in results.entries if "runs" in entry):
        run = RunTimes(**lap.runs["x"])
        steps = sum(run.tree_sizes)
        assert (run.passes, steps) == (run.steps - 1, run.steps - 1)
        # exact also where an answer ends within an accepted path
        assert steps + sum(run.accepted_ranks) == run.tokens - run.ahead


def test_verifiers_and_trees(llm: LLM) -> None:
    plan = SpecPlan(
        {"x": "prompt-lookup(min_ngram=1)"},
        temperatures=[0.0, 1.0],
        max_tokens=12,
        verifiers=["match", "block"],
        trees=True,
    )
    results = SpecBench(llm, QUESTIONS, plan).run()
    found = {(row.name, row.temperature): row.overall.different for row in results.rows()}
    assert found[("x", 0.0)] == found[("x, block", 0.0)] == found[("x", 1.0)] == 0
    assert found[("x, block", 1.0)] is None  # its tokens may be others
    for entry in results.entries:
        run = entry["runs"]["x"]
        assert len(run["trees"]) == run["steps"] - run["answers"]
        assert run["tokens"] - run["ahead"] == sum(1 + len(tree["accepted"]) for tree in run["trees"])
    with pytest.raises(VerifierError, match="verifier 'blck' is unknown"):
        SpecBench(llm, QUESTIONS, replace(plan, verifiers=["blck"]))


def test_names_are_checked_before_anything_runs(llm: LLM) -> None:
    built: list[str] = []

    def noting(target: Target) -> Drafter:
        built.append("x")
        return NoDrafter(target)

    for wrong in ("nobody", "prompt-lookup > nobody"):
        with pytest.raises(DrafterError, match=r"drafter 'nobody' is unknown; choose from .*prompt-lookup"):
            SpecBench(llm, QUESTIONS, SpecPlan({"x": noting, wrong: wrong}))
    assert not built


def test_what_cannot_be_built_is_left_out(llm: LLM) -> None:
    away = "eagle3(model=/nowhere)"
    plan = SpecPlan({"x": Hasty, away: away}, max_tokens=2)
    results = SpecBench(llm, QUESTIONS[1:2], plan).run()
    assert [row.name for row in results.rows()] == ["none", "x"]
    assert "/nowhere" in results.left_out[away]
    with pytest.raises(DrafterError, match="/nowhere"):
        SpecBench(llm, QUESTIONS, SpecPlan({away: away}))


# resuming


def test_a_run_goes_on_where_it_was_cut_short(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    plan = SpecPlan({"x": Hasty}, temperatures=[1.0], max_tokens=5, rounds=2)
    SpecBench(llm, QUESTIONS, plan, path=file).run()
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 6
    file.write_text("".join(lines[:2]) + lines[2][:30])  # one turn is there, of two
    diary = Diary(llm.engine.target)
    noting = replace(plan, drafters={"x": diary})
    told: list[tuple[int, int, int]] = []
    results = SpecBench(llm, QUESTIONS, noting, path=file, progress=lambda *s: told.append(s)).run()
    assert len([note for note in diary.notes if note != "reset"]) == 1 + 11
    assert told[1][:2] == (2, 24)
    for old, new in zip(lines, file.read_text().splitlines(), strict=True):
        before, after = json.loads(old), json.loads(new)
        if "runs" in before:
            for key in ("temperature", "round", "group", "turn", "answered", "answers", "texts"):
                assert before[key] == after[key]
    assert results.rows()[1].overall.answers == 12
    file.write_text(whole)
    diary = Diary(llm.engine.target)
    again = SpecBench(llm, QUESTIONS, replace(plan, drafters={"x": diary}), path=file)
    again.run()
    assert file.read_text() == whole  # nothing was left to do
    assert not diary.notes
    assert SpecResults.read(file).rows() == again.results.rows()


def test_plain_decoding_is_held_against_what_it_said_first(llm: LLM, tmp_path: Path) -> None:
    """Whatever the round or the batch."""
    file = tmp_path / "r.jsonl"
    options = {"drafters": {"x": Hasty}, "max_tokens": 5}
    SpecBench(llm, QUESTIONS, SpecPlan(**options), path=file).run()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["answers"][0][-1] += 1  # of the first question's first turn
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = SpecBench(llm, QUESTIONS, SpecPlan(**options, rounds=2, batches=[1, 4]), path=file).run()
    found = {(row.name, row.batch): row.overall.different for row in results.rows()}
    assert found == {("none", 1): 1, ("x", 1): 1, ("none", 4): 2, ("x", 4): 2}


@pytest.mark.parametrize("change", [{"max_tokens": 6}, {"seed": 1}, {"drafters": {"y": Hasty}}])
def test_a_file_of_other_conditions_is_refused(llm: LLM, tmp_path: Path, change: dict) -> None:
    file = tmp_path / "r.jsonl"
    options = {"drafters": {"x": Hasty}, "max_tokens": 5}
    SpecBench(llm, QUESTIONS, SpecPlan(**options), path=file, about={"dtype": "float32"})
    name = "contenders" if "drafters" in change else next(iter(change))
    with pytest.raises(SoothsayError, match=f"of another run: other {name}; give a new file"):
        SpecBench(llm, QUESTIONS, SpecPlan(**{**options, **change}), path=file, about={"dtype": "float32"})
    with pytest.raises(SoothsayError, match="other dtype"):
        SpecBench(llm, QUESTIONS, SpecPlan(**options), path=file, about={"dtype": "int8"})
    with pytest.raises(SoothsayError, match="other questions, questions_digest"):
        SpecBench(llm, QUESTIONS[1:], SpecPlan(**options), path=file, about={"dtype": "float32"})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "it is empty"),
        ("{", "it is empty"),  # a line that was cut short
        ("nothing\n", "does not hold measurements"),
        ("[]\n", "not a JSON object"),
        ('{"a": 1}\n{"b": 2}\n', "measurements of 'bench spec' are expected"),
        ('{"a": 1}\n{"runs": {"none": {"x": 1}}}\n', "measurements of 'bench spec' are expected"),
    ],
)
def test_files_of_something_else(content: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(content)
    with pytest.raises(SoothsayError, match=what) as caught:
        SpecResults.read(file)
    assert str(file) in str(caught.value)


# what it adds up to


def lap(task: str, question: int, turn: int, number: int, **runs: RunTimes) -> Lap:
    return Lap(0.0, 1, number, task, [question], turn, [question], 0, runs)


def run(tokens: int, seconds: float, **more: float) -> RunTimes:
    return RunTimes(**{"answers": 1, "different": 0, "prefill": seconds / 4, "ahead": 1, **more},
               tokens=tokens, seconds=seconds)  # fmt: skip


def test_speedups_are_the_leaderboards() -> None:
    """Worked out by hand from three questions, one of two turns, in three rounds."""
    results = SpecResults({})
    # the medians of `a` and `b` are 1, in different rounds, and neither the least nor the last
    for number, (a, b) in enumerate(((0.5, 1.0), (1.0, 0.25), (9.0, 7.0)), start=1):
        results.add(lap("chat", 1, 0, number, none=run(20, 2.0 * a), x=run(20, 1.0 * b)))
        results.add(lap("chat", 1, 1, number, none=run(10, 1.0 * b), x=run(10, 0.5 * a)))
        results.add(lap("qa", 2, 0, number, none=run(40, 1.0 * b), x=run(40, 0.25 * a)))
        results.add(lap("qa", 3, 0, number, none=run(30, 1.0 * a), x=run(30, 2.0 * b)))
    plain, x = results.rows()
    # tokens/s: 30/3, 40/1, 30/1 plainly; 30/1.5, 40/0.25, 30/2 with x
    assert plain.overall.rate == pytest.approx((10 + 40 + 30) / 3)
    assert x.overall.rate == pytest.approx((20 + 160 + 15) / 3)
    assert x.overall.speedup == pytest.approx(195 / 80)
    assert x.scores["chat"].speedup == pytest.approx(2.0)
    assert x.scores["qa"].speedup == pytest.approx(175 / 70)
    assert x.overall.median_speedup == pytest.approx(2.0)  # of 2, 4 and 0.5
    # after the first token: 28/2.25, 39/0.75, 29/0.75; three quarters of the time, a token less a turn
    rates = [28 / 1.125, 39 / 0.1875, 29 / 1.5]
    assert x.overall.decode_rate == pytest.approx(sum(rates) / 3)
    assert x.overall.decode_speedup == pytest.approx(sum(rates) / (28 / 2.25 + 39 / 0.75 + 29 / 0.75))
    assert x.overall.phases["prefill"] == pytest.approx(1e3 * (1.5 + 0.25 + 2) / 4 / 100)


def test_answers_of_one_token_have_no_decoding_rate() -> None:
    results = SpecResults({})
    results.add(lap("qa", 1, 0, 1, none=run(1, 1.0, prefill=1.0), x=run(1, 1.0, prefill=1.0)))
    assert (results.rows()[1].overall.decode_rate, results.rows()[1].overall.decode_speedup) == (0.0, 0.0)
    results.add(lap("qa", 2, 0, 1, none=run(9, 3.0, prefill=1.0), x=run(9, 2.0, prefill=1.0)))
    results.add(lap("qa", 3, 0, 1, none=run(5, 5.0, prefill=1.0), x=run(5, 1.0, prefill=1.0, ahead=5)))
    overall = results.rows()[1].overall
    assert overall.decode_rate == pytest.approx(8.0)  # of the second question alone
    assert overall.decode_speedup == pytest.approx(2.0)


def test_what_is_not_compared_is_not_counted_as_equal() -> None:
    results = SpecResults({})
    results.add(lap("qa", 1, 0, 1, none=run(9, 1.0), x=run(9, 1.0, different=None)))
    assert [row.overall.different for row in results.rows()] == [0, None]


# questions


def test_questions_of_spec_bench() -> None:
    questions = read_prompts(SPEC_BENCH)
    assert Counter(question.task for question in questions) == dict.fromkeys(
        ("conversation", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )
    assert Counter(len(q.turns) for q in questions if q.task == "conversation") == {2: 80}
    lines = [json.loads(line) for line in gzip.decompress(SPEC_BENCH.read_bytes()).split(b"\n") if line]
    assert all(lines[question.number - 1]["turns"] == [*question.turns] for question in questions)
    some = by_task(questions, 8)
    assert [len(own) for own in some.values()] == 6 * [8]
    assert len({one.category for one in some["conversation"]}) == 8  # each of MT-bench's
    every = by_task(questions)
    assert sorted(one.number for own in every.values() for one in own) == [*range(1, 481)]
    first = [one.category for one in every["conversation"][:20]]
    assert len({*first}) > 5  # a run that ends early has most categories
    assert [one.task for one in in_turns(every.values())[:7]] == [*every, "conversation"]


# the command


def command(tmp_path: Path, *options: str, width: str = "80") -> tuple[int, str]:
    file = tmp_path / "questions.jsonl"
    lines = [
        {"category": "writing", "turns": ["Hello!", "And why?"]},
        {"category": "math", "turns": ["One and one?", "And two?"]},
        {"category": "math_reasoning", "turns": ["How many are three?"]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    model = ["bench", "spec", "sibyl", "--dtype=float32", f"--spec-bench={file}", "-n8"]
    result = CliRunner().invoke(app, [*model, *options], env={"COLUMNS": width})
    return result.exit_code, result.output


def test_a_drafter_that_fails_is_named() -> None:
    class Raises(Drafter):
        max_nodes = 2

        def propose(self, requests: Any) -> Any:
            raise ZeroDivisionError("oops")

    llm = LLM("sibyl", drafter="none", kv_tokens=512)
    with running(llm, [([17], SamplingParams(max_tokens=4))], Raises) as (request,):
        while llm.engine.has_work:
            llm.engine.step()
    with pytest.raises(SoothsayError, match="a request: ZeroDivisionError: oops; drafter 'Raises' raised it"):
        answer_of(request)


def test_the_command(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "markdown")}
    itself = "draft-model(model=sibyl, depth=2)"
    outputs = [f"--{kind}={file}" for kind, file in files.items()]
    code, output = command(tmp_path, f"-d{itself}", "-dprompt-lookup", "-t0", "-t1", "--nodes=4", *outputs)
    assert code == 0
    headings = [line.split() for line in output.split("\n") if line.startswith(" drafter")]
    own = [one for line in headings for one in line if one != "drafter"]
    shown = "chat math accepted overall median decode CPU tokens/s nodes predicted nodes equal"
    assert own == 2 * shown.split()  # at each temperature, in tables beside each other; "best" is above
    assert "prompt-lookup" in output
    assert output.count("5/5") == 6
    results = SpecResults.read(files["json"])
    numbers = "bfloat16 weights, float32 between"
    assert (results.conditions["model"], results.conditions["dtype"]) == ("sibyl", numbers)
    assert (results.conditions["nodes"], results.conditions["max_tokens"]) == (4, 8)
    assert [(row.name, row.temperature) for row in results.rows()] == [
        (name, t) for t in (0.0, 1.0) for name in ("none", itself, "prompt-lookup")
    ]
    assert results.rows()[1].overall.accepted > 2
    table = files["markdown"].read_text().split("\n")
    assert table[0].startswith("| drafter | T | chat | math | accepted | overall | median | decode |")
    assert len([line for line in table if line.startswith("| ")]) == 2 + 6
    assert files["html"].read_text().startswith("<!doctype html>")
    assert f"<title>{results.conditions['prompts']}: sibyl, {numbers}" in files["html"].read_text()
    again, shown = CliRunner(), ["bench", "report", str(files["json"]), "--markdown=-"]
    assert again.invoke(app, shown).output == files["markdown"].read_text()


def test_a_head_of_another_model_is_reported(tmp_path: Path) -> None:
    head = f"eagle3(model={untrained('eagle3')})"
    with pytest.warns(UserWarning, match=r"eagle3 guessed right in [01] of its first 100 steps"):
        code, _ = command(tmp_path, f"-d{head}", "--nodes=2", "-n40")
    assert code == 0


def test_a_terminal_sees_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, output = command(tmp_path, "-dprompt-lookup", "--per-task=1", width="200")
    assert code == 0
    bars = re.findall(r"answering .*?(\d+)/6 answers, (\d+) tokens/s", re.sub(r"\x1b\[[\d;?]*\w", "", output))
    assert bars[-1][0] == "6"
    assert int(bars[-1][1]) > 0


@pytest.mark.parametrize("name", ["nobody", "number", "Class", "one", "plain"])
def test_what_is_no_verifier_is_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("number = 3\nclass Class: ...\ndef one(tree): yield [0]\ndef plain(tree, chance): ...")
    code, output = command(tmp_path, "-t1", f"--verifier={file}:{name}", "-dsuffix", width="400")
    assert (code, len(output.splitlines())) == (2, 1)
    assert re.match(rf"Error: .*'{name}'", output)


def test_ctrl_c_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, calls = contenders.Contender.answer, []

    def pressed(*given: Any) -> Any:
        calls.append(given)
        if len(calls) in stops:
            raise KeyboardInterrupt
        return answer(*given)

    monkeypatch.setattr(contenders.Contender, "answer", pressed)
    file, stops = tmp_path / "r.jsonl", [9]  # two to warm up, and two for each of three turns
    code, output = command(tmp_path, "-dprompt-lookup", f"--json={file}", width="200")
    assert code == 130
    assert "stopped after 2 of 3 questions of 2 tasks; the same command goes on" in output
    assert output.count("3/3") == 2
    stops, calls[:] = [1], []
    assert command(tmp_path, "-dprompt-lookup", f"--json={file}")[0] == 130
    stops, calls[:] = [1], []
    code, output = command(tmp_path, "-dprompt-lookup", width="200")
    assert (code, output.splitlines()[-1]) == (130, "stopped after 0 of 3 questions of 2 tasks")


def test_the_command_ends_with_1_where_answers_differ(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    conditions = {"model": "m", "dtype": "int8", "left_out": {"medusa": "no weights"}}
    facts = dict.fromkeys(("questions", "max_tokens", "nodes", "threads", "processor", "soothsay"), 1)
    results = SpecResults({**conditions, **facts}, file)
    bad = lap("qa", 1, 0, 1, **{"none": run(9, 1.0), "a|b": run(9, 0.5, different=1)})
    results.add(bad)
    html = tmp_path / "r.html"
    result = CliRunner().invoke(app, ["bench", "report", str(file), f"--html={html}"], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert "0/1" in result.output
    assert "DIFFERENT ANSWERS" in result.output
    assert "medusa was left out: no weights" in result.output
    assert "1 answers are not plain decoding's" in html.read_text()
    result = CliRunner().invoke(app, ["bench", "report", str(file), "--markdown=-"])
    assert result.exit_code == 1
    assert r"| a\|b | 0 | 2.00 |" in result.output


def test_the_command_needs_no_file_and_no_drafter(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ["bench", "spec", "--per-task=1", "-n2", f"--json={file}"]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    results = SpecResults.read(file)
    names = [row.name for row in results.rows()]
    assert names == ["none", "auto", "suffix", "prompt-lookup", "recycling", "mtp", "eagle3", "block"]
    told = f"6 questions of 6 tasks, in turns by {', '.join(names)}; without a limit of time"
    assert told in " ".join(result.output.split())
    assert len(results.rows()[1].scores) == 7  # tasks, and all of them together


def test_the_command_names_an_unknown_drafter(tmp_path: Path) -> None:
    code, output = command(tmp_path, "-dnobody", width="200")
    assert code == 2
    assert "drafter 'nobody' is unknown" in output


def test_an_interval_holds_the_speed_up_and_a_loss_is_no_accident() -> None:
    score = _score(rates=[(9.0 + number % 3, 10.0) for number in range(30)], speedup=1.0)
    low, high = score.interval
    assert 0.9 < low < 1 < high < 1.1
    assert not score.is_slower
    assert _score(rates=[(8.0 + number % 3, 10.0) for number in range(30)], speedup=0.9).is_slower
    assert not _score(rates=[], speedup=0.0).is_slower
    assert not _score(rates=[(5.0, 10.0)], speedup=0.5).is_slower  # of one question nothing is known


def test_losses_count_by_task_alone_and_overall_in_batches() -> None:
    slow, even = [(5.0, 10.0)] * 4, [(10.0, 10.0)] * 4
    chat, overall = _score(rates=slow, speedup=0.5), _score(rates=even, speedup=1.0)
    rows = [SpecRow("auto", 0.0, batch, {"chat": chat, OVERALL: overall}) for batch in (1, 4)]
    results = SimpleNamespace(rows=lambda: rows, conditions={})
    assert interval_table(results).rows == [  # type: ignore[arg-type]
        ["auto", "0", "1", "0.50-0.50 \u2717", "1.00-1.00"],
        ["auto", "0", "4", "", "1.00-1.00"],
    ]
    assert slower(results) == 1  # type: ignore[arg-type]


def _score(rates: list[tuple[float, float]], speedup: float) -> Score:
    blank = dict.fromkeys(("different", "cpu_speedup", "cpu_share", "accepted", "drafted"), 0)
    times = dict.fromkeys(("rate", "decode_rate", "median_speedup", "decode_speedup"), 0.0)
    return Score(**blank, **times, answers=4, speedup=speedup, phases={}, by_depth=(), rates=rates)
