"""Prompts of benchmarks: texts of their own, files of prompts, and the questions of Spec-Bench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from soothsay.corpus import as_entry, check_text, parse_line, plain, read_lines
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
    turns: tuple[str, ...] = field(default=(), compare=False)  # the user's messages, if the file has `turns`
    line: int = field(default=0, compare=False)

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

    `category` (or `task`) and `question_id` (or `id`) are kept where they are given. A name that ends in
    `.gz` says that the file is compressed.

    Raises `RequestError` if the file cannot be read or has no prompts, or for a line that cannot be read,
    which is named.
    """
    read, entries = _text_entry if path.suffix == ".txt" else _json_entry, list[PromptEntry]()
    for number, line in read_lines(path):
        try:
            entries.append(read(line, number))
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise RequestError(f"{path} has no prompts")
    return entries


def _text_entry(line: bytes, number: int) -> PromptEntry:
    return PromptEntry(line.decode("utf-8-sig").rstrip("\r\n"), id=str(number), line=number)


def _json_entry(line: bytes, number: int) -> PromptEntry:
    """Raises `ValueError`."""
    raw = parse_line(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    turns: list[str] = []
    prompt: str | tuple[Message, ...]
    if "messages" in raw:
        prompt = tuple(as_entry({"messages": raw["messages"]}))  # type: ignore[arg-type]
    elif "turns" in raw:
        turns = _texts(raw["turns"], "turns")
        prompt = ({"role": "user", "content": turns[0]},)
    elif "prompt" in raw:
        (prompt,) = _texts([raw["prompt"]], "prompt")
    else:
        raise ValueError("none of messages, turns and prompt is there")
    category, own_id = raw.get("category", raw.get("task", "")), raw.get("question_id", raw.get("id", number))
    return PromptEntry(prompt, str(category), str(own_id), tuple(turns), number)


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
        return tokenizer.encode(plain([*entry.prompt]))
    try:
        return tokenizer.encode_chat(entry.prompt)
    except RequestError as error:
        raise RequestError(f"prompt {entry.id}: {error}") from error


def _texts(given: object, name: str) -> list[str]:
    """A list of at least one text, none of which is empty. Raises `ValueError` for anything else."""
    texts = given if isinstance(given, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} must be text, and not empty")
    check_text("".join(texts))
    return texts


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
    tasks: dict[str, list[PromptEntry]] = {}
    for entry in read_prompts(path):
        if not entry.turns or not entry.category:
            what = "no question of Spec-Bench, with 'category' and 'turns'"
            raise RequestError(f"{path}, line {entry.line}: {what}")
        tasks.setdefault(entry.task, []).append(entry)
    return [
        Question(task, entry.turns, entry.line)
        for task, entries in tasks.items()
        for entry in spread(entries, per_task or len(entries))
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
