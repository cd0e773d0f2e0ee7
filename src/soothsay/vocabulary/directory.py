"""Finds the tokenizer of a model's directory, in whichever form it is there, and what is added to it."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError
from soothsay.files import check_size, read_json_object, read_model_bytes, read_model_text
from soothsay.vocabulary.byte_level import SPECIAL, WORDS, byte_level, tekken
from soothsay.vocabulary.merges import MAX_TOKEN, check_lengths
from soothsay.vocabulary.sentencepiece import Kind, SentencePieceModel, sentencepiece

MAX_ADDED_ID = 2**20 - 1
"""Limit of ids of added tokens."""

_FLAGS = ("special", "lstrip", "rstrip", "single_word")


def _added(text: str, **flags: bool) -> AddedToken:
    """A token that is found in a text as it stands, before that is cut."""
    return AddedToken(text, normalized=False, **flags)


def added_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by id: those of `added_tokens.json`, and of `added_tokens_decoder` in `settings`.

    Raises `ModelError` or `ValueError` if one is not a text with an id.
    """
    file = directory / "added_tokens.json"
    older = read_json_object(file) if file.is_file() else {}
    special = _special_texts(settings)
    found = {
        _checked_id(number): _added(_checked(text), special=text in special) for text, number in older.items()
    }
    newer = settings.get("added_tokens_decoder") or {}
    if not isinstance(newer, dict):
        raise ValueError("added_tokens_decoder should be an object")
    for key, value in newer.items():
        if not isinstance(value, dict) or not key.isascii() or not key.isdigit():
            raise ValueError(f"added_tokens_decoder has no token at {key!r:.40}")
        flags = {name: value.get(name) is True for name in _FLAGS}
        found[_checked_id(int(key[:9]))] = _added(_checked(value.get("content")), **flags)
    return found


def add(backend: Backend, added: Mapping[int, AddedToken], settings: Mapping[str, Any]) -> None:
    """Let a tokenizer find added tokens, and the special tokens of `settings`, which it has already."""
    named = {text: _added(text, special=True) for text in _special_texts(settings)}
    known = {text: token for text, token in named.items() if backend.token_to_id(text) is not None}
    for token in {**known, **{token.content: token for token in added.values()}}.values():
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def surround(backend: Backend, special: Mapping[str, str], settings: Mapping[str, Any], *, bos: bool) -> None:
    """Let a tokenizer put special tokens around a text, as `settings` say.

    Args:
        backend: the tokenizer.
        special: the text of special tokens by name.
        settings: `add_bos_token` and `add_eos_token` are read.
        bos: whether there is a first one if the settings do not say so.
    """
    wanted = {"bos": settings.get("add_bos_token", bos), "eos": settings.get("add_eos_token", False)}
    texts = {name: special.get(f"{name}_token") for name, want in wanted.items() if want is True}
    ids = {text: backend.token_to_id(text) for text in texts.values() if text is not None}
    around = {name: text for name, text in texts.items() if text is not None and ids[text] is not None}
    if around:
        pieces = [around.get("bos"), "$A", around.get("eos")]
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece is not None],
            special_tokens=[
                {"id": text, "ids": [ids[text]], "tokens": [text]} for text in set(around.values())
            ],
        )


def named_special(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of special tokens by name, from a tokenizer_config.json. Raises `ModelError`."""
    special = {}
    for key, value in settings.items():
        if key.endswith("_token") and value is not None and not isinstance(value, bool):
            text = value.get("content") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise ModelError(f"tokenizer_config.json: {key} is {value!r:.80}, and should be a text")
            special[key] = text
    return special


def _special_texts(settings: Mapping[str, Any]) -> set[str]:
    """The texts of all special tokens that settings name."""
    given = settings.get("additional_special_tokens")
    more = given if isinstance(given, list) else []
    texts = [one.get("content") if isinstance(one, dict) else one for one in more]
    return {text for text in (*named_special(settings).values(), *texts) if isinstance(text, str) and text}


def _checked(text: Any) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN:
        raise ValueError(f"the added token {text!r:.40} is not a text of 1 to {MAX_TOKEN:,} characters")
    return text


def _checked_id(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ADDED_ID:
        raise ValueError(f"the id {number!r:.40} of an added token is not from 0 to {MAX_ADDED_ID:,}")
    return number


MAX_TOKENIZER_BYTES = 2**27
"""Size limit of a tokenizer.json in bytes. Gemma's, with 262,000 tokens, has 33 MB."""

MAX_FILE_BYTES = 2**25
"""Size limit of a tokenizer.model or a merges.txt in bytes. Gemma's tokenizer.model has 4 MB."""

WORDS_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "CodeGenTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""For classes of tokenizers (`tokenizer_class`) with a vocab.json, their rule in `words.WORDS`."""


MARIAN_SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of Marian's vocabularies."""

TARGET_ONLY = 1e3
"""By how much tokens that only targets have score less than pieces of sources, which are cut first."""

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
    names = {i: token.content for i, token in added.items()}
    backend = sentencepiece(model, names, always_prefix=settings.get("legacy") is not False)
    for i, kind in enumerate(model.kinds):
        if kind in (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED) and i not in added:
            added[i] = _added(model.texts[i], special=kind != Kind.USER_DEFINED)
    add(backend, added, settings)
    special = {**model.special(), **named_special(settings)}
    surround(backend, special, settings, bos=True)
    return Found(backend, special)


def tekken_json(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of Mistral's `tekken.json`."""
    backend = tekken(read_json_object(directory / "tekken.json"))
    surround(backend, SPECIAL, settings, bos=True)
    return Found(backend, SPECIAL)


def marian(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of a `source.spm`, whose pieces have the ids of a `vocab.json`.

    Tokens that only targets have are there too. An end token follows a text.
    """
    model, ids = (
        SentencePieceModel.parse(read_model_bytes(directory / "source.spm", MAX_FILE_BYTES)),
        _ids(directory),
    )
    special = {name: text for name, text in MARIAN_SPECIAL.items() if text in ids}
    if sorted(ids.values()) != [*range(len(ids))] or "unk_token" not in special:
        raise ValueError("its ids are not 0, 1, 2, ..., or there is no <unk>")
    scores, lowest = dict(zip(model.texts, model.scores, strict=True)), min(model.scores) - TARGET_ONLY
    model.texts = sorted(ids, key=lambda text: ids[text])
    model.scores = [scores.get(text, lowest) for text in model.texts]
    model.ids = {"unk": ids["<unk>"]}
    check_lengths(model.texts)
    backend = sentencepiece(model, {}, always_prefix=True)
    languages = [text for text in ids if re.fullmatch(">>.+<<", text)]
    add(
        backend, {ids[text]: _added(text, special=True) for text in (*special.values(), *languages)}, settings
    )
    surround(backend, special, {"add_eos_token": True}, bos=False)
    return Found(backend, special)


def vocab_json(directory: Path, settings: Mapping[str, Any]) -> Found:
    """The tokenizer of a `vocab.json` and a `merges.txt`: byte-level BPE."""
    ids = _ids(directory)
    added = added_tokens(directory, settings)
    texts = {i: text for text, i in ids.items()} | {i: token.content for i, token in added.items()}
    merged = {text: i for i, text in texts.items()}
    if not merged or len(merged) != len(texts):
        raise ValueError("it has no tokens, or several with the same text")
    check_lengths(merged)
    name = str(settings.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in WORDS_OF_CLASS:
        known = ", ".join(WORDS_OF_CLASS)
        raise ValueError(f"tokenizer_class {name!r:.60} is not known, only {known}; add a tokenizer.json")
    if END_OF_TEXT in merged:
        added.setdefault(merged[END_OF_TEXT], _added(END_OF_TEXT, special=True))
    backend = byte_level(merged, _merges(directory / "merges.txt"), WORDS[WORDS_OF_CLASS[name]])
    add(backend, added, settings)
    surround(backend, named_special(settings), settings, bos=False)
    return Found(backend, {})


def _ids(directory: Path) -> dict[str, int]:
    """The id of each token in a `vocab.json`. Raises `ValueError` for what is no id."""
    ids = read_json_object(directory / "vocab.json")
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids.values()):
        raise ValueError("it does not give an id to each token")
    return ids


FORMS = (
    Form(("tokenizer.json",), tokenizer_json),
    Form(("tokenizer.model",), sentencepiece_model),
    Form(("tekken.json",), tekken_json),
    Form(("source.spm", "vocab.json"), marian),
    Form(("vocab.json", "merges.txt"), vocab_json),
)
"""The forms of tokenizers. The first whose files are there is read."""

OTHER_FILES = ("tiktoken.model", "qwen.tiktoken", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers that are not read: their rules are in the code of the model's author."""

LOOKED_FOR = ", ".join(" with ".join(form.files) for form in FORMS)
"""The names of files with tokenizers, for errors."""


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the files by which a directory shows that it has a tokenizer."""
    names = dict.fromkeys([*(name for form in FORMS for name in form.files), *OTHER_FILES])
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
