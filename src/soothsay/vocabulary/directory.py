"""Finds the tokenizer of a model's directory, in whichever form it is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError
from soothsay.files import check_size, read_json_object, read_model_bytes, read_model_text
from soothsay.vocabulary.added import Added, add, added_tokens, named_special, surround
from soothsay.vocabulary.byte_level import byte_level
from soothsay.vocabulary.merges import check_lengths
from soothsay.vocabulary.sentencepiece import Kind, SentencePieceModel, sentencepiece
from soothsay.vocabulary.tekken import SPECIAL, tekken
from soothsay.vocabulary.words import WORDS

MAX_TOKENIZER_BYTES = 2**27
"""Size limit of a tokenizer.json in bytes. Gemma's, with 262,000 tokens, has 33 MB."""

MAX_FILE_BYTES = 2**25
"""Size limit of a tokenizer.model or a merges.txt in bytes. Gemma's tokenizer.model has 4 MB."""

WORDS_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""For classes of tokenizers (`tokenizer_class`) with a vocab.json, their rule in `words.WORDS`."""


END_OF_TEXT = "<|endoftext|>"
"""A token that is special in all of these classes, whether the settings say so or not."""


class Found(NamedTuple):
    """A tokenizer, and the text of special tokens by name, as far as its own file names them."""

    backend: Backend
    special: Mapping[str, str]


class Form(NamedTuple):
    """A form of tokenizers: the files that it needs, and a function of a directory and its settings."""

    files: tuple[str, ...]
    read: Callable[[Path, Mapping[str, Any]], Found]


def tokenizer_json(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of a `tokenizer.json`, which has all of it."""
    file = directory / "tokenizer.json"
    check_size(file, MAX_TOKENIZER_BYTES)
    return Found(Backend.from_file(str(file)), {})


def sentencepiece_model(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of a `tokenizer.model`. `legacy` in the settings says how spaces are written."""
    content = read_model_bytes(directory / "tokenizer.model", MAX_FILE_BYTES)
    if re.match(rb"[A-Za-z0-9+/]{1,512}={0,2} \d{1,9}\r?\n", content):
        raise ModelError(
            f"{directory / 'tokenizer.model'} cannot be read: it is tiktoken's list of tokens, whose rules "
            "are in the code of the model's author. Add the tokenizer.json of its Hugging Face version"
        )
    model = SentencePieceModel.parse(content)
    added = added_tokens(directory, settings)
    names = {i: token.text for i, token in added.items()}
    backend = sentencepiece(model, names, always_prefix=settings.get("legacy") is not False)
    for i, kind in enumerate(model.kinds):
        if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED) and i not in added:
            added[i] = Added(model.texts[i], special=kind != Kind.USER_DEFINED)
    add(backend, added, settings)
    special = {**model.special(), **named_special(settings)}
    surround(backend, special, settings, bos=True)
    return Found(backend, special)


def tekken_json(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of Mistral's `tekken.json`."""
    backend = tekken(read_json_object(directory / "tekken.json"))
    surround(backend, SPECIAL, settings, bos=True)
    return Found(backend, SPECIAL)


def vocab_json(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of a `vocab.json` and a `merges.txt`: byte-level BPE."""
    ids = read_json_object(directory / "vocab.json")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids.values()):
        raise ValueError("it does not give an id to each token")
    added = added_tokens(directory, settings)
    texts = {i: text for text, i in ids.items()} | {i: token.text for i, token in added.items()}
    merged = {text: i for i, text in texts.items()}
    if not merged or len(merged) != len(texts):
        raise ValueError("it has no tokens, or several with the same text")
    check_lengths(merged)
    name = str(settings.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in WORDS_OF_CLASS:
        known = ", ".join(WORDS_OF_CLASS)
        raise ValueError(f"tokenizer_class {name!r:.60} is not known, only {known}; add a tokenizer.json")
    if END_OF_TEXT in merged:
        added.setdefault(merged[END_OF_TEXT], Added(END_OF_TEXT, special=True))
    backend = byte_level(merged, _merges(directory / "merges.txt"), WORDS[WORDS_OF_CLASS[name]])
    add(backend, added, settings)
    surround(backend, named_special(settings), settings, bos=False)
    return Found(backend, {})


FORMS = (
    Form(("tokenizer.json",), tokenizer_json),
    Form(("tokenizer.model",), sentencepiece_model),
    Form(("tekken.json",), tekken_json),
    Form(("vocab.json", "merges.txt"), vocab_json),
)
"""The forms of tokenizers. The first whose files are there is read."""

OTHER_FILES = ("tiktoken.model", "qwen.tiktoken", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers that are not read: their rules are in the code of the model's author."""

LOOKED_FOR = ", ".join(" with ".join(form.files) for form in FORMS)
"""The names of files with tokenizers, for errors."""


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the files by which a directory shows that it has a tokenizer."""
    names = [*(name for form in FORMS for name in form.files), *OTHER_FILES]
    return [name for name in names if (directory / name).is_file()]


def form_in(directory: Path) -> Form | None:
    """The form of the tokenizer in a directory; None if there is none."""
    return next((form for form in FORMS if all((directory / name).is_file() for name in form.files)), None)


def _merges(file: Path) -> list[tuple[str, str]]:
    """The pairs that merge, in order. Raises `ValueError` for a line without a pair."""
    merges: list[tuple[str, str]] = []
    for line in read_model_text(file, MAX_FILE_BYTES).split("\n"):
        if not line.strip() or (not merges and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not (left and right) or " " in right:
            raise ValueError(f"{file.name} has the line {line!r:.60}, which is not two tokens")
        merges.append((left, right))
    return merges
