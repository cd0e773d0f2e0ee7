"""Training examples: which tokens are answers under each template, what is cut, and what is left out."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from soothsay import LLM, RequestError, Tokenizer
from soothsay.corpus import STRETCH
from soothsay.errors import TrainingError
from soothsay.train.examples import Example, Skipped, batches, read_examples, split

Messages = list[dict[str, str]]

PILOT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TRIMMING = (  # ends turns with a line feed, as ChatML does
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SPACED = (  # the answer has no header; the space before it is not in the prompt
    "{% for m in messages %}{% if m['role'] == 'user' %}[ {{ m['content'] }} ]"
    "{% else %} {{ m['content'] }} <|end|>{% endif %}{% endfor %}"
)
FORGETFUL = (  # writes thoughts in the last answer only; the prompt ends with the mark that begins them
    "{% for m in messages %}<s>{{ m['role'] }}:"
    "{% if m['role'] == 'assistant' and loop.last %}<think>hm</think>{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:<think>ah{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<s>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def letters(
    template: str | None = None, *, first: str = "", merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """A tokenizer of bytes, merged pairs and special tokens; `first` begins every text."""
    names = ["<|end|>", "<s>", "<|user|>", "<|assistant|>", "<think>", "</think>", "<first>"]
    vocabulary = {name: i for i, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    vocabulary |= {left + right: len(vocabulary) + i for i, (left, right) in enumerate(merges)}
    backend = Backend(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, vocabulary[first])]
        )
    return Tokenizer(backend, template)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes JSON lines. An entry that is a string is written as it is."""

    def write(*lines: object, name: str = "chat.jsonl") -> Path:
        file = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return file

    return write


def talk(*said: str) -> dict[str, Messages]:
    """A conversation in which user and assistant alternate."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


def shown(example: Example, tokenizer: Tokenizer) -> str:
    """The example's text, with the tokens to learn in braces."""
    text = ""
    for said, run in groupby(
        zip(example.tokens.tolist(), example.answer.tolist(), strict=True), lambda x: x[1]
    ):
        part = tokenizer.decode([token for token, _ in run], skip_special=False)
        text += f"{{{part}}}" if said else part
    return text


def read(file: Path, tokenizer: Tokenizer, max_tokens: int = 1000) -> tuple[list[str], Skipped]:
    examples, skipped = read_examples([file], tokenizer, max_tokens)
    assert all(e.tokens.dtype == np.int64 and e.answer.dtype == np.bool_ for e in examples)
    return [shown(example, tokenizer) for example in examples], skipped


# layouts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PILOT, ["<|user|>Hi<|end|><|assistant|>{Yo  <|end|>}<|user|>A\nb<|end|><|assistant|>{B<|end|>}"]),
        (
            TRIMMING,
            [
                "<s>user\nHi<|end|>\n<s>assistant\n{Yo<|end|>}\n"
                "<s>user\nA\nb<|end|>\n<s>assistant\n{B<|end|>}\n"
            ],
        ),
        (SPACED, ["[ Hi ]{ Yo   <|end|>}[ A\nb ]{ B <|end|>}"]),
        (
            FORGETFUL,
            [
                "<s>user:Hi<|end|><s>assistant:<think>{hm</think>Yo  <|end|>}",
                "<s>user:Hi<|end|><s>assistant:Yo  <|end|><s>user:A\nb<|end|>"
                "<s>assistant:<think>{hm</think>B<|end|>}",
            ],
        ),
    ],
    ids=["sibyl", "trimming", "spaced", "forgetful"],
)  # fmt: skip
def test_answers_are_found_under_any_template(
    template: str, expected: list[str], written: Callable[..., Path]
) -> None:
    file = written(talk("Hi", "Yo  ", "A\nb", "B", "and nobody answers this"))
    assert read(file, letters(template))[0] == expected


def test_prompts_are_what_the_engine_is_given(sibyl: LLM, written: Callable[..., Path]) -> None:
    assert sibyl.tokenizer is not None
    messages = talk("Was ist das?", "Ein Fluß. 🙂", "And now?", "Nothing\n\nmore.")["messages"]
    (example,), _ = read_examples([written({"messages": messages})], sibyl.tokenizer, 1000)
    begins = np.flatnonzero(np.diff(example.answer.astype(int)) == 1) + 1
    assert [example.tokens[:begin].tolist() for begin in begins] == [
        sibyl.chat_prompt(messages[:1]),
        sibyl.chat_prompt(messages[:3]),
    ]
    said = [sibyl.tokenizer.encode(f"{messages[i]['content']}<|end|>") for i in (1, 3)]
    assert example.tokens[example.answer].tolist() == said[0] + said[1]


def test_a_token_across_the_border_is_not_said(written: Callable[..., Path]) -> None:
    tokenizer = letters(TRIMMING.replace(" | trim", ""), merges=[("Ċ", "Ċ")])
    (text,), _ = read(written(talk("Hi", "\nYo")), tokenizer)
    assert text == "<s>user\nHi<|end|>\n<s>assistant\n\n{Yo<|end|>}\n"


def test_the_first_to_speak_answers_nobody(written: Callable[..., Path]) -> None:
    says = [{"role": "assistant", "content": "Hello?"}, *talk("Hi", "Yo")["messages"]]
    (text,), _ = read(written({"messages": says}), letters(PILOT))
    assert text == "<|assistant|>Hello?<|end|><|user|>Hi<|end|><|assistant|>{Yo<|end|>}"


def test_texts_and_models_without_a_template(written: Callable[..., Path]) -> None:
    file = written({"text": "ab\u2028c"}, talk("Hi", "Yo"), {"text": ""}, {"text": "x"})
    texts, skipped = read(file, letters(first="<first>"))
    assert texts == ["{<first>ab\u2028c}", "{<first>Hi\n\nYo}", "{<first>x}"]
    assert skipped.silent == 1
    texts, skipped = read(file, letters(PILOT))
    assert texts == ["{ab\u2028c}", "<|user|>Hi<|end|><|assistant|>{Yo<|end|>}"]
    assert skipped.silent == 2  # a single token teaches nothing


# lengths


def test_whole_turns_are_kept(written: Callable[..., Path]) -> None:
    file = written(talk("a", "bcd", "e", "fgh"))  # turns of 3 + 1 and 3 + 1 tokens, marks counted
    whole = "<|user|>a<|end|><|assistant|>{bcd<|end|>}"
    both = whole + "<|user|>e<|end|><|assistant|>{fgh<|end|>}"
    for size, text, shortened in ((16, both, 0), (15, whole, 1), (8, whole, 1)):
        texts, skipped = read(file, letters(PILOT), size)
        assert (texts, skipped.shortened, skipped.long) == ([text], shortened, 0)
    texts, skipped = read(file, letters(PILOT), 6)
    assert (texts, skipped.shortened) == (["<|user|>a<|end|><|assistant|>{bc}"], 1)
    longer = written(talk("a", "bcd", "e", "fgh", "i", "j"), name="longer.jsonl")
    for size, text in ((16, both), (15, whole)):
        assert read(longer, letters(PILOT), size)[0] == [text]


def test_what_has_no_answer_left_is_left_out(written: Callable[..., Path]) -> None:
    file = written(talk("a", "b"), talk("much too long", "b"), talk("who?"))
    texts, skipped = read(file, letters(PILOT), 10)
    assert texts == ["<|user|>a<|end|><|assistant|>{b<|end|>}"]
    assert (skipped.long, skipped.silent, skipped.shortened) == (1, 1, 0)
    assert str(skipped).splitlines() == [
        "1 of 3 without an answer, left out",
        "1 of 3 too long before the first answer, left out",
    ]
    with pytest.raises(TrainingError, match=r"nothing to train on in .*chat.jsonl: 1 of 3 without an answer"):
        read(file, letters(PILOT), 4)


@pytest.mark.parametrize("end", ["\r\n", ", "])
def test_plain_text_is_cut_into_pieces(tmp_path: Path, end: str) -> None:
    file = tmp_path / "book.txt.gz"
    text = "".join(f"line {i} of the river{end}" for i in range(5 * STRETCH // 20))
    file.write_bytes(gzip.compress(text.encode()))
    tokenizer = letters(first="<first>")
    examples, skipped = read_examples([file], tokenizer, 500)
    assert {len(example.tokens) for example in examples[:-1]} == {500}
    assert 1 < len(examples[-1].tokens) <= 500
    assert all(example.answer.all() for example in examples)
    tokens = np.concatenate([example.tokens for example in examples]).tolist()
    assert tokenizer.decode(tokens, skip_special=False) == "<first>" + text
    assert skipped == Skipped(skipped.entries)
    assert (skipped.entries.read, skipped.entries.bad) == (1, 0)


# forms of entries

SYSTEM = {"role": "system", "content": "Obey."}


@pytest.mark.parametrize(
    "entry",
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": ["b"]},
            ]
        },
        {"messages": [*({**m, "name": None, "tool_calls": None} for m in talk("a", "b")["messages"])]},
        {"messages": None, "text": None, "conversations": talk("a", "b")["messages"]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"id": 3, "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
        talk("a", "b")["messages"],
        {"prompt": "a", "completion": "b"},
        {"prompt": talk("a")["messages"], "completion": [{"role": "assistant", "content": "b"}]},
        {"prompt": 7, "messages": talk("a", "b")["messages"]},
    ],
    ids=str,
)
def test_entries_of_all_kinds_are_conversations(entry: Any, written: Callable[..., Path]) -> None:
    meant, _ = read(written(talk("a", "b")), letters(PILOT))
    for name in ("chat.jsonl", "chat.json"):
        texts, skipped = read(written(talk("c", "d"), entry, name=name), letters(PILOT))
        assert (texts[1:], skipped.entries.bad) == (meant, 0)
    texts, _ = read(written(json.dumps([talk("c", "d"), entry], indent=1), name="chat.json"), letters(PILOT))
    assert texts[1:] == meant


def test_a_system_message_may_stand_beside_the_others(written: Callable[..., Path]) -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    meant = read(written({"messages": [SYSTEM, *talk("a", "b")["messages"]]}), letters(PILOT))[0]
    for entry in (
        {"system": "Obey.", "conversations": turns},
        {"conversations": [{"from": "system", "value": "Obey."}, *turns]},
        {"messages": [{**SYSTEM, "role": "developer"}, *talk("a", "b")["messages"]]},
    ):
        assert read(written(entry), letters(PILOT))[0] == meant


def test_calls_are_laid_out_as_the_server_does(written: Callable[..., Path]) -> None:
    template = (
        "{% for m in messages %}<s>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.n + 1 }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 41}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "ok"}
    messages = [*talk("a")["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    (text,), skipped = read(
        written({"messages": [*messages, {"role": "assistant", "content": "b"}]}), letters(template)
    )
    assert text == "<s>a<|end|><s>{42<|end|>}<s>ok<|end|><s>{b<|end|>}"
    assert skipped.entries.bad == 0


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["chat.json", "chat.jsonl", "chat.json.gz"])
def test_an_array_holds_entries(name: str, indent: int | None, tmp_path: Path) -> None:
    file = tmp_path / name
    entries = [
        talk("a", "b"),
        talk("c", "d")["messages"],
        {"prompt": "e", "completion": "f"},
        {"text": "xyz"},
    ]
    content = json.dumps(entries, indent=indent).encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    texts, skipped = read(file, letters(PILOT))
    assert sorted(texts)[:3] == [
        f"<|user|>{q}<|end|><|assistant|>{{{a}<|end|>}}" for q, a in ("ab", "cd", "ef")
    ]
    assert (len(texts), skipped.entries.read) == (4, 4)
    file.write_bytes(gzip.compress(content[:-9]) if name.endswith(".gz") else content[:-9])
    with pytest.raises(RequestError, match=f"{name} is one JSON value, and not JSON"):
        read(file, letters(PILOT))


def test_a_file_may_be_one_object_over_several_lines(written: Callable[..., Path]) -> None:
    texts, _ = read(written(json.dumps(talk("a", "b"), indent=2), name="chat.json"), letters(PILOT))
    assert texts == ["<|user|>a<|end|><|assistant|>{b<|end|>}"]
    with pytest.raises(RequestError, match="item 1: neither a 'text' nor 'messages'"):
        read(written(json.dumps({"rows": []}, indent=2), name="chat.json"), letters(PILOT))


# files


def test_packed_files_and_several(written: Callable[..., Path], tmp_path: Path) -> None:
    file = written(talk("Hi", "Yo"), "", talk("A", "B"))
    packed = tmp_path / "more.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    examples, skipped = read_examples([packed, file], letters(PILOT), 100)
    assert [len(e.tokens) for e in examples] == [8, 6, 8, 6]
    assert skipped.entries.read == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON: Expecting property name"),
        ("[1, 2]", r"a JSON object is expected, not '\[1, 2\]'"),
        ({"prompt": "x"}, "neither a 'text' nor 'messages'"),
        ({"prompt": "x", "completion": 5}, "the content of message 2 is an int"),
        ({"messages": [{"role": "user"}]}, "a message has no content: neither a 'text' nor 'messages'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url parts are not"),
        ({"conversations": [{"value": "x"}]}, "message 1 has no role"),
        ({"conversations": {"from": "human", "value": "x"}}, "neither a 'text' nor 'messages'"),
        ({"messages": []}, "'messages' is empty"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ({"messages": [{"role": "system", "content": "Obey."}, *talk("a", "b")["messages"]]}, "no system"),
    ],
)
def test_few_bad_lines_are_named_and_many_are_an_error(
    line: object, reason: str, written: Callable[..., Path]
) -> None:
    good = [talk("a", "b")] * 99
    texts, skipped = read(written(*good[:50], line, *good[50:]), letters(STRICT))
    assert len(texts) == 99
    assert (skipped.entries.bad, skipped.entries.read) == (1, 100)
    assert str(skipped).startswith("1 of 100 malformed, left out\n")
    (name,) = skipped.entries.named
    with pytest.raises(RequestError, match=r"^1 of 99 entries cannot be used, more than 1%: ") as caught:
        read(written(*good[:50], line, *good[50:98]), letters(STRICT))
    assert str(caught.value).endswith(name)
    with pytest.raises(RequestError, match=f"chat.jsonl, line 1: .*{reason}"):
        read(written(line), letters(STRICT))


def test_only_the_first_bad_lines_are_named(written: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match=r"line 5: .*; and 4 more$") as caught:
        read(written(*["{"] * 9), letters(PILOT))
    assert "line 6" not in str(caught.value)


def test_files_that_are_refused(tmp_path: Path) -> None:
    for name, content in (
        ("binary.txt", b"\xff\xfe\x00"),
        ("plain.jsonl.gz", b"not packed"),
        ("short.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9]),
        ("torn.jsonl.gz", gzip.compress(bytes(range(256)) * 9)[:20] + b"\x00" * 40),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=rf"{name} cannot be read as text"):
            read_examples([tmp_path / name], letters(PILOT), 100)
    with pytest.raises(RequestError, match=r"nowhere.jsonl cannot be read"):
        read_examples([tmp_path / "nowhere.jsonl"], letters(PILOT), 100)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TrainingError, match=r"nothing to train on in .*empty.jsonl: there are no entries"):
        read_examples([tmp_path / "empty.jsonl"], letters(PILOT), 100)
    (tmp_path / "latin.jsonl").write_bytes('{"text": "ü"}'.encode("latin-1"))
    with pytest.raises(RequestError, match=r"latin.jsonl, line 1: not UTF-8: .* at byte 11"):
        read_examples([tmp_path / "latin.jsonl"], letters(PILOT), 100)


def test_a_data_set_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    with pytest.raises(RequestError, match="needs the package 'datasets'"):
        read_examples([tmp_path], letters(PILOT), 100)

    rows = [talk("a", "b"), {"text": "abc", "messages": None}]
    on_disk: dict[Path, Any] = {tmp_path: rows}
    package = ModuleType("datasets")
    package.load_from_disk = lambda path: on_disk[Path(path)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    expected = {"<|user|>a<|end|><|assistant|>{b<|end|>}", "{abc}"}
    assert {*read(tmp_path, letters(PILOT))[0]} == expected
    on_disk[tmp_path] = {"train": rows, "test": []}
    assert {*read(tmp_path, letters(PILOT))[0]} == expected
    on_disk[tmp_path] = {"dev": rows, "test": rows}
    with pytest.raises(RequestError, match="no split 'train'; name one of its own directories: dev, test"):
        read(tmp_path, letters(PILOT))
    on_disk[tmp_path] = [{"question": "?"}]
    with pytest.raises(RequestError, match="row 0: neither a 'text' nor 'messages'"):
        read(tmp_path, letters(PILOT))


# batches


def made(lengths: Sequence[int]) -> list[Example]:
    return [Example(np.full(n, i), np.ones(n, dtype=bool)) for i, n in enumerate(lengths)]


def test_split_is_a_shuffle_that_a_seed_repeats() -> None:
    examples = made([2] * 50)
    train, held = split(examples, 10, seed=3)
    again = split(examples, 10, seed=3)
    assert [[int(e.tokens[0]) for e in part] for part in (train, held)] == [
        [int(e.tokens[0]) for e in part] for part in again
    ]
    numbers = [int(e.tokens[0]) for e in train + held]
    assert sorted(numbers) == list(range(50)) != numbers
    assert [int(e.tokens[0]) for e in split(examples, 10, seed=4)[1]] != numbers[40:]
    with pytest.raises(TrainingError, match="the data has 50 conversations, and 50 are kept for evaluation"):
        split(examples, 50, seed=0)


def test_batches_hold_every_example_once_an_epoch_within_their_size() -> None:
    lengths = [3 + 7 * i % 40 for i in range(300)] + [150]
    stream = batches(made(lengths), 128, seed=1)
    sizes, epochs = [], []
    for _ in range(2):
        seen: list[int] = []
        while len(seen) < len(lengths):
            batch = next(stream)
            sizes.append((len(batch), max(len(e.tokens) for e in batch)))
            seen += [int(e.tokens[0]) for e in batch]
        assert sorted(seen) == list(range(len(lengths)))
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    assert all(count * longest <= 128 or count == 1 for count, longest in sizes)
    assert sum(count * longest for count, longest in sizes) < 1.15 * 2 * sum(lengths)
    first = [[int(e.tokens[0]) for e in batch] for batch in islice(batches(made(lengths), 128, seed=1), 9)]
    begun = [number for batch in first for number in batch]
    assert begun == epochs[0][: len(begun)]
    other = [[int(e.tokens[0]) for e in batch] for batch in islice(batches(made(lengths), 128, seed=2), 9)]
    assert other != first


def test_prompts_to_judge_by(written: Callable[..., Path]) -> None:
    tokenizer = letters(PILOT)
    examples, _ = read_examples([written({"text": "abcde"}, talk("Hi", "Yo", "A", "B"))], tokenizer, 100)
    assert [tokenizer.decode(e.prompt, skip_special=False) for e in examples] == [
        "ab",
        "<|user|>Hi<|end|><|assistant|>",
    ]
