"""Makes prompts for `soothsay bench spec` as coding agents ask them.

    python agentic_prompts.py conversations.jsonl prompts.jsonl [EPISODES_OF_EACH_TASK [SEED]]

Episodes repeat code with one name changed, or repeat a tool call with one argument changed. Answers repeat
earlier text, which favours lookup drafters.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from soothsay.corpus import PromptEntry, Tally, read_entries, user_message
from soothsay.errors import RequestError

EDITS, CALLS = "edits", "calls"

RENAMES = 2
"""Number of edits in an episode. Each edit starts from the code after the edit before."""

TURNS = 4
"""Number of tool calls in an episode."""

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


def make_episodes(data: Path, per_task: int, seed: int = 0) -> list[PromptEntry]:
    """Make episodes of both tasks from a file of conversations; see `soothsay.corpus.read_entries`.

    An episode has the user's messages, which leave no doubt about the answers.

    Code, places and the tools' results (sentences) are taken from the answers in the file. The episodes are a
    function of the file and the seed.

    Raises `RequestError` if the file cannot be read, or has too little code or too few places.
    """
    snippets, places, sentences = dict[str, None](), dict[str, None](), dict[str, None]()
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
    edits = [_edits(rng, code) for code in chosen]
    return edits + [_calls(rng, list(places), list(sentences)) for _ in range(per_task)]


def write_questions(path: Path, questions: Iterable[PromptEntry]) -> None:
    """Write questions to a file that `read_prompts` reads."""
    with path.open("w", encoding="utf-8") as file:
        for number, question in enumerate(questions):
            raw = {"question_id": number, "category": question.task, "turns": question.turns}
            file.write(json.dumps(raw, ensure_ascii=False) + "\n")


def _cut(code: str) -> str:
    """Cut code to whole lines with at most `_LONGEST_CODE` characters."""
    while len(code) > _LONGEST_CODE:
        code = code[: code.rindex("\n")]
    return code.partition("\n```")[0].rstrip()


def _names(code: str) -> list[str]:
    """Return the names that occur more than once; renaming others would change one place only."""
    found = _NAME.findall(code)
    return sorted({name for name in found if found.count(name) > 1})


def _edits(rng: random.Random, code: str) -> PromptEntry:
    turns: list[str] = []
    for _ in range(RENAMES):
        old = rng.choice(_names(code))
        new = rng.choice(("new", "my", "current", "next")) + "_" + old
        shown = f"\n\n```\n{code}\n```" if not turns else ""
        code = re.sub(rf"\b{old}\b", new, code)
        turns.append(f"Repeat the code with {old} renamed to {new}, and nothing else.{shown}")
    return PromptEntry(user_message(turns[0]), EDITS, later=tuple(turns[1:]))


def _calls(rng: random.Random, places: Sequence[str], sentences: Sequence[str]) -> PromptEntry:
    tool = rng.choice(sorted(TOOLS))
    names = TOOLS[tool]
    arguments: dict[str, str | int] = {name: _value(rng, name, places) for name in names}
    turns: list[str] = []
    for turn in range(TURNS):
        changed = names[0] if turn == 0 else rng.choice(names)
        arguments = {**arguments, changed: _value(rng, changed, places)}
        if turn == 0:
            call = json.dumps({"tool": tool, "arguments": arguments}, ensure_ascii=False)
            said = f"Answer with a call of a tool, as JSON. For example:\n\n{call}\n\nCall it just so."
        else:
            result = json.dumps({"status": "ok", "text": rng.choice(sentences)}, ensure_ascii=False)
            said = f"Result: {result}\n\nCall it again, with {changed} = {json.dumps(arguments[changed])}."
        turns.append(said)
    return PromptEntry(user_message(turns[0]), CALLS, later=tuple(turns[1:]))


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


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    numbers = {**dict(enumerate((20, 0))), **dict(enumerate(map(int, sys.argv[3:])))}
    write_questions(Path(sys.argv[2]), make_episodes(Path(sys.argv[1]), *numbers.values()))
