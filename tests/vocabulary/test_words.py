"""Rules that cut texts into words, beside llama.cpp and the models' own tokenizers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.word_oracle import CUT, KEPT, LLAMA_NAMES, NAMES, TEXTS, plain

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_tokenizer import build_tokenizer
from soothsay.vocabulary.byte_level import REFUSED, WORDS, byte_level

ORACLE: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))


def cuts(name: str, text: str) -> str:
    """The text with `CUT` between words, by soothsay's rule."""
    backend = byte_level({}, [], WORDS[name])
    assert backend.pre_tokenizer is not None
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return CUT.join(plain(word) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))


@pytest.mark.parametrize("name", NAMES)
def test_cuts_as_llama_cpp_or_as_the_model_where_they_differ(name: str) -> None:
    own = ORACLE["models"].get(name, {})
    for i, text in enumerate(TEXTS):
        assert cuts(name, text) == own.get(str(i), ORACLE["llama.cpp"][name][i])


def test_every_rule_is_compared() -> None:
    assert {words.patterns for words in WORDS.values()} == {WORDS[name].patterns for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_long_runs_take_no_long_time(name: str) -> None:
    """A client chooses the text. An expression that looks ahead from each character would take minutes."""
    backend = byte_level({}, [], WORDS[name])
    assert backend.pre_tokenizer is not None
    for run in ("a", "A", "1", " ", "\n", ".", "'", "\u0301", "A\u0301", "\u6f22"):
        began = time.process_time()
        backend.pre_tokenizer.pre_tokenize_str(run * 10_000 + "x")
        assert time.process_time() - began < 1


def test_what_else_a_name_says() -> None:
    assert WORDS["glm4"].ignore_merges
    assert not WORDS["chatglm-bpe"].ignore_merges
    assert {name for name, words in WORDS.items() if words.compose} == {
        *("qwen2", "deepseek-r1-qwen", "qwen35", "command-r")
    }
    assert {name for name, words in WORDS.items() if words.add_bos} == {
        *("llama-bpe", "llama3", "llama-v3", "falcon-h1", "falcon3", "lfm2", "midm-2.0", "tekken", "pixtral")
    }


def test_each_name_that_llama_cpp_knows_is_read_or_refused_for_a_reason(tmp_path: Path) -> None:
    """Names that llama.cpp takes for the same rule have the same rule here. transformers says that the rule
    which llama.cpp has for `pixtral` is wrong (`fix_mistral_regex`)."""
    named = [name for names in LLAMA_NAMES for name in names]
    assert sorted([*WORDS, *REFUSED]) == sorted([*named, "default"])
    for names in LLAMA_NAMES:
        rules = {WORDS[name].patterns for name in names if name in WORDS and name != "pixtral"}
        assert len(rules) <= 1, names
    for name in [*REFUSED, "unheard-of"]:
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
        metadata |= {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
        with pytest.raises(ModelError, match=REFUSED.get(name, "soothsay knows only")):
            build_tokenizer(metadata, tmp_path)


@pytest.mark.parametrize("digits", [1, 2, 3, 4, 7, 30])
def test_thousands_are_counted_from_the_end(digits: int) -> None:
    number = "1234567890" * 3
    for after, counts in (("", True), (" a", True), (".", True), ("a", False), ("年", False), ("_", False)):
        words = cuts("tiny_aya", number[:digits] + after).split(CUT)
        lengths = [len(word) for word in words if word.isdigit()]
        rest = [digits % 3] if digits % 3 else []
        assert lengths == ([*rest, *[3] * (digits // 3)] if counts else [*[3] * (digits // 3), *rest])


def test_a_file_that_names_no_rule_is_read_with_a_warning(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        assert build_tokenizer(metadata, tmp_path) is not None
