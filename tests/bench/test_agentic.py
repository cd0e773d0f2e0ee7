"""Episodes of agents, as questions for models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soothsay import RequestError
from soothsay.bench.agentic import (
    CALLS,
    EDITS,
    RENAMES,
    TOOLS,
    TURNS,
    make_episodes,
    write_questions,
)
from soothsay.bench.prompts import read_questions
from soothsay.cli.app import app

CODE = """def total(values):
    result = 0
    for value in values:
        result += value
    return result

print(total([1, 2, 3]))"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [f"There is a hotel in {place}." for place in ("Oslo", "Bern", "Rome", "Kiel", "San Jose")]
    lines += [
        f"Here it is:\n\n```python\n{CODE.replace('total', name)}\n```\nGood luck."
        for name in ("total", "add_up")
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": line}]}
            )
            + "\n"
            for line in lines
        )
    )
    return path


def test_a_seed_gives_the_same_episodes_again_and_another_seed_others(data: Path) -> None:
    assert make_episodes(data, 2, seed=1) == make_episodes(data, 2, seed=1)
    assert make_episodes(data, 2, seed=1) != make_episodes(data, 2, seed=2)


def test_edits_give_the_code_back_with_a_name_changed(data: Path) -> None:
    for episode in make_episodes(data, 2)[:2]:
        assert (episode.task, len(episode.messages)) == (EDITS, 2 * RENAMES)
        code = str(episode.messages[0]["content"]).split("```")[1]
        for asked, answer in zip(episode.messages[::2], episode.messages[1::2], strict=True):
            old, new = re.findall(r"with (\w+) renamed to (\w+)", asked["content"])[0]
            assert len(re.findall(rf"\b{old}\b", code)) > 1
            code = re.sub(rf"\b{old}\b", new, code)
            assert answer["content"] == f"```{code}```"


def test_calls_differ_in_one_argument(data: Path) -> None:
    for episode in make_episodes(data, 2)[2:]:
        assert (episode.task, len(episode.messages)) == (CALLS, 2 * TURNS)
        calls = [json.loads(message["content"]) for message in episode.messages[1::2]]
        assert len({call["tool"] for call in calls}) == 1
        assert tuple(calls[0]["arguments"]) == TOOLS[calls[0]["tool"]]
        for before, after, asked in zip(calls, calls[1:], episode.messages[2::2], strict=False):
            changed = {k for k, v in after["arguments"].items() if v != before["arguments"][k]}
            name, value = re.findall(r"with (\w+) = (.*)\.$", asked["content"])[0]
            assert changed <= {name}
            assert after["arguments"][name] == json.loads(value)


def test_what_users_say_is_read_as_questions(data: Path, tmp_path: Path) -> None:
    episodes = make_episodes(data, 2)
    write_questions(tmp_path / "questions.jsonl", episodes)
    read = read_questions(tmp_path / "questions.jsonl")
    assert [(q.task, q.turns) for q in read] == [(e.question.task, e.question.turns) for e in episodes]


def test_a_file_with_too_little_is_refused(data: Path) -> None:
    with pytest.raises(RequestError, match="has 2 pieces of code and 5 places; 3 episodes"):
        make_episodes(data, 3)


def test_command(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "questions.jsonl"
    made = CliRunner().invoke(app, ["bench", "agentic", str(data), "-o", str(out), "--per-task", "2"])
    assert made.exit_code == 0, made.output
    assert f"{out}: 4 episodes of 2 tasks" in made.stdout.replace("\n", "")
    assert len(read_questions(out)) == 4
