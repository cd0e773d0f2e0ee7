"""Byte-level BPE: words become tokens of bytes. Mistral's `tekken.json` has such tokens by rank."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from soothsay.vocabulary.merges import Merges, check_lengths
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

BYTE_LETTERS = {byte_text(bytes([byte])): byte for byte in range(256)}
"""The byte that each character stands for."""


MAX_TOKENS = 2**20
"""Limit of tokens. Mistral's files list 150,000."""

MAX_PATTERN = 4096
"""Limit of the expression that cuts words, in characters. Mistral's has 260."""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens by the names that templates have for them."""

_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that do not list them, those before version 11."""


def tekken(content: Mapping[str, Any]) -> Backend:
    """The tokenizer of a `tekken.json`.

    The first ids are those of special tokens. The others follow by rank, as many as the file says.

    Raises `ValueError` for a damaged file.
    """
    config = content.get("config")
    if not isinstance(config, dict):
        raise ValueError("it has no 'config'")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise ValueError(f"'pattern' is not a text of at most {MAX_PATTERN:,} characters")
    size, num_special = (_count(config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    special = _special(content.get("special_tokens"), num_special)
    tokens = [byte_text(token) for token in _tokens(content.get("vocab"), size - num_special)]
    check_lengths([*special, *tokens])
    ids = {text: i for i, text in enumerate([*special, *tokens])}
    if len(ids) != size:
        raise ValueError("several tokens have the same text")
    if max(map(len, tokens)) < 2:
        raise ValueError("it has no tokens of several bytes")
    backend = byte_level(ids, Merges(tokens), Words((pattern,), ignore_merges=True))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return backend


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{key!r} is {value!r:.40}, and should be a number up to {MAX_TOKENS:,}")
    return value


def _special(given: Any, count: int) -> list[str]:
    """The texts of special tokens by id. Those that the file does not name have a number."""
    names = dict(enumerate(_OLD_SPECIAL))
    if given is not None:
        names = {_entry(one, "rank", int): _entry(one, "token_str", str) for one in _entries(given)}
    if names and not (min(names) >= 0 and max(names) < count):
        raise ValueError(f"its special tokens do not fit {count:,} ids")
    return [names.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _tokens(given: Any, count: int) -> list[bytes]:
    """The bytes of the first `count` tokens by rank."""
    found = {}
    for one in _entries(given):
        if (rank := _entry(one, "rank", int)) < count:
            found[rank] = b64decode(_entry(one, "token_bytes", str), validate=True)
    if count <= 0 or sorted(found) != [*range(count)]:
        raise ValueError(f"its ranks are not those from 0 to {count - 1:,}")
    return [found[rank] for rank in range(count)]


def _entries(given: Any) -> Sequence[Any]:
    if not isinstance(given, list):
        raise ValueError("'vocab' and 'special_tokens' should be lists")
    return given


def _entry(one: Any, key: str, kind: type) -> Any:
    value = one.get(key) if isinstance(one, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"a token has no {key!r}")
    return value
