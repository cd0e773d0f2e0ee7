"""The target's own answers: they equal the engine's in the same context, and no interruption repeats one."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from soothsay import LLM, RequestError, SamplingParams, Tokenizer
from soothsay.cli.app import app
from soothsay.cli.command_classes import as_function
from soothsay.cli.train.train_app import AnswerConversations
from soothsay.core.sampling import derive_seed
from soothsay.errors import SoothsayError, TrainingError
from soothsay.files import locked
from soothsay.model.transformer import Transformer
from soothsay.train import answers
from soothsay.train.answers import AnswersReport, NumberedMessages, read_unanswered, write_answers
from soothsay.train.examples import read_examples

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SAMPLED = SamplingParams(temperature=1, max_tokens=6, seed=5)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = [
    [user("Hello!"), answer("I never said this.")],
    [SYSTEM, user("Tell me a story."), answer("No."), user("Why?"), answer("No."), user("Oh.")],
    [answer("Yes?"), user("What is the sky?")],
    [user("A man stands."), answer("Where?"), user("On a ladder.")],
    [user("One."), user("Two.")],
]
TURNS = [1, 3, 1, 2, 2]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("sibyl", dtype="float32", drafter="none", max_requests=2, kv_tokens=4096)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"messages": messages}) for messages in CONVERSATIONS))
    return file


def lines(file: Path) -> dict[int, list[dict[str, str]]]:
    entries = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    assert len({entry["prompt"] for entry in entries}) == len(entries)
    return {entry["prompt"]: entry["messages"] for entry in entries}


def alone(llm: LLM, number: int, params: SamplingParams) -> list[dict[str, str]]:
    """Answer one conversation by itself, one request after the other."""
    said: list[dict[str, str]] = []
    turn = 0
    for message in CONVERSATIONS[number]:
        if message["role"] == "assistant":
            continue
        said.append(message)
        if message["role"] == "user":
            turn += 1
            seed = derive_seed(params.seed or 0, 65536 * number + turn)
            one = SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, seed=seed)
            said.append(answer(llm.chat(said, one).text))
    return said


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_turn_is_answered_behind_the_models_own_answers(
    params: SamplingParams, llm: LLM, prompts: Path, tmp_path: Path
) -> None:
    asked, tally = read_unanswered(prompts)
    assert (tally.read, tally.bad) == (5, 0)
    out = tmp_path / "new" / "answers.jsonl"
    report = write_answers(llm, asked, out, params)
    assert lines(out) == {number: alone(llm, number, params) for number in range(5)}
    assert (report.before, report.written, report.answers) == (0, 5, sum(TURNS))
    texts = [m["content"] for messages in lines(out).values() for m in messages if m["role"] == "assistant"]
    assert "I never said this." not in texts
    assert len(texts) == sum(TURNS)
    assert 0 < report.tokens <= 6 * sum(TURNS)
    assert not llm.engine.has_work
    assert llm.tokenizer is not None
    assert len(read_examples([out], llm.tokenizer, 1000)[0]) == 5


def test_the_batch_is_kept_full_and_conversations_are_written_as_they_end(
    llm: LLM, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _ = read_unanswered(prompts)
    out = tmp_path / "answers.jsonl"
    step, busy, written = llm.engine.step, list[int](), list[int]()

    def watched() -> None:
        busy.append(len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
        written.append(out.read_bytes().count(b"\n"))
        step()

    monkeypatch.setattr(llm.engine, "step", watched)
    told: list[tuple[int, int, int]] = []
    report = write_answers(llm, asked, out, GREEDY, progress=lambda *state: told.append(state))
    assert busy == sorted(busy, reverse=True)  # as many as there are conversations left
    assert busy.count(2) > len(busy) * 0.6
    assert {0, 1, 2} <= {*written} <= {0, 1, 2, 3, 4}
    assert [(done, total) for done, total, _ in told] == [(done, 5) for done in range(6)]
    assert told[0][2] == 0
    assert told[-1][2] == report.tokens


def test_no_drafter_changes_what_is_written(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked, _ = read_unanswered(prompts)
    drafted = LLM("sibyl", dtype="float32", drafter="prompt-lookup(min_ngram=1)", kv_tokens=4096)
    for params in (GREEDY, SAMPLED):
        plain, guessed = tmp_path / f"{params.temperature}", tmp_path / f"{params.temperature} drafted"
        write_answers(llm, asked, plain, params)
        write_answers(drafted, asked, guessed, params)
        assert lines(plain) == lines(guessed)


# resuming


def test_an_interrupted_run_goes_on(
    llm: LLM, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _ = read_unanswered(prompts)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    write_answers(llm, asked, whole, SAMPLED)

    def stop(done: int, total: int, tokens: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(llm, asked, out, SAMPLED, progress=stop)
    assert not llm.engine.has_work  # nothing is left running
    assert len(lines(out)) == 2
    before = out.read_bytes()
    with out.open("ab") as file:
        file.write(b'{"prompt": 3, "messages": [{"role": "us')
    told: list[tuple[int, int, int]] = []
    report = write_answers(llm, asked, out, SAMPLED, progress=lambda *state: told.append(state))
    assert (report.before, report.written) == (2, 3)
    assert told[0] == (2, 5, 0)
    assert out.read_bytes().startswith(before)
    assert lines(out) == lines(whole)
    complete = out.read_bytes()
    assert write_answers(llm, asked, out, SAMPLED) == AnswersReport(before=5)
    assert out.read_bytes() == complete


def test_a_limit_takes_the_same_ones_first(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked, _ = read_unanswered(prompts)
    assert [one.number for one in asked] != sorted(one.number for one in asked)
    out = tmp_path / "answers.jsonl"
    assert write_answers(llm, asked, out, GREEDY, limit=2).written == 2
    assert {*lines(out)} == {one.number for one in asked[:2]}
    report = write_answers(llm, asked, out, GREEDY, limit=3)
    assert (report.before, report.written) == (2, 1)
    assert write_answers(llm, asked, out, GREEDY, limit=1) == AnswersReport(before=1)
    assert {*lines(out)} == {one.number for one in asked[:3]}


@pytest.mark.parametrize(
    "content",
    [
        b"a letter to my mother, without a line feed",
        b'{"pro\n{',  # only the last line may be incomplete
        b'{"text": "other data"}\n',
        b'{"prompt": 0, "messages": [{"role": "user", "content": "Another question."}]}\n',
        b'{"prompt": 99, "messages": [{"role": "user", "content": "Hello!"}]}\n',
        b'{"prompt": 0, "messages": []}\n',
        b'{"prompt": 0}\n',
        b"[1]\n",
        b"\n",
    ],
)
def test_other_files_are_not_touched(content: bytes, llm: LLM, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    asked, _ = read_unanswered(prompts)
    good = json.dumps({"prompt": 0, "messages": [user("Hello!"), answer("Yo")]}).encode() + b"\n"
    for line, before in ((1, b""), (2, good)):
        out.write_bytes(before + content)
        with pytest.raises(TrainingError, match=rf"answers.jsonl, line {line}: this is no answer to these"):
            write_answers(llm, asked, out, GREEDY)
        assert out.read_bytes() == before + content


@contextmanager
def room(size: int) -> Iterator[None]:
    """Limit the size of files to `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked, _ = read_unanswered(prompts)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    write_answers(llm, asked, whole, GREEDY)
    with room(whole.stat().st_size * 2 // 3), pytest.raises(TrainingError, match="make room"):
        write_answers(llm, asked, out, GREEDY)
    assert not out.read_bytes().endswith(b"\n")  # the last line is incomplete
    tight = tmp_path / "tight.jsonl"  # there is no room for the last line's end
    with room(whole.stat().st_size - 3), pytest.raises(TrainingError, match="make room"):
        write_answers(llm, asked, tight, GREEDY)
    report = write_answers(llm, asked, out, GREEDY)
    assert 1 <= report.before <= 4
    assert lines(out) == lines(whole)
    with pytest.raises(TrainingError, match=r"cannot be written \(Is a directory\)|cannot be read"):
        write_answers(llm, asked, tmp_path, GREEDY)


def test_two_writers_of_one_file_are_refused(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    asked, _ = read_unanswered(prompts)
    out = tmp_path / "answers.jsonl"
    with locked(out), pytest.raises(TrainingError, match=r"another process writes .*answers\.jsonl"):
        write_answers(llm, asked, out, GREEDY)
    assert out.read_bytes() == b""


# what cannot be answered


def test_what_is_too_long_is_told(sibyl: LLM, tmp_path: Path) -> None:
    asked = [
        NumberedMessages(0, (user("a " * 60),)),
        NumberedMessages(1, (user("Hello!"), user("b " * 60))),
        NumberedMessages(2, (user("Hello!"),)),
    ]
    small = LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="none", max_context=60, kv_tokens=256)
    out = tmp_path / "answers.jsonl"
    report = write_answers(small, asked, out, SamplingParams(temperature=0, max_tokens=2))
    assert (report.written, report.left_out, report.unfinished, report.answers) == (2, 1, 1, 2)
    assert report.cut == 2
    assert [m["role"] for m in lines(out)[1]] == ["user", "assistant"]
    assert lines(out)[1] == lines(out)[2]
    assert any("conversation 0: the prompt has" in reason for reason in report.reasons)
    with pytest.raises(TrainingError, match=r"none of 1 conv.* answered: conversation 0: the prompt"):
        write_answers(small, asked[:1], tmp_path / "none.jsonl", GREEDY)


def test_models_without_a_template(tiny: Callable[..., Transformer], sibyl: LLM, tmp_path: Path) -> None:
    assert sibyl.tokenizer is not None
    for tokenizer in (None, Tokenizer(sibyl.tokenizer.backend)):
        llm = LLM(tiny(), tokenizer=tokenizer, drafter="none", kv_tokens=64)
        with pytest.raises(RequestError, match="no chat template"):
            write_answers(llm, [NumberedMessages(0, (user("Hi"),))], tmp_path / "out.jsonl", GREEDY)
    assert not (tmp_path / "out.jsonl").exists()


def test_files_of_questions(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    good: list[Any] = [{"messages": [user(f"{i}"), answer("?")]} for i in range(200)]
    bad: list[Any] = [{"messages": [SYSTEM]}, {"messages": [answer("nobody asked")]}]
    file.write_text("\n".join(json.dumps(entry) for entry in [*bad, *good]))
    asked, tally = read_unanswered(file)
    assert sorted(one.number for one in asked) == list(range(2, 202))
    assert all(one.messages == (user(f"{one.number - 2}"),) for one in asked)
    assert tally.bad == 2
    assert tally.named[0].startswith(f"{file}, line 1: nobody asks anything")
    file.write_text("\n".join(json.dumps(entry) for entry in bad))
    with pytest.raises(RequestError, match="2 of 2 entries cannot be used"):
        read_unanswered(file)
    file.write_text("")
    with pytest.raises(RequestError, match="has no conversations"):
        read_unanswered(file)


def test_questions_in_all_forms_that_benchmarks_read(tmp_path: Path) -> None:
    file, plain = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    forms = [{"turns": ["a", "b"]}, {"prompt": "a"}, {"conversations": [{"from": "human", "value": "a"}]}]
    file.write_text("\n".join(map(json.dumps, forms)))
    asked = {one.number: one.messages for one in read_unanswered(file)[0]}
    assert asked == {0: (user("a"), user("b")), 1: (user("a"),), 2: (user("a"),)}
    plain.write_text("a\n\nb\n")
    asked = {one.number: one.messages for one in read_unanswered(plain)[0]}
    assert asked == {0: (user("a"),), 1: (user("b"),)}


# the command


def test_the_command(prompts: Path, tmp_path: Path, sibyl: LLM) -> None:
    app = typer.Typer()
    app.command()(as_function(AnswerConversations))
    out = tmp_path / "answers.jsonl"
    with prompts.open("a") as file:
        file.write("".join("\n" + json.dumps({"messages": CONVERSATIONS[0]}) for _ in range(100)) + "\n{")
    args = ["sibyl", f"{prompts}", f"--out={out}", "--max-tokens=2", "-t0", "--batch=4", "--dtype=float32"]
    first = CliRunner().invoke(app, [*args, "--limit", "1"], env={"COLUMNS": "200"})
    assert first.exit_code == 0
    result = CliRunner().invoke(app, [*args, "--limit", "3"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"{out}: 3 conversations, 1 of them from earlier runs" in result.output
    assert "1 of 106 entries cannot be used" in result.output
    assert "line 110: not JSON" in result.output
    assert len(lines(out)) == 3
    out.write_text("other\n")
    failed = CliRunner().invoke(app, args)
    assert isinstance(failed.exception, SoothsayError)


def test_an_interrupt_says_how_far_it_came(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = answers._write, []

    def interrupted(*parts: Any) -> None:
        calls.append(parts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(*parts)

    monkeypatch.setattr(answers, "_write", interrupted)
    command = ["train", "data", "sibyl", str(prompts), "-o", str(tmp_path / "out"), "--max-tokens", "4"]
    stopped = CliRunner().invoke(app, command)
    assert (stopped.exit_code, len((tmp_path / "out").read_text().splitlines())) == (130, 2)
    assert "stopped (2 of 5 conversations); the same command goes on" in stopped.output
    monkeypatch.undo()
    again = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert "5 conversations, 2 of them from earlier runs" in again.output
