"""Byte-level BPE: words become tokens of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from soothsay.vocabulary.words import Words


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
