"""Says which texts certainly have more tokens than a limit, so that they need not be tokenized.

Tokenizing takes up to 250 times the size of a text in memory, and seconds for a text of a few megabytes.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
from tokenizers import models, pre_tokenizers

from soothsay.core.arrays import IntArray
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.byte_level import byte_text

COMPOSED = 4
"""Limit of characters that Unicode's normal forms compose to one."""

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))

SLICE = 1 << 15
"""Characters that are looked at together, which takes some milliseconds."""

MARGIN = 64
"""Characters at both ends of a slice that do not count: a normalizer may join them to what is beyond."""


class TextBound:
    """Says whether texts have more tokens than a limit, without tokenizing them.

    It says so only if that is certain. It never does if the tokenizer has parts whose effect is unknown.

    Args:
        tokenizer: of the texts.
    """

    def __init__(self, tokenizer: Tokenizer):
        backend = tokenizer.backend
        model, vocabulary = backend.model, tokenizer.vocabulary()
        self.per_token: int | None = None
        """Limit of characters that a token stands for, spaces beside special tokens not counted."""
        self._lengths: _Lengths | None = None
        normalizers, cutters = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
        shrinking = [*map(_shrinking, (*normalizers, *cutters))]
        factors = [one for one in shrinking if one is not None]
        known = backend.truncation is None and isinstance(model, models.BPE) and bool(vocabulary)
        if not known or len(factors) < len(shrinking):
            return  # models of other kinds make one token of a long word that they do not know
        byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *cutters))
        spelled = _spells_all(model, vocabulary, byte_level)
        if spelled or (model.unk_token in vocabulary and not model.fuse_unk):
            self.per_token = max(map(len, vocabulary)) * prod(factors)
        added = backend.get_added_tokens_decoder().values()
        # such a token takes all spaces beside it
        self._strips = any(token.lstrip or token.rstrip for token in added)
        if not self._strips and (spelled or (byte_level and model.unk_token is None)):
            self._lengths = _Lengths(tokenizer)

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text certainly has more than `max_tokens` tokens."""
        if self.per_token is not None and len(text) > (limit := max_tokens * self.per_token):
            return not self._strips or len("".join(text.split())) > limit
        if self._lengths is None or len(text) <= max_tokens:
            return False
        count = 0.0
        for begin in range(0, len(text), SLICE):
            count += self._lengths.fewest(text[begin : begin + SLICE])
            if count > max_tokens:
                return True
        return False


class _Lengths:
    """The longest token that has two given characters next to each other.

    A text has as many tokens as the sum, over its characters, of 1 / the length of the character's token. A
    token of several characters contains the left or the right neighbor of each. So it is at most as long as
    the longest token that contains the character beside one of its neighbors.

    Example:
        The tokens are `t`, `h`, `e`, `x` and `the`. In `thex`, the tokens of `t`, `h` and `e` have at most 3
        characters, and that of `x` has 1, since no token has `ex`. So there are at least 3/3 + 1 tokens.

    Args:
        tokenizer: one with tokens for all bytes, or a byte-level one that drops the others.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._normalizer = tokenizer.backend.normalizer
        cutters = {step["type"]: step for step in _steps(tokenizer.backend.pre_tokenizer)}
        self._to_bytes = "ByteLevel" in cutters
        self._space = cutters.get("Metaspace", {}).get("replacement", " ")
        own = tokenizer.backend.get_vocab(with_added_tokens=False)
        # bytes without a token are dropped, so that those around them can be in one token
        letters = pre_tokenizers.ByteLevel.alphabet() if self._to_bytes else []
        self._dropped = {ord(letter): None for letter in letters if letter not in own}
        added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        tokens = [*own, *map(self._normalized, added), *map(self._spelled, added)]
        self._pairs, self._longest = _longest_by_pair([token for token in tokens if token])

    def fewest(self, text: str) -> float:
        """The fewest tokens that a part of a text can have, without the characters at its ends."""
        pairs = _pairs(_codes(self._normalized(text)))
        places = np.searchsorted(self._pairs, pairs).clip(max=len(self._pairs) - 1)
        longest = np.where(self._pairs[places] == pairs, self._longest[places], 1)
        return float((1 / np.maximum(longest[:-1], longest[1:]))[MARGIN:-MARGIN].sum())

    def _normalized(self, text: str) -> str:
        return self._spelled(self._normalizer.normalize_str(text) if self._normalizer else text)

    def _spelled(self, text: str) -> str:
        """A text as the vocabulary spells it."""
        if self._to_bytes:
            return byte_text(text.encode()).translate(self._dropped)
        return text.replace(" ", self._space)


def _longest_by_pair(tokens: list[str]) -> tuple[IntArray, IntArray]:
    """All pairs of neighbors in tokens, sorted, and the length of the longest token that has each."""
    lengths = np.array([len(token) for token in tokens])
    inside = np.ones(lengths.sum(), dtype=bool)  # whether the next character is in the same token
    inside[lengths.cumsum() - 1] = False
    pairs, of_pairs = _pairs(_codes("".join(tokens))), np.repeat(lengths, lengths)
    # -1 is no pair; it is there so that the arrays are never empty
    pairs, of_pairs = np.append(-1, pairs[inside[:-1]]), np.append(1, of_pairs[inside])
    order = np.lexsort((of_pairs, pairs))
    pairs, of_pairs = pairs[order], of_pairs[order]
    is_longest = np.append(pairs[1:] != pairs[:-1], True)
    return pairs[is_longest], of_pairs[is_longest]


def _codes(text: str) -> IntArray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _pairs(codes: IntArray) -> IntArray:
    """A number for each character with the next one."""
    return codes[:-1] << 21 | codes[1:]


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, or of each in a sequence of them."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(settings: dict[str, Any]) -> list[dict[str, Any]]:
    if settings["type"] != "Sequence":
        return [settings]
    inside = settings.get("normalizers") or settings.get("pretokenizers") or []
    return [step for one in inside for step in _flat(one)]


def _spells_all(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Whether a model has tokens for all bytes, and with them for every character."""
    if byte_level:
        return all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(byte in vocabulary for byte in BYTE_TOKENS)


def _shrinking(step: dict[str, Any]) -> int | None:
    """How many characters of a text a normalizer or a pre-tokenizer makes one of, at most.

    None: unknown, or it drops some.
    """
    match step:
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "NFD" | "NFKD" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace"}:
            return 1
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)} if behavior != "Removed":
            return 1
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
            return -(-len(pattern) // len(content))
    return None
