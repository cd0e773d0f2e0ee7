"""Prompt files: what can be read, and what is said about what cannot."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from soothsay import LLM, RequestError, Tokenizer
from soothsay.bench.prompts import encode, read_prompts, spread
from soothsay.corpus import PromptEntry


def ask(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines to a file and gives its path; what is no text yet is made JSON."""

    def write(*lines: object, name: str = "prompts.jsonl") -> Path:
        file = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        file.write_text("\n".join(texts), encoding="utf-8")
        return file

    return write


SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hello."}


def test_json_lines_of_every_form(written: Callable[..., Path]) -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    lines = [
        {"messages": [SYSTEM, *ask("Hi")]},
        {"question_id": 81, "category": "writing", "turns": ["First.", "Second."], "reference": ["x"]},
        {"prompt": "Once\u2028upon", "task": "story", "id": "s1"},
        {"prompt": "ignored", "messages": [*ask("taken")]},
        {"messages": [*ask("Hi"), ANSWER, *ask("Go on."), ANSWER]},
        {"system": "Be brief.", "conversations": shared},
        {"prompt": "Hi", "completion": "Hello."},
        {"text": "def f(x):"},
        [*ask("Hi"), ANSWER],
    ]
    expected = [
        PromptEntry((SYSTEM, *ask("Hi")), "", "1"),
        PromptEntry(ask("First."), "writing", "81", later=("Second.",)),
        PromptEntry("Once\u2028upon", "story", "s1"),
        PromptEntry(ask("taken"), "", "4"),
        PromptEntry((*ask("Hi"), ANSWER, *ask("Go on.")), "", "5"),
        PromptEntry((SYSTEM, *ask("Hi")), "", "6"),
        PromptEntry(ask("Hi"), "", "7"),
        PromptEntry("def f(x):", "", "8"),
        PromptEntry(ask("Hi"), "", "9"),
    ]
    assert read_prompts(written(*lines[:1], "", *lines[1:])) == expected
    assert read_prompts(written(lines, name="prompts.json")) == expected
    assert read_prompts(written(*lines, name="prompts")) == expected
    packed = written().with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(written(*lines).read_bytes()))
    assert read_prompts(packed) == expected
    assert [one.number for one in expected] == [0] * 9  # numbers do not make entries different
    assert [one.number for one in read_prompts(packed)] == [*range(1, 10)]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.txt.gz", "prompts", "prompts.md"])
def test_text_has_a_message_a_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    text = b"\xef\xbb\xbfHello!\r\n\r\n  {not json\n"
    file.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_prompts(file) == [PromptEntry(ask("Hello!"), id="1"), PromptEntry(ask("  {not json"), id="2")]


def test_a_directory_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [*ask("Hi"), ANSWER]}, {"text": "Once"}]
    loaded = SimpleNamespace(load_from_disk=lambda path: {"train": rows} if path == str(tmp_path) else None)
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    assert [entry.prompt for entry in read_prompts(tmp_path)] == [ask("Hi"), "Once"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Hello!", r"not JSON: Expecting value at character 1"),
        ('{"prompt": "Hello!"', r"not JSON: Expecting ',' delimiter at character 20"),
        ([1], "a JSON object is expected, not '\\[1\\]'"),
        ({"question": "Hello!"}, "neither a 'text' nor 'messages'"),
        ({"messages": [ANSWER]}, "nobody asks anything: all messages are the assistant's"),
        ({"prompt": ""}, "prompt must be text, and not empty"),
        ({"prompt": None}, "prompt must be text, and not empty"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ({"turns": []}, "turns must be text, and not empty"),
        ({"turns": "Hello!"}, "turns must be text"),
        ({"turns": ["a", 3]}, "turns must be text"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["Hello!"]}, "neither a 'text' nor 'messages'"),
        ({"messages": [*ask("Hi"), {"role": "user"}]}, "a message has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 1 is an int"),
        ({"messages": [{"role": 1, "content": "Hi"}]}, "message 1 has no role"),
    ],
)
def test_a_bad_line_is_named(line: object, message: str, written: Callable[..., Path]) -> None:
    file = written({"prompt": "good"}, "", line)
    with pytest.raises(RequestError, match=f"prompts.jsonl, line 3: {message}"):
        read_prompts(file)


def test_a_file_without_prompts(written: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no prompts"):
        read_prompts(written("", "  "))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_prompts(binary)
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_spread_covers_the_file_and_its_categories() -> None:
    sizes = {"a": 10, "b": 80, "c": 10}
    grouped = [PromptEntry(f"{name}{i}", name) for name, size in sizes.items() for i in range(size)]
    mixed = sorted(grouped, key=lambda entry: int(entry.prompt[1:]))  # type: ignore[arg-type]
    for entries in (grouped, mixed):
        chosen = spread(entries, 10)
        assert Counter(entry.category for entry in chosen) == {"a": 1, "b": 8, "c": 1}
        assert chosen == sorted(chosen, key=entries.index)
    assert [entry.prompt for entry in spread(grouped, 4)] == ["b2", "b27", "b52", "b77"]
    in_turn = [PromptEntry(f"{i}", "ab"[i % 2]) for i in range(10)]
    assert Counter(entry.category for entry in spread(in_turn, 5)) == {"a": 2, "b": 3}
    assert spread(grouped, 100) == spread(grouped, 1000) == grouped
    assert [entry.prompt for entry in spread(grouped, 1)] == ["b40"]


def test_spread_takes_every_task_of_spec_bench(shared: Path) -> None:
    entries = read_prompts(shared / "data" / "spec_bench.jsonl")
    assert len(entries) == 480
    assert Counter(entry.category for entry in entries)["rag"] == 80
    assert {entry.category for entry in spread(entries, 48)} == {entry.category for entry in entries}
    assert {"translation", "summarization", "qa", "math_reasoning", "rag"} <= {
        entry.category for entry in spread(entries, 6)
    }


def test_encode_uses_the_template_where_there_is_one(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    assert encode(PromptEntry(ask("Hello!")), sibyl.tokenizer) == sibyl.chat_prompt(ask("Hello!"))
    assert encode(PromptEntry("Hello!"), sibyl.tokenizer) == sibyl.tokenizer.encode("Hello!")


def test_encode_without_a_template(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    untaught = Tokenizer(sibyl.tokenizer.backend)
    messages = ({"role": "system", "content": "Be brief."}, *ask("Hello!"))
    assert encode(PromptEntry(messages), untaught) == sibyl.tokenizer.encode("Be brief.\n\nHello!")


def test_encode_says_whose_prompt_it_was(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    strict = Tokenizer(sibyl.tokenizer.backend, "{{ raise_exception('no system role') }}")
    with pytest.raises(RequestError, match=r"prompt 81: the chat template refused.*no system role"):
        encode(PromptEntry(ask("Hello!"), id="81"), strict)
    with pytest.raises(RequestError, match="no tokenizer"):
        encode(PromptEntry("Hello!"), None)
