"""Damaged and hostile tokenizer files."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from soothsay.errors import ModelError, RequestError
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.directory import MAX_TOKENIZER_BYTES

GOOD: dict[str, Any] = json.loads(Backend(models.WordLevel({"<s>": 0, "hello": 1}, unk_token="<s>")).to_str())
MESSAGES = [{"role": "user", "content": "hi"}]


def write(directory: Path, tokenizer: Any = GOOD, settings: Any = None) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def added(number: int, content: str = "<x>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
SPECIAL = {"SpecialToken": {"id": "nowhere", "type_id": 0}}
BROKEN: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "an unknown model": {"model": {"type": "Magic"}},
    "an empty vocabulary": {"model": {"type": "Unigram", "unk_id": 5, "vocab": []}},
    "merges that fail within the library": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]}
    },
    "merges of unknown tokens": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    "negative ids": {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
    "ids beyond 32 bits": {"model": {"type": "WordLevel", "vocab": {"a": 2**40}, "unk_token": "a"}},
    "ids that need tables of 32 GB": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    },
    "an unknown token that is not there": {
        "model": {"type": "WordLevel", "vocab": {"a": 1}, "unk_token": "z"}
    },
    "a damaged normalizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a normalizer that makes texts long": {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 20}},
    "a decoder that makes texts long": {"decoder": {"type": "Sequence", "decoders": [REPLACE] * 20}},
    "a template of tokens that are not there": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [SPECIAL],
            "pair": [],
            "special_tokens": {},
        }
    },
    "an expression that is none": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    },
    "nested too deep": {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 200 + "]}" * 200)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(write(tmp_path, {**GOOD, **BROKEN[name]}))


@pytest.mark.parametrize("text", ["", "[", "[]", "null", '"x"', "{}", "[" * 10_000, "\xff"])
def test_no_tokenizer_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ModelError, match="limit"):
        Tokenizer.from_directory(tmp_path)


def test_settings_of_training_do_not_change_prompts(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    whitespace = {"type": "Whitespace"}
    given = {**GOOD, "truncation": truncation, "padding": padding, "pre_tokenizer": whitespace}
    assert Tokenizer.from_directory(write(tmp_path, given)).encode("hello hello hello") == [1, 1, 1]


def test_a_text_on_which_the_library_fails(tmp_path: Path) -> None:
    """An expression that would try all ways to cut a text. The library gives up with a panic."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_directory(write(tmp_path, {**GOOD, "pre_tokenizer": split}))
    with pytest.raises(RequestError, match="cannot cut this text"):
        tokenizer.encode("a" * 40 + "b")
    with pytest.raises(RequestError, match="half of a character, a lone surrogate"):
        tokenizer.encode("a\ud800")
    assert tokenizer.encode("hello") == [1]


ODD: list[Any] = [
    0,
    -1,
    1e308,
    "x",
    True,
    None,
    [],
    {},
    [[]],
    {"content": 5},
    {"content": None},
    [None],
    {"a": {}},
]


@pytest.mark.parametrize("settings", [[], None, 5, "x", [{}], True])
def test_settings_that_are_no_object(tmp_path: Path, settings: Any) -> None:
    (write(tmp_path) / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json should hold a JSON object"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "key", ["eos_token", "bos_token", "pad_token", "additional_special_token", "chat_template"]
)
def test_settings_of_odd_types(tmp_path: Path, key: str) -> None:
    for value in ODD:
        write(tmp_path, settings={key: value})
        try:
            tokenizer = Tokenizer.from_directory(tmp_path)
        except ModelError as error:
            assert "tokenizer_config.json" in str(error)  # noqa: PT017
            assert not isinstance(value, str)
        else:
            assert all(isinstance(text, str) for text in tokenizer.special.values())


@pytest.mark.parametrize(
    "template",
    [
        [5],
        [{"name": "default"}],
        [{"name": "default", "template": 5}],
        [{"template": "x"}],
        [{"name": ["default"], "template": "x"}],
        [{"name": "other", "template": "x"}],
        {"default": "x"},
        [["default", "x"]],
        [{"name": "default", "template": None}],
    ],
)
def test_templates_of_odd_shapes(tmp_path: Path, template: Any) -> None:
    write(tmp_path, settings={"chat_template": template})
    try:
        assert not Tokenizer.from_directory(tmp_path).has_chat_template
    except ModelError as error:
        assert "chat_template" in str(error)  # noqa: PT017


def test_special_tokens_that_do_not_exist_are_only_text(tmp_path: Path) -> None:
    settings = {"eos_token": "<nowhere>", "chat_template": "{{ eos_token }}"}
    tokenizer = Tokenizer.from_directory(write(tmp_path, settings=settings))
    assert tokenizer.render(MESSAGES) == "<nowhere>"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{% for %}", b"x" * (2**20 + 1), b"{{ 'x' | wordwrap }}"])
def test_a_damaged_template_file(tmp_path: Path, content: bytes) -> None:
    (write(tmp_path) / "chat_template.jinja").write_bytes(content)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.layout.problem is not None
    with pytest.raises(RequestError, match=re.escape(tokenizer.layout.problem)):
        tokenizer.render(MESSAGES)
    assert tokenizer.encode("a b")


def mutate(rng: random.Random, value: Any) -> Any:
    """Change one thing somewhere in a JSON value."""
    inside = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    if not inside or rng.random() < 0.15:
        return rng.choice(
            [None, 0, -1, 2**32, 1e308, "x", "", [], {}, [[]], True, ["a", "b"], {"type": "BPE"}]
        )
    key = rng.choice(list(inside))
    changed = copy.copy(value)
    if rng.random() < 0.1:
        del changed[key]
    else:
        changed[key] = mutate(rng, value[key])
    return changed


def test_random_damage(tmp_path: Path) -> None:
    whole = json.loads((open_checkpoint("sibyl").path / "tokenizer.json").read_text())
    whole["model"]["vocab"] = {token: i for token, i in whole["model"]["vocab"].items() if i < 300}
    known = whole["model"]["vocab"].keys()
    whole["model"]["merges"] = [
        merge for merge in whole["model"]["merges"] if {*merge, "".join(merge)} <= known and len(merge) == 2
    ]
    rng, refused = random.Random(0), 0
    for _ in range(200):
        write(tmp_path, mutate(rng, whole))
        try:
            tokenizer = Tokenizer.from_directory(tmp_path)
        except ModelError:
            refused += 1
            continue
        tokenizer.decode(tokenizer.encode("Once upon a time"))
        assert len(tokenizer.fingerprint) == 16
    assert 20 < refused < 200
