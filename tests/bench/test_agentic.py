"""Episodes of agents, as questions for models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from soothsay import RequestError
from soothsay.bench.prompts import read_prompts

sys.path.append(str(ROOT / "training"))
from agentic_prompts import CALLS, EDITS, RENAMES, TOOLS, TURNS, make_episodes, write_questions

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


def test_edits_change_a_name_of_the_code_as_it_is_then(data: Path) -> None:
    for episode in make_episodes(data, 2)[:2]:
        assert (episode.task, len(episode.turns)) == (EDITS, RENAMES)
        code = episode.turns[0].split("```")[1]
        for asked in episode.turns:
            old, new = re.findall(r"with (\w+) renamed to (\w+)", asked)[0]
            assert len(re.findall(rf"\b{old}\b", code)) > 1
            code = re.sub(rf"\b{old}\b", new, code)
            assert len(re.findall(rf"\b{new}\b", code)) > 1


def test_calls_change_an_argument_of_the_tool(data: Path) -> None:
    for episode in make_episodes(data, 2)[2:]:
        assert (episode.task, len(episode.turns)) == (CALLS, TURNS)
        call = json.loads(episode.turns[0].split("\n\n")[1])
        assert tuple(call["arguments"]) == TOOLS[call["tool"]]
        for asked in episode.turns[1:]:
            name, value = re.findall(r"with (\w+) = (.*)\.$", asked)[0]
            assert type(json.loads(value)) is type(call["arguments"][name])


def test_what_users_say_is_read_as_questions(data: Path, tmp_path: Path) -> None:
    episodes = make_episodes(data, 2)
    write_questions(tmp_path / "questions.jsonl", episodes)
    read = read_prompts(tmp_path / "questions.jsonl")
    assert [(q.task, q.turns) for q in read] == [(e.task, e.turns) for e in episodes]


def test_a_file_with_too_little_is_refused(data: Path) -> None:
    with pytest.raises(RequestError, match="has 2 pieces of code and 5 places; 3 episodes"):
        make_episodes(data, 3)


def test_command(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "questions.jsonl"
    subprocess.run([sys.executable, ROOT / "training" / "agentic_prompts.py", data, out, "2"], check=True)
    assert len(read_prompts(out)) == 4
