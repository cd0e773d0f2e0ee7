"""How many characters a number of tokens can hold at most: longer texts need not be tokenized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import models, pre_tokenizers

from soothsay.tokenizer import Tokenizer

COMPOSED = 4
"""Limit of characters that Unicode's normal forms compose to one."""

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))


def too_long(tokenizer: Tokenizer, max_tokens: int) -> Callable[[str], bool]:
    """A function that says whether a text certainly has more than `max_tokens` tokens.

    No token stands for more characters than the longest in the vocabulary has, unless the tokenizer drops or
    replaces characters before. Where it may drop any, the function never says so.
    """
    per_token = characters_per_token(tokenizer)
    if per_token is None:
        return lambda text: False
    limit = max_tokens * per_token
    added = tokenizer.backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these tokens take all spaces beside them
        return lambda text: len(text) > limit and len("".join(text.split())) > limit
    return lambda text: len(text) > limit


def characters_per_token(tokenizer: Tokenizer) -> int | None:
    """Limit of characters of a text, without spaces beside special tokens, that one token stands for.

    None: there is none, or the tokenizer has parts whose effect is unknown.
    """
    backend = tokenizer.backend
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    cutters = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *cutters))
    vocabulary = tokenizer.vocabulary()
    if backend.truncation is not None or not vocabulary or not _covers(backend.model, vocabulary, byte_level):
        return None
    limit = max(map(len, vocabulary))
    for shrinking in (*map(_shrinking, normalizers), *map(_cutting, cutters)):
        if shrinking is None:
            return None
        limit *= shrinking
    return limit


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, or of each in a sequence of them."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), name)


def _flat(settings: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if settings["type"] == "Sequence":
        for one in settings[name]:
            yield from _flat(one, name)
    else:
        yield settings


def _covers(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Whether a model makes at least a token of every character that reaches it."""
    if not isinstance(model, models.BPE):
        return False  # others make one token of a long word that they do not know
    if byte_level:
        return all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    if model.byte_fallback and all(byte in vocabulary for byte in BYTE_TOKENS):
        return True
    return model.unk_token in vocabulary and not model.fuse_unk


def _shrinking(normalizer: dict[str, Any]) -> int | None:
    """How many characters of a text a normalizer makes one of, at most. None: unknown, or it drops some."""
    match normalizer:
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "NFD" | "NFKD" | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
            return -(-len(pattern) // len(content))
    return None


def _cutting(pre_tokenizer: dict[str, Any]) -> int | None:
    """The same for a pre-tokenizer."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return 1
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)} if behavior != "Removed":
            return 1
    return None
