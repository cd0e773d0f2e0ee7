"""Reads the questions of a Spec-Bench file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from soothsay.bench.prompt_files import PromptEntry, spread
from soothsay.corpus import read_lines
from soothsay.errors import RequestError


@dataclass(frozen=True, slots=True)
class Question:
    """The user's messages of one conversation."""

    task: str
    turns: tuple[str, ...]
    number: int = 0  # identifies the question: its line in the file


def read_questions(path: Path, per_task: int | None = None) -> list[Question]:
    """Read a Spec-Bench file: JSON lines with `turns` and `category`.

    MT-bench's categories are one task, "conversation".

    Args:
        path: the file.
        per_task: number of questions of each task, evenly spread over the file. None: all.

    Raises `RequestError` for a line that is not a question, and if the file has no questions.
    """
    tasks: dict[str, dict[PromptEntry, Question]] = {}
    for number, line in read_lines(path):
        try:
            raw = json.loads(line)
            turns, category = raw["turns"], str(raw["category"])
        except (ValueError, KeyError, TypeError):
            turns = None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise RequestError(
                f"{path}, line {number}: no question of Spec-Bench, with 'category' and 'turns'"
            )
        entry = PromptEntry(turns[0], category, id=str(number))
        tasks.setdefault(entry.task, {})[entry] = Question(entry.task, tuple(turns), number)
    if not tasks:
        raise RequestError(f"{path} has no questions")
    return [
        questions[entry]
        for questions in tasks.values()
        for entry in spread(list(questions), per_task or len(questions))
    ]
