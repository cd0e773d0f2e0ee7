"""Tokens that a model's directory adds to its vocabulary, and those that stand around a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError
from soothsay.files import read_json_object
from soothsay.vocabulary.merges import MAX_TOKEN

MAX_ADDED_ID = 2**20 - 1
"""Limit of ids of added tokens."""

_FLAGS = ("special", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class Added:
    """A token that is found in a text before that is cut.

    Attributes:
        text: what is looked for.
        special: whether it has no text when tokens are decoded.
        lstrip, rstrip: whether it takes white space before it, and after it.
        single_word: whether it is found only where no letter stands beside it.
    """

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def added_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[int, Added]:
    """Added tokens by id: those of `added_tokens.json`, and of `added_tokens_decoder` in `settings`.

    Raises `ModelError` or `ValueError` if one is not a text with an id.
    """
    file = directory / "added_tokens.json"
    older = read_json_object(file) if file.is_file() else {}
    special = _special_texts(settings)
    found = {_checked_id(number): Added(_checked(text), text in special) for text, number in older.items()}
    newer = settings.get("added_tokens_decoder") or {}
    if not isinstance(newer, dict):
        raise ValueError("added_tokens_decoder should be an object")
    for key, value in newer.items():
        if not isinstance(value, dict) or not key.isascii() or not key.isdigit():
            raise ValueError(f"added_tokens_decoder has no token at {key!r:.40}")
        flags = {name: value.get(name) is True for name in _FLAGS}
        found[_checked_id(int(key[:9]))] = Added(_checked(value.get("content")), **flags)
    return found


def add(backend: Backend, added: Mapping[int, Added], settings: Mapping[str, Any]) -> None:
    """Let a tokenizer find added tokens, and the special tokens of `settings`, which it has already."""
    named = {text: Added(text, special=True) for text in _special_texts(settings)}
    known = {text: token for text, token in named.items() if backend.token_to_id(text) is not None}
    for token in {**known, **{token.text: token for token in added.values()}}.values():
        made = AddedToken(
            token.text,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=False,
        )
        (backend.add_special_tokens if token.special else backend.add_tokens)([made])


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
    more = settings.get("additional_special_tokens")
    texts = (
        {one.get("content") if isinstance(one, dict) else one for one in more if isinstance(one, dict | str)}
        if isinstance(more, list)
        else set()
    )
    return {text for text in (*named_special(settings).values(), *texts) if isinstance(text, str) and text}


def _checked(text: Any) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN:
        raise ValueError(f"the added token {text!r:.40} is not a text of 1 to {MAX_TOKEN:,} characters")
    return text


def _checked_id(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ADDED_ID:
        raise ValueError(f"the id {number!r:.40} of an added token is not from 0 to {MAX_ADDED_ID:,}")
    return number
