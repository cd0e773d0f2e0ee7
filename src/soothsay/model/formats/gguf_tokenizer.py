"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_merges import Merges
from soothsay.tokenizer import TEMPLATE_NAMES, Tokenizer, backend_errors

_SPACE = "\u2581"  # how SentencePiece writes a space
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
class _Words:
    """How a byte-level tokenizer cuts a text into words. The file has only the name of this rule."""

    patterns: tuple[str, ...]  # applied one after the other
    ignore_merges: bool = False  # a word that is a token is never cut
    add_bos: bool = False  # unless the file says otherwise
    compose: bool = False  # Unicode NFC first


_QWEN2 = _Words((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), compose=True)
_LLAMA3_WORDS = _Words((_LLAMA3,), ignore_merges=True, add_bos=True)
_WORDS = {
    "default": _Words((_GPT2,)),
    "gpt-2": _Words((_GPT2,)),
    "smollm": _Words((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3_WORDS,
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Words((_TEKKEN,), ignore_merges=True, add_bos=True),
}

_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0}
}  # SentencePiece's defaults, for files that name none
_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TEMPLATE_KEYS = {name: f"tokenizer.chat_template.{name}" for name in TEMPLATE_NAMES} | {
    "default": "tokenizer.chat_template"
}
"""Keys of chat templates by name."""

_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
MAX_TOKEN = 1024
"""Limit of a token's text in characters."""

MAX_CHARACTERS = 2**23
"""Limit of all tokens' texts together, in characters: finding merges takes up to 200 bytes for each.
Gemma's have 1.5 million."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


_KINDS: Mapping[str, type] = {
    "model": str,
    "pre": str,
    "add_bos_token": int,
    "add_eos_token": int,
    "add_space_prefix": int,
}
"""Types of the metadata below `tokenizer.ggml`. Truth values are `int`, as in Python."""

_ENTRIES = {"tokens": "O", "merges": "O", "scores": "fiu", "token_type": "iu"}
"""Arrays below `tokenizer.ggml`, with numpy's letters for the types of entries; "O": texts."""


def check_types(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise `ModelError` if the metadata of the tokenizer have wrong types. Others rely on them."""
    kinds = {f"tokenizer.ggml.{key}": kind for key, kind in _KINDS.items()}
    kinds |= dict.fromkeys(_TEMPLATE_KEYS.values(), str)
    kinds |= dict.fromkeys((f"tokenizer.ggml.{key}_token_id" for key in _IDS), int)
    for key, kind in kinds.items():
        if key in metadata and not isinstance(metadata[key], kind):
            raise ModelError(f"{path}: {key} is a {type(metadata[key]).__name__}; convert the model again")
    for name, letters in _ENTRIES.items():
        value = metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list | np.ndarray):
            raise ModelError(
                f"{path}: tokenizer.ggml.{name} is a {type(value).__name__}; convert the model again"
            )
        if len(value) and ("O" if isinstance(value, list) else value.dtype.kind) not in letters:
            raise ModelError(
                f"{path}: tokenizer.ggml.{name} has entries of a wrong type; convert the model again"
            )
    lengths = [*map(len, metadata.get("tokenizer.ggml.tokens", []))]
    if max(lengths, default=0) > MAX_TOKEN:
        raise ModelError(f"{path} has a token of {max(lengths):,} characters, and {MAX_TOKEN:,} is the limit")
    if sum(lengths) > MAX_CHARACTERS:
        raise ModelError(
            f"{path} has tokens of {sum(lengths):,} characters together, and {MAX_CHARACTERS:,} is the limit"
        )


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer: first those that the file names, then those that are known by their text.

    Files of chat models often name only one, or the base model's. llama.cpp finds the others by text too.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = _special_ids(metadata)
    named = [ids[key] for key in ("eos", "eot", "eom") if key in ids]
    there = frozenset(_ENDS).intersection(tokens)
    return tuple(dict.fromkeys([*named, *(tokens.index(text) for text in _ENDS if text in there)]))


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The tokenizer that `metadata` describes, or None if the file has none.

    Raises `ModelError` naming `path` for an unknown kind, and for lists that do not fit each other.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    builders = {"llama": _sentencepiece, "gpt2": _byte_level}
    if kind not in builders:
        raise ModelError(f"{path} has a tokenizer of kind {kind!r}; the known ones are {', '.join(builders)}")
    for needed in ("tokens", "scores" if kind == "llama" else "merges"):
        if f"tokenizer.ggml.{needed}" not in metadata:
            raise ModelError(f"{path} has no metadata 'tokenizer.ggml.{needed}'; convert the model again")
    try:
        vocabulary = _vocabulary(metadata)
        with backend_errors(
            lambda why: ModelError(f"the tokenizer is damaged ({why}); convert the model again")
        ):
            backend = builders[kind](metadata, vocabulary)
            _add_special(backend, vocabulary)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    ids = _special_ids(metadata)
    special = {name: vocabulary.tokens[ids[key]] for key, name in _SPECIAL_NAMES.items() if key in ids}
    templates = {name: metadata[key] for name, key in _TEMPLATE_KEYS.items() if key in metadata}
    return Tokenizer(backend, templates, special)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by id, their ids, and their types (`TokenType`)."""

    tokens: Sequence[str]
    ids: dict[str, int]
    types: npt.NDArray[np.integer[Any]]


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    """Raises `ModelError` if a text is there twice, or if there are too few or too many types."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    if "" in tokens:  # it cannot be found in the vocabulary
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        raise ModelError("several tokens have the same text; convert the model again")
    types = np.asarray(metadata.get("tokenizer.ggml.token_type", []))
    if not len(types):
        types = np.full(len(tokens), TokenType.NORMAL)
    if len(types) != len(tokens):
        raise ModelError(
            f"there are {len(types):,} types of tokens for {len(tokens):,} tokens; convert the model again"
        )
    return _Vocabulary(tokens, ids, types)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """`bos`, `eos`, `eot`, `eom`, `unknown`, `padding` -> id, as far as the file has them."""
    defaults = _DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model", ""), {})
    size = len(metadata.get("tokenizer.ggml.tokens", []))
    found = {key: metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key)) for key in _IDS}
    return {
        key: i for key, i in found.items() if i is not None and 0 <= i < size
    }  # 2^32 - 1 means that there is none


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Backend:
    """SentencePiece's BPE: the neighbours that form the token with the best score merge first."""
    tokens, scores = vocabulary.tokens, np.asarray(metadata["tokenizer.ggml.scores"])
    if len(scores) != len(tokens):
        raise ModelError(
            f"there are {len(scores):,} scores for {len(tokens):,} tokens; convert the model again"
        )
    best_first = np.argsort(-scores.astype(np.float64), kind="stable")
    normal = best_first[vocabulary.types[best_first] == TokenType.NORMAL]
    unknown = _special_ids(metadata).get("unknown")
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=Merges([tokens[i] for i in normal.tolist()]),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if prefix else steps)
    _add_template(backend, metadata, vocabulary.tokens, add_bos=True)
    return backend


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Backend:
    """GPT-2's BPE over bytes, with the merges that the file lists."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _WORDS:
        raise ModelError(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, only {', '.join(_WORDS)}; "
            "load the model from its Hugging Face directory instead"
        )
    words = _WORDS[name]
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=words.ignore_merges,
        )
    )
    if words.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_template(backend, metadata, vocabulary.tokens, add_bos=words.add_bos)
    return backend


def _add_special(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Add tokens that are found in a text before it is cut. Control tokens are left out in decoding."""

    def added(*kinds: int) -> list[AddedToken]:
        ids = np.flatnonzero(np.isin(vocabulary.types, kinds)).tolist()
        return [AddedToken(vocabulary.tokens[i], normalized=False) for i in ids]

    backend.add_special_tokens(added(TokenType.CONTROL, TokenType.UNKNOWN))
    backend.add_tokens(added(TokenType.USER_DEFINED))


def _add_template(
    backend: Backend, metadata: Mapping[str, Any], tokens: Sequence[str], *, add_bos: bool
) -> None:
    """Add the tokens around a text. `add_bos` is the default of the tokenizer's kind."""
    ids = _special_ids(metadata)
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    around = [key for key, want in wanted.items() if want and key in ids]
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["bos"] if "bos" in around else []), "$A", *(["eos"] if "eos" in around else [])],
            special_tokens=[{"id": key, "ids": [ids[key]], "tokens": [tokens[ids[key]]]} for key in around],
        )
