"""Prompts of benchmarks: texts of their own, files of prompts, and the questions of Spec-Bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soothsay.corpus import read_lines
from soothsay.errors import RequestError

if TYPE_CHECKING:
    from soothsay.llm import LLM
    from soothsay.tokenizer import Message, Tokenizer


SPEC_BENCH = Path(__file__).parents[1] / "bundled" / "spec-bench" / "questions.jsonl.gz"
"""The questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851)."""

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench, which Spec-Bench counts as one task."""


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """One prompt of a file."""

    prompt: str | tuple[Message, ...]  # text as it stands, or a conversation for the chat template
    category: str = ""  # kind of task; empty: unknown
    id: str = ""  # the file's identifier of it, or its line

    @property
    def task(self) -> str:
        """Spec-Bench's task: the category, or "conversation" for MT-bench's categories."""
        return "conversation" if self.category in MT_BENCH else self.category


def read_prompts(path: Path) -> list[PromptEntry]:
    """Read the prompts of a file, in order. Blank lines are skipped.

    A `.txt` file has one prompt in each line. Any other file has one JSON object in each line, of which the
    first of these fields is read:

    - `messages`: a conversation, `[{"role": ..., "content": ...}, ...]`;
    - `turns`: the user's messages, as in Spec-Bench (Xia et al. 2024, arXiv 2401.07851); the first one is
      the prompt;
    - `prompt`: text.

    `category` (or `task`) and `question_id` (or `id`) are kept where they are given.

    Raises:
        RequestError: the file is not UTF-8, has no prompts, or a line cannot be read; the line is named.
        OSError: there is no such file.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text ({error})") from None
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold other ends of lines as they are
        if not line.strip():
            continue
        if path.suffix == ".txt":
            entries.append(PromptEntry(line.removesuffix("\r"), id=str(number)))
            continue
        try:
            entries.append(_from_json(line, number))
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise RequestError(f"{path} has no prompts")
    return entries


def spread(entries: Sequence[PromptEntry], limit: int) -> list[PromptEntry]:
    """Return at most `limit` entries in their order, evenly spread over each category.

    Every category with at least one entry in `limit` is represented.
    """
    if limit >= len(entries):
        return list(entries)
    seen = {entry.category: None for entry in entries}
    rank = {category: i for i, category in enumerate(seen)}
    order = sorted(range(len(entries)), key=lambda i: rank[entries[i].category])
    middles = [(2 * i + 1) * len(order) // (2 * limit) for i in range(limit)]
    return [entries[index] for index in sorted(order[middle] for middle in middles)]


def encode(entry: PromptEntry, llm: LLM) -> list[int]:
    """`encode_with` the model's tokenizer. Raises `RequestError` if it has none."""
    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, and the prompts are text")
    return encode_with(llm.tokenizer, entry)


def encode_with(tokenizer: Tokenizer, entry: PromptEntry) -> list[int]:
    """Return the token ids of an entry: a conversation in the model's chat template, or text as it is.

    Without a chat template, a conversation is the text of its messages with blank lines between them.

    Raises `RequestError` if the template refuses the conversation.
    """
    if isinstance(entry.prompt, str):
        return tokenizer.encode(entry.prompt)
    if not tokenizer.has_chat_template:
        return tokenizer.encode("\n\n".join(message["content"] for message in entry.prompt))
    try:
        return tokenizer.encode_chat(entry.prompt)
    except RequestError as error:
        raise RequestError(f"prompt {entry.id}: {error}") from error


def _from_json(line: str, number: int) -> PromptEntry:
    """Raises `ValueError`."""
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg}, column {error.colno}); a file with a prompt a line is named .txt"
        ) from None
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    category, own_id = raw.get("category", raw.get("task", "")), raw.get("question_id", raw.get("id", number))
    return PromptEntry(_prompt(raw), category=str(category), id=str(own_id))


def _prompt(raw: dict[str, Any]) -> str | tuple[Message, ...]:
    if "messages" in raw:
        messages = raw["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list, with at least one message")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"messages[{i}] must be an object with role and content")
            _check_text(message["role"], f"messages[{i}].role")
            _check_text(message["content"], f"messages[{i}].content")
        return tuple(messages)
    if "turns" in raw:
        turns = raw["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list, with at least one text")
        return ({"role": "user", "content": _check_text(turns[0], "turns[0]")},)
    if "prompt" in raw:
        return _check_text(raw["prompt"], "prompt")
    raise ValueError("none of messages, turns and prompt is there")


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be text, and not empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a character
        raise ValueError(f"{name} has half of a surrogate pair, which is no text") from None
    return value


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


QUESTION = "Tell me a story about a river, a bridge and a town."
PASSAGE = (
    "The river Alder rises in the hills north of Marden and flows for forty miles through farmland before "
    "it meets the sea at Kelby. In spring the river floods the low meadows, and farmers move their cattle "
    "to higher ground. The bridge at Marden was built in 1887 by the county to replace a wooden bridge "
    "that had been washed away twice. Today the bridge carries more traffic than the county ever planned "
    "for, and the council wants to build a second bridge two miles downstream. Farmers say that a second "
    "bridge would cut through the low meadows, and that the river would flood the road in spring."
)
TOPICS = (
    "cats dogs fish birds cows pigs rats bats trees rain snow wind fire iron gold salt sand wool silk "
    "corn rice milk bread soup tea cups maps ships roads bells clocks stars"
)
"""32 words."""
