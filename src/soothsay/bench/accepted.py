"""Mean accepted tokens by task of Spec-Bench: how good guesses are, whatever the machine.

Spec-Bench (Xia et al. 2024, arXiv 2401.07851) has 480 questions, 80 of each of six tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soothsay.bench.peers.compare import CONVERSATION
from soothsay.bench.prompts import PromptEntry, encode, spread
from soothsay.corpus import read_lines
from soothsay.drafters import DrafterSpec, build_drafter
from soothsay.errors import RequestError
from soothsay.llm import LLM, Choice
from soothsay.tokenizer import Message
from soothsay.train.evaluate import mean_accepted

PLAIN = "none"
OVERALL = "overall"

Progress = Callable[[int, int, int], None]
"""Called with the answers that are there, how many there will be, and their tokens."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says, turn by turn."""

    task: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What a drafter did in a task."""

    answers: int = 0
    different: int = 0  # of them, from plain decoding's: must be 0
    tokens: int = 0  # behind the first step, which reads the prompt
    steps: int = 0

    @property
    def accepted(self) -> float:
        """Tokens a step, the bonus token counted."""
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.answers + other.answers,
            self.different + other.different,
            self.tokens + other.tokens,
            self.steps + other.steps,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter at a temperature."""

    drafter: str
    temperature: float
    tasks: Mapping[str, Score]

    @property
    def overall(self) -> Score:
        """Of all tasks together: all tokens over all steps, which is the leaderboard's mean."""
        return sum(self.tasks.values(), Score())

    @property
    def scores(self) -> dict[str, Score]:
        """Each task's, and those of all together."""
        return {**self.tasks, OVERALL: self.overall}


@dataclass(frozen=True, slots=True)
class Report:
    """What `bench_accepted` found."""

    rows: tuple[Row, ...]
    skipped: int  # turns, of all temperatures, that the context has no room for, and those behind them

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        rows = [
            {
                "drafter": row.drafter,
                "temperature": row.temperature,
                "scores": {
                    task: {
                        "accepted": score.accepted,
                        "tokens": score.tokens,
                        "steps": score.steps,
                        "answers": score.answers,
                        "different": score.different,
                    }
                    for task, score in row.scores.items()
                },
            }
            for row in self.rows
        ]
        return {"rows": rows, "skipped": self.skipped}


def read_questions(path: Path, per_task: int | None = None) -> list[Question]:
    """The questions of a file of Spec-Bench: JSON lines with `turns` and `category`.

    MT-bench's categories are one task, "conversation". `per_task` takes so many of each task, evenly spread.

    Raises `RequestError` for a line that is none, by its number, and if there are none.
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
        task = "conversation" if category in CONVERSATION else category
        entry = PromptEntry(turns[0], category, id=str(number))
        tasks.setdefault(task, {})[entry] = Question(task, tuple(turns))
    if not tasks:
        raise RequestError(f"{path} has no questions")
    return [
        questions[entry]
        for questions in tasks.values()
        for entry in spread(list(questions), per_task or len(questions))
    ]


def bench_accepted(
    llm: LLM,
    questions: Sequence[Question],
    drafters: Mapping[str, DrafterSpec],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Report:
    """Answer all questions plainly and with each drafter; count steps, and compare tokens.

    What a later turn is asked behind is plain decoding's answer to the earlier ones, for all drafters alike.
    Drafters are built anew for each temperature.

    Args:
        llm: of the target; see `mean_accepted`.
        questions: from `read_questions`.
        drafters: by the name that the report calls them.
        temperatures: one after the other.
        max_tokens: of an answer; it may end before.
        seed: what all answers' seeds are counted up from.
        progress: see `Progress`.

    Raises:
        RequestError: no question fits into the context, or prefix caching is on.
        DrafterError: a drafter is unknown or does not fit.
    """
    turns = sum(len(question.turns) for question in questions)
    meter = _Meter(turns * (1 + len(drafters)) * len(temperatures), progress)
    rows, skipped = list[Row](), 0
    for temperature in temperatures:
        scores: dict[str, dict[str, Score]] = {name: {} for name in drafters}
        built = {name: build_drafter(spec, llm.engine.target) for name, spec in drafters.items()}
        answered = 0
        for number, turn in enumerate(_ask(llm, questions, temperature, max_tokens, seed, meter.advance)):
            answered += sum(one.plain is not None for one in turn)
            for name, drafter in built.items():
                found = mean_accepted(
                    llm,
                    drafter,
                    [one.prompt for one in turn],
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=seed + number * len(questions),
                    advance=meter.advance,
                )
                for one, choice in zip(turn, found.choices, strict=True):
                    if choice is not None:
                        score = scores[name].get(one.task, Score())
                        scores[name][one.task] = score + _score(one, choice)
        skipped += turns - answered
        meter.drop((turns - answered) * (1 + len(drafters)))
        rows += [Row(name, temperature, tasks) for name, tasks in scores.items()]
    return Report(tuple(rows), skipped)


@dataclass(slots=True)
class _Asked:
    """A turn, ready for the model."""

    task: str
    prompt: list[int]
    plain: Choice | None = None


@dataclass(slots=True)
class _Meter:
    total: int
    progress: Progress
    done: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.progress(0, self.total, 0)

    def advance(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        self.progress(self.done, self.total, self.tokens)

    def drop(self, answers: int) -> None:
        self.total -= answers
        self.progress(self.done, self.total, self.tokens)


def _ask(
    llm: LLM,
    questions: Sequence[Question],
    temperature: float,
    max_tokens: int,
    seed: int,
    advance: Callable[[int], None],
) -> Iterator[list[_Asked]]:
    """All first turns with their plain answers, then all second turns behind them, and so on."""
    said: list[tuple[Question, list[Message]]] = [(question, []) for question in questions]
    number = 0
    while said:
        for question, messages in said:
            messages.append({"role": "user", "content": question.turns[number]})
        turn = [
            _Asked(question.task, encode(PromptEntry(tuple(messages)), llm)) for question, messages in said
        ]
        try:
            plain = mean_accepted(
                llm,
                PLAIN,
                [one.prompt for one in turn],
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed + number * len(questions),
                advance=advance,
            )
        except RequestError:  # no prompt has room
            if number == 0:
                raise
            return
        going_on = []
        for one, choice, (question, messages) in zip(turn, plain.choices, said, strict=True):
            one.plain = choice
            if choice is not None and len(question.turns) > number + 1:
                messages.append({"role": "assistant", "content": choice.text})
                going_on.append((question, messages))
        yield turn
        said = going_on
        number += 1


def _score(one: _Asked, choice: Choice) -> Score:
    same = one.plain is not None and one.plain.token_ids == choice.token_ids
    return Score(1, int(not same), *choice.stats.behind_prompt)
