"""Prompts of benchmarks: texts of their own, files of prompts, and the questions of Spec-Bench."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from soothsay.corpus import as_entry, check_text, has_lines, parse_line, plain, read_items, read_lines
from soothsay.errors import RequestError

if TYPE_CHECKING:
    from soothsay.llm import LLM
    from soothsay.tokenizer import Message, Tokenizer

T = TypeVar("T")

BUNDLED = Path(__file__).parents[1] / "bundled"

DEMO = BUNDLED / "demo" / "prompts.jsonl"
"""The prompts of `soothsay demo`."""

SPEC_BENCH = BUNDLED / "spec-bench" / "questions.jsonl.gz"
"""The questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851)."""

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-bench, which Spec-Bench counts as one task."""


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """One prompt of a file."""

    prompt: str | tuple[Message, ...]  # text to continue, or a conversation for the chat template
    category: str = ""  # kind of task; empty: unknown
    id: str = ""  # the file's identifier of it, or its number
    later: tuple[str, ...] = ()  # further messages of the user, each after an answer to the one before
    number: int = field(default=0, compare=False)  # its place in the file, from 1

    @property
    def task(self) -> str:
        """Spec-Bench's task: the category, or "conversation" for MT-bench's categories."""
        return "conversation" if self.category in MT_BENCH else self.category or "prompts"

    @property
    def turns(self) -> tuple[str, ...]:
        """The prompt's last message, and the user's messages after it."""
        return (self.messages[-1]["content"], *self.later)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as a conversation: a text is the message of a user."""
        return user_message(self.prompt) if isinstance(self.prompt, str) else self.prompt


def user_message(text: str) -> tuple[Message, ...]:
    """The conversation in which a user says one thing."""
    return ({"role": "user", "content": text},)


def read_prompts(path: Path) -> list[PromptEntry]:
    """Read the prompts of a file, in order.

    - JSON lines, or a JSON array: objects with a conversation as `messages`, `conversations` (ShareGPT), or
      `prompt` and `completion`; with the user's messages as `turns`, as in Spec-Bench (Xia et al. 2024, arXiv
      2401.07851); or with a text to continue as `prompt` or `text`. `category` (or `task`) and `question_id`
      (or `id`) are kept.
    - A directory that `datasets` has saved: its rows have the same keys.
    - Any other file: each line that is not blank is a user's message.

    A conversation ends before the assistant's last answer. A name that ends in `.gz` says that the file is
    compressed. This reads what training reads, see `soothsay.corpus.read_entries`.

    Raises `RequestError` if the file cannot be read or has no prompts, or for an entry that cannot be used,
    which is named.
    """
    entries = list[PromptEntry]()
    for number, (where, item) in enumerate(_items(path), 1):
        try:
            entries.append(_entry(item, number))
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from None
    if not entries:
        raise RequestError(f"{path} has no prompts")
    return entries


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """The entries of a file, each with its place. A name that says nothing leaves it to the first line."""
    first = b"" if path.is_dir() else next((line for _, line in read_lines(path)), b"")
    plain_text = path.name.removesuffix(".gz").endswith(".txt")
    if has_lines(path) or (first.lstrip()[:1] in (b"{", b"[") and not plain_text):
        yield from read_items(path)
        return
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        try:
            yield where, {"turns": [line.decode("utf-8-sig").rstrip("\r\n")]}
        except UnicodeDecodeError as error:
            raise RequestError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None


def _entry(item: object, number: int) -> PromptEntry:
    """Raises `ValueError`."""
    raw = parse_line(item) if isinstance(item, bytes) else item
    fields: Mapping[str, Any] = raw if isinstance(raw, Mapping) else {}
    later: list[str] = []
    prompt: str | tuple[Message, ...]
    if "turns" in fields:
        first, *later = _texts(fields["turns"], "turns")
        prompt = user_message(first)
    elif "prompt" in fields and not {"messages", "conversations", "completion"} & fields.keys():
        (prompt,) = _texts([fields["prompt"]], "prompt")
    else:
        entry = as_entry(raw)
        prompt = entry if isinstance(entry, str) else _without_answer(entry)
    category = fields.get("category", fields.get("task", ""))
    own_id = fields.get("question_id", fields.get("id", number))
    return PromptEntry(prompt, str(category), str(own_id), tuple(later), number)


def _without_answer(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages up to the last one that is not the assistant's. Raises `ValueError` if there is none."""
    kept = [place for place, message in enumerate(messages, 1) if message["role"] != "assistant"]
    if not kept:
        raise ValueError("nobody asks anything: all messages are the assistant's")
    return tuple(messages[: kept[-1]])


def by_task(entries: Sequence[PromptEntry], limit: int | None = None) -> dict[str, list[PromptEntry]]:
    """At most `limit` entries of each task, evenly spread over the file.

    They are shuffled, so that a run that ends early has some of every kind. The order is always the same.
    """
    tasks: dict[str, list[PromptEntry]] = {}
    for entry in entries:
        tasks.setdefault(entry.task, []).append(entry)
    chosen = {task: spread(own, limit or len(own)) for task, own in tasks.items()}
    for own in chosen.values():
        random.Random(0).shuffle(own)
    return chosen


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, and so on."""
    return [one for several in zip_longest(*groups) for one in several if one is not None]


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
