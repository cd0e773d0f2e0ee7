"""What agents say, made from conversations: code given back with a name changed, and tool calls that differ
in one argument. Where answers repeat what was said before, drafters that look things up are at their best.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from soothsay.bench.spec.questions import Question
from soothsay.corpus import Tally, read_entries
from soothsay.drafters import Drafter
from soothsay.engine.answer import FinishReason
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.errors import RequestError
from soothsay.tokenizer import Message, Tokenizer

EDITS, CALLS = "edits", "calls"

RENAMES = 2
"""Edits asked for in an episode, each of the code as the one before has left it."""

TURNS = 4
"""Tool calls in an episode."""

TOOLS = {
    "find_bus": ("origin", "destination", "date", "passengers"),
    "book_hotel": ("city", "check_in", "nights", "guests"),
    "rent_car": ("city", "pickup_date", "pickup_time", "days"),
    "get_weather": ("city", "date", "unit", "detail"),
}

_SNIPPET = re.compile(r"^(?:def|class|function) \w+.*(?:\n.*){4,24}", re.MULTILINE)
_NAME = re.compile(r"\b(?!def\b|class\b|function\b|return\b|import\b|print\b)[a-z][a-z_]{3,}\b")
_PLACE = re.compile(r"\bin ([A-Z][a-z]+(?: [A-Z][a-z]+)?)\b")
_LONGEST_CODE = 900  # characters, so that an episode fits into the contexts of small models


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation in which an agent does just what it is told."""

    task: str
    messages: tuple[Message, ...]
    """User and assistant in turn, the assistant last. What a model would really say may be something else."""

    @property
    def question(self) -> Question:
        """What the user says, for a model to answer in its own way."""
        return Question(self.task, tuple(m["content"] for m in self.messages if m["role"] == "user"))


def make_episodes(data: Path, per_task: int, seed: int = 0) -> list[Episode]:
    """Episodes of both tasks, from a file of conversations; see `soothsay.corpus.read_entries`. The same seed
    gives the same.

    Code comes from the answers in the file; so do places, and what the tools say, which are sentences of
    other conversations.

    Raises `RequestError` if the file cannot be read, or has too little code or too few places.
    """
    snippets: dict[str, None] = {}
    places: dict[str, None] = {}
    sentences: dict[str, None] = {}
    for _, entry in read_entries(data, Tally()):
        if isinstance(entry, str):
            continue
        for said in (message["content"] for message in entry if message["role"] == "assistant"):
            snippets.update((code, None) for code in map(_cut, _SNIPPET.findall(said)) if _names(code))
            found = _PLACE.findall(said)
            places.update(dict.fromkeys(found))
            if found and len(said) < 160 and "\n" not in said:
                sentences[said] = None
    if len(snippets) < per_task or len(places) <= TURNS or not sentences:
        raise RequestError(
            f"{data} has {len(snippets)} pieces of code and {len(places)} places; {per_task} episodes of "
            f"each task need {per_task} and more than {TURNS}"
        )
    rng = random.Random(seed)
    chosen = rng.sample(list(snippets), per_task)
    return [_edits(rng, code) for code in chosen] + [
        _calls(rng, list(places), list(sentences)) for _ in range(per_task)
    ]


class Steps(NamedTuple):
    """What a drafter would do, behind each answer's first step."""

    tokens: int
    steps: int

    @property
    def accepted(self) -> float:
        """Tokens a step, the bonus token counted."""
        return self.tokens / self.steps if self.steps else 0.0


def write_questions(path: Path, episodes: Iterable[Episode]) -> None:
    """Write what the users say as a file that `read_questions` reads."""
    with path.open("w", encoding="utf-8") as file:
        for number, episode in enumerate(episodes):
            question = episode.question
            raw = {"question_id": number, "category": question.task, "turns": question.turns}
            file.write(json.dumps(raw, ensure_ascii=False) + "\n")


def replay(
    drafter: Drafter, episodes: Sequence[Episode], tokenizer: Tokenizer, nodes: int
) -> dict[str, Steps]:
    """What a drafter that only looks at tokens would do for a model that answers as the episodes do: each
    answer is taken as known, so that no model is needed.

    Turns come one after the other; what ended before may help the drafter. As elsewhere, the first step of an
    answer is not counted.

    Args:
        drafter: not used by anything else.
        episodes: from `make_episodes`.
        tokenizer: with a chat template.
        nodes: of a tree, the root included, at most.
    """
    scores: dict[str, Steps] = {}
    for episode in episodes:
        for turn in range(1, len(episode.messages), 2):
            prompt = tokenizer.encode_chat(episode.messages[:turn])
            answer = tokenizer.encode(episode.messages[turn]["content"], special=False)
            limit = len(prompt) + len(answer)
            request = Request(prompt, SamplingParams(), seed=0, limit=limit, drafter=drafter)
            while request.finish_reason is None:
                request.max_nodes = min(nodes, drafter.max_nodes)
                tree = drafter.propose([request])[0].prune(request.max_nodes, max(request.max_depth, 0))
                left = answer[request.num_output :]
                authors = drafter.authors(request, tree, tree.walk(left[:-1])[1:])
                emitted = request.emit(left[: len(authors) + 1], authors)
                request.stats.record(len(tree) - 1, max(tree.depths), authors, emitted)
            assert request.finish_reason is FinishReason.LENGTH
            drafter.release(request)
            (more, steps), before = request.stats.behind_prompt, scores.get(episode.task, Steps(0, 0))
            scores[episode.task] = Steps(before.tokens + more, before.steps + steps)
    return scores


def _cut(code: str) -> str:
    """Whole lines, not too many."""
    while len(code) > _LONGEST_CODE:
        code = code[: code.rindex("\n")]
    return code.partition("\n```")[0].rstrip()


def _names(code: str) -> list[str]:
    """Names that occur more than once, so that renaming means something."""
    found = _NAME.findall(code)
    return sorted({name for name in found if found.count(name) > 1})


def _edits(rng: random.Random, code: str) -> Episode:
    messages: list[Message] = []
    for _ in range(RENAMES):
        old = rng.choice(_names(code))
        new = rng.choice(("new", "my", "current", "next")) + "_" + old
        shown = f"\n\n```\n{code}\n```" if not messages else ""
        code = re.sub(rf"\b{old}\b", new, code)
        messages += [
            {
                "role": "user",
                "content": f"Repeat the code with {old} renamed to {new}, and nothing else.{shown}",
            },
            {"role": "assistant", "content": f"```\n{code}\n```"},
        ]
    return Episode(EDITS, tuple(messages))


def _calls(rng: random.Random, places: Sequence[str], sentences: Sequence[str]) -> Episode:
    tool = rng.choice(sorted(TOOLS))
    names = TOOLS[tool]
    arguments: dict[str, str | int] = {name: _value(rng, name, places) for name in names}
    messages: list[Message] = []
    for turn in range(TURNS):
        changed = names[0] if turn == 0 else rng.choice(names)
        arguments = {**arguments, changed: _value(rng, changed, places)}
        call = json.dumps({"tool": tool, "arguments": arguments}, ensure_ascii=False)
        if turn == 0:
            asked = f"Answer with a call of a tool, as JSON. For example:\n\n{call}\n\nCall it just so."
        else:
            result = json.dumps({"status": "ok", "text": rng.choice(sentences)}, ensure_ascii=False)
            asked = f"Result: {result}\n\nCall it again, with {changed} = {json.dumps(arguments[changed])}."
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": call}]
    return Episode(CALLS, tuple(messages))


def _value(rng: random.Random, name: str, places: Sequence[str]) -> str | int:
    if name in ("city", "origin", "destination"):
        return rng.choice(places)
    if name in ("date", "check_in", "pickup_date"):
        return f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if name == "pickup_time":
        return f"{rng.randint(6, 20):02}:{rng.choice(('00', '15', '30', '45'))}"
    if name in ("unit", "detail"):
        return rng.choice({"unit": ("celsius", "fahrenheit"), "detail": ("short", "hourly", "full")}[name])
    return rng.randint(1, 9)
