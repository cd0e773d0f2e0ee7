"""Byte-level BPE: how texts are cut into words, and words into tokens of bytes.

Files of such tokenizers have tokens and merges. The rule that cuts words is known by a name only, or is in
the code of the model's author.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Words:
    """How a text is cut into words, and whether words are cut further."""

    patterns: tuple[str, ...]
    """Regular expressions, applied one after the other."""

    ignore_merges: bool = False
    """Whether a word that is a token is never cut."""

    compose: bool = False
    """Whether Unicode NFC comes first."""


_QWEN2 = Words((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), compose=True)
_QWEN35 = Words(
    (
        _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
        .replace(r"\p{L}+", r"[\p{L}\p{M}]+")
        .replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"),
    ),
    compose=True,
)
"""Marks belong to words."""

_LLAMA3_WORDS = Words((_LLAMA3,), ignore_merges=True)
WORDS: Mapping[str, Words] = {
    "default": Words((_GPT2,)),
    "gpt-2": Words((_GPT2,)),
    "smollm": Words((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Words((_TEKKEN,), ignore_merges=True),
}
"""Rules by the names that GGUF files have for them."""


def byte_level(ids: dict[str, int], merges: Sequence[tuple[str, str]], words: Words) -> Backend:
    """A tokenizer of the tokens `ids`, whose texts have a character for each byte (`byte_text`).

    Raises `Exception`, or a panic of the library, if the merges do not belong to the tokens.
    """
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=words.ignore_merges))
    if words.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_text(token: bytes) -> str:
    """The text of a token: each byte as a character that can be printed (GPT-2, 2019)."""
    return token.decode("latin-1").translate(_UNPRINTABLE)


_UNPRINTABLE = {
    byte: 256 + place
    for place, byte in enumerate(byte for byte in range(256) if not chr(byte).isprintable() or byte == 32)
}
"""Bytes that stand for no printable character of Latin-1, and the characters in their place."""
