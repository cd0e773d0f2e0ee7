"""Reads conversations, texts and prompts from files: JSON lines, plain text, directories of `datasets`."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from soothsay.chat_layout import conversation
from soothsay.errors import RequestError
from soothsay.tokenizer import Message, Tokenizer

Entry = str | list[Message]
"""A text, or a conversation: messages as chat templates read them."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Other names of roles in files, such as those in ShareGPT's format, and ours."""

EXPECTED = "neither a 'text' nor 'messages', 'conversations', or 'prompt' and 'completion'"

MOST_BAD = 0.01
"""Largest share of unusable entries. With more, something is wrong with the file, not with single lines."""

STRETCH = 2**16
"""Smallest number of characters of a text that are tokenized in one call. The call ends at a line's end, if
one comes soon."""

NAMED = 5
"""Number of unusable entries that are listed. The others are only counted."""


@dataclass(slots=True)
class Tally:
    """Counts the entries of a file, and those that cannot be used."""

    read: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # the place and the reason of the first unusable entries

    def refuse(self, where: str, reason: object) -> None:
        """Count an entry as unusable. `where` is its place, such as "chat.jsonl, line 3"."""
        self.bad += 1
        if len(self.named) < NAMED:
            self.named.append(f"{where}: {reason}")

    def check(self) -> None:
        """Raise `RequestError`, with examples, if too many entries are unusable."""
        if self.bad > MOST_BAD * self.read:
            shown = "; ".join(self.named)
            more = f"; and {self.bad - len(self.named)} more" if self.bad > len(self.named) else ""
            raise RequestError(
                f"{self.bad} of {self.read} entries cannot be used, more than {MOST_BAD:.0%}: {shown}{more}"
            )


def read_entries(path: Path, tally: Tally) -> Iterator[tuple[str, Entry]]:
    """Yield the entries of a file or a directory, each with its place, such as "chat.jsonl, line 3".

    - `.jsonl` or `.json`: an entry in each line, or an array of entries; see `as_entry`.
    - A directory that `datasets` has saved to disk: its rows have the same keys. If it has several splits,
      "train" is read.
    - Any other file is one text.

    A name that ends in `.gz` says that the file is compressed. Entries that cannot be used are counted in
    `tally` and left out.

    Raises `RequestError` if the file or the directory cannot be read.
    """
    if not has_lines(path):
        tally.read += 1
        yield str(path), read_text(path)
        return
    for where, item in read_items(path):
        tally.read += 1
        try:
            entry = as_entry(item)
        except ValueError as error:
            tally.refuse(where, error)
        else:
            yield where, entry


def has_lines(path: Path) -> bool:
    """Whether this is a directory, or a file whose name says that it holds JSON lines: see `read_items`."""
    return path.is_dir() or path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1.

    Only line feeds end a line: JSON strings may contain other line separators.

    Raises `RequestError` if the file cannot be read.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(f"{file} cannot be read as text ({error})") from None


def read_text(file: Path) -> str:
    """Read a whole file. Raises `RequestError` if it cannot be read, or is not UTF-8."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            return content.read().decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read as text ({error})") from None


def read_items(file: Path) -> Iterator[tuple[str, object]]:
    """Yield the lines of a file, or the items of the array that it is, each with its place.

    Of a directory that `datasets` has saved, yield the rows.

    Raises `RequestError` if it cannot be read, or is an array that is not valid JSON.
    """
    if file.is_dir():
        yield from _rows(file)
        return
    lines = read_lines(file)
    first = next(lines, None)
    if first is None:
        return
    if not _begins_value(file, first[1]):
        yield from ((f"{file}, line {number}", line) for number, line in chain([first], lines))
        return
    try:
        value = _loads(read_text(file))
    except ValueError as error:
        raise RequestError(f"{file} is one JSON value, and {error}") from None
    entries = value if _is_array(value) else [value]
    yield from ((f"{file}, item {number}", item) for number, item in enumerate(entries, 1))


def _begins_value(file: Path, line: bytes) -> bool:
    """Whether a file with this first line is one JSON value, and does not have one in each line."""
    try:
        return _is_array(json.loads(line))
    except (ValueError, RecursionError):
        return line.lstrip()[:1] == b"[" or ".json" in file.suffixes


def _is_array(value: object) -> bool:
    """Whether a value is an array of entries. An array of messages is an entry itself."""
    return isinstance(value, list) and all(
        isinstance(one, list) or (isinstance(one, Mapping) and not {"role", "from"} & one.keys())
        for one in value
    )


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deep") from None


def parse_line(line: bytes) -> Any:
    """The JSON value of a line. Raises `ValueError` if it has none."""
    try:
        return _loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None


def as_entry(item: object) -> Entry:
    """Return the text or the conversation of a line, or of a JSON value.

    An object has a `text`; or `messages` or `conversations` (ShareGPT's `from` and `value`, too), with an
    optional `system`; or `prompt` and `completion`, each a text or messages. An array is messages.

    Raises `ValueError` if the item is nothing of that.
    """
    if isinstance(item, bytes):
        item = parse_line(item)
    if isinstance(item, Mapping) and isinstance(text := item.get("text"), str):
        check_text(text)
        return text
    given = _messages(item) if isinstance(item, Mapping) else item
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        if isinstance(item, Mapping):
            raise ValueError(EXPECTED)
        raise ValueError(f"a JSON object is expected, not {json.dumps(item, default=str)[:40]!r}")
    if not given:
        raise ValueError("'messages' is empty")
    try:
        messages = conversation([_message(one) for one in given])
    except TypeError as error:
        raise ValueError(str(error)) from None
    check_text(json.dumps(messages, ensure_ascii=False, default=str))
    return messages


def _messages(raw: Mapping[str, Any]) -> object:
    """The messages of an object, as they are given. None: it has none."""
    given = raw.get("conversations") if raw.get("messages") is None else raw["messages"]
    if given is None and None not in (raw.get("prompt"), raw.get("completion")):
        parts = (raw["prompt"], "user"), (raw["completion"], "assistant")
        messages = [
            part if isinstance(part, list) else [{"role": role, "content": part}] for part, role in parts
        ]
        given = [*chain(*messages)]
    system = raw.get("system")
    if isinstance(given, list) and isinstance(system, str) and system:
        return [{"role": "system", "content": system}, *given]
    return given


def _message(raw: Mapping[str, Any]) -> Message:
    """A message with our names of roles and fields, without fields that are null.

    Raises `ValueError` if it says nothing.
    """
    role, content = raw.get("role", raw.get("from")), raw.get("content", raw.get("value"))
    if not {"content", "value", "tool_calls"} & raw.keys():
        raise ValueError(f"a message has no content: {EXPECTED} can be read")
    others = {
        name: value for name, value in raw.items() if value is not None and name not in ("from", "value")
    }
    said = {"role": ROLES.get(role, role) if isinstance(role, str) else role}
    return {**others, **said, "content": "" if content is None else content}


def plain(messages: Iterable[Message]) -> str:
    """Lay a conversation out for a model without a chat template: blank lines between messages."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def encode_text(text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Token ids of a long text, which is tokenized as far as they are read.

    To tokenize a whole text at once takes up to 250 times its size in memory.
    """
    begin = 0
    while begin < len(text):
        limit = begin + 2 * STRETCH
        end = text.find("\n", begin + STRETCH, limit) + 1 or limit
        yield from tokenizer.encode(text[begin:end], special=begin == 0)
        begin = end


def encode_entry(
    entry: str | Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a text, or of a conversation in the model's chat template, or as `plain` lays it out.

    Raises `RequestError` if the template refuses the conversation.
    """
    if isinstance(entry, str):
        return tokenizer.encode(entry)
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(entry, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(plain(entry))


def check_text(text: str) -> None:
    """Raise `ValueError` if `text` cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair
        raise ValueError("half of a surrogate pair, which is no text") from None


def _rows(directory: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise RequestError(
            f"{directory} is a directory: reading a data set from it needs the package 'datasets' "
            "(pip install datasets); or give files of JSON lines"
        ) from None
    try:
        data = datasets.load_from_disk(str(directory))
    except (OSError, ValueError) as error:
        raise RequestError(f"{directory} cannot be read as a data set ({error})") from None
    if isinstance(data, Mapping):  # several splits by name
        if "train" not in data:
            splits = ", ".join(map(str, data))
            raise RequestError(f"{directory} has no split 'train'; name one of its own directories: {splits}")
        data = data["train"]
    for number, row in enumerate(data):
        yield f"{directory}, row {number}", row


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


def prompt_items(path: Path) -> Iterator[tuple[str, object]]:
    """Yield what may be a prompt in a file, each with its place.

    - JSON lines, a JSON array, or a directory that `datasets` has saved: see `read_items`. If the name does
      not say it, the first line does.
    - Any other file: each line that is not blank is a user's message.

    Raises `RequestError` if the file cannot be read.
    """
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


def as_prompt(item: object, number: int) -> PromptEntry:
    """Return the prompt of a line, or of a JSON value; `number` is its place in the file, from 1.

    An object has a conversation, see `as_entry`, which ends before the assistant's last answer; or the user's
    messages as `turns`, as in Spec-Bench (Xia et al. 2024, arXiv 2401.07851); or a text to continue as
    `prompt` or `text`. `category` (or `task`) and `question_id` (or `id`) are kept.

    Raises `ValueError` if the item is nothing of that.
    """
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


def _texts(given: object, name: str) -> list[str]:
    """A list of at least one text, none of which is empty. Raises `ValueError` for anything else."""
    texts = given if isinstance(given, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name} must be text, and not empty")
    check_text("".join(texts))
    return texts
