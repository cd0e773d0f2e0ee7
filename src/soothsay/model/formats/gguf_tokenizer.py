"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from soothsay.chat_layout import TEMPLATE_NAMES
from soothsay.errors import ModelError, type_of
from soothsay.tokenizer import Tokenizer, backend_errors
from soothsay.vocabulary.byte_level import REFUSED, WORDS, byte_level
from soothsay.vocabulary.directory import surround
from soothsay.vocabulary.merges import Merges, check_lengths
from soothsay.vocabulary.sentencepiece import SentencePieceModel, add_spaces, piece_bpe, sentencepiece

_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
"""SentencePiece's defaults and T5's, for files that name none."""

_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TEMPLATE_KEYS = {name: f"tokenizer.chat_template.{name}" for name in TEMPLATE_NAMES} | {
    "default": "tokenizer.chat_template"
}
"""Keys of chat templates by name."""

_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<turn|>", "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "[e~["),
    *("<|flush|>", "<|calls|>", "<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end|>"),
)
"""Tokens that end an answer, of all families. gpt-oss has two, and so has Gemma 4."""

_CHANNEL_ENDS = frozenset({"<|return|>", "<|flush|>"})
"""In a vocabulary that has one of these, `<|end|>` ends a part of an answer only (gpt-oss, Solar Open)."""

_MARK = re.compile(r"<[^\s<>]{1,64}>|\[[A-Z_/]{1,64}\]")
"""How the tokens look that chat templates write around messages."""

_CONTROL_MARK = re.compile(r"<(\||\uff5c)[^\s<>]+\1>")
"""The same, of those that are no part of an answer's text."""

_KINDS: Mapping[str, type | UnionType] = {
    "model": str,
    "pre": str,
    "add_bos_token": int,
    "add_eos_token": int,
    "add_space_prefix": int,
    "remove_extra_whitespaces": int,
}
"""Types of the metadata below `tokenizer.ggml`. Truth values are `int`, as in Python."""

_ENTRIES = {"tokens": "O", "merges": "O", "scores": "fiu", "token_type": "iu", "precompiled_charsmap": "iu"}
"""Arrays below `tokenizer.ggml`, with numpy's letters for the types of entries; "O": texts."""


def check_types(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise `ModelError` if the metadata of the tokenizer have wrong types. Others rely on them."""
    named = (f"{key}_token_id" for key in _IDS)
    kinds = {**_KINDS, **dict.fromkeys(named, int), **dict.fromkeys(_ENTRIES, list | np.ndarray)}
    for name, kind in kinds.items():
        key = f"tokenizer.ggml.{name}"
        if key in metadata and not isinstance(metadata[key], kind):
            raise ModelError(f"{path}: {key} is {type_of(metadata[key])}; convert the model again")
    for name, letters in _ENTRIES.items():
        value = metadata.get(f"tokenizer.ggml.{name}", [])
        if len(value) and ("O" if isinstance(value, list) else value.dtype.kind) not in letters:
            raise ModelError(
                f"{path}: tokenizer.ggml.{name} has entries of a wrong type; convert the model again"
            )
    try:
        check_lengths(metadata.get("tokenizer.ggml.tokens", []))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer: first those that the file names, then those that are known by their text.

    Files of chat models often name only one, or the base model's. llama.cpp finds the others by text too.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = _special_ids(metadata)
    named = [ids[key] for key in ("eos", "eot", "eom") if key in ids]
    there = frozenset(_ENDS).intersection(tokens)
    if there & _CHANNEL_ENDS:
        there -= {"<|end|>"}
    return tuple(dict.fromkeys([*named, *(tokens.index(text) for text in _ENDS if text in there)]))


def build_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The tokenizer that `metadata` describes, or None if the file has none.

    Raises `ModelError` naming `path` for an unknown kind, and for lists that do not fit each other.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    builders = {"llama": _sentencepiece, "gpt2": _byte_level, "gemma4": _merged_sentencepiece, "t5": _unigram}
    if kind not in builders:
        raise ModelError(f"{path} has a tokenizer of kind {kind!r}; the known ones are {', '.join(builders)}")
    for needed in ("tokens", "scores" if kind in _DEFAULT_IDS else "merges"):
        if f"tokenizer.ggml.{needed}" not in metadata:
            raise ModelError(f"{path} has no metadata 'tokenizer.ggml.{needed}'; convert the model again")
    try:
        vocabulary = _Vocabulary(metadata)
        named = {name: vocabulary.special.get(key) for key, name in _SPECIAL_NAMES.items()}
        special = {name: text for name, text in named.items() if text is not None}
        with backend_errors(
            lambda why: ModelError(f"the tokenizer is damaged ({why}); convert the model again")
        ):
            backend, add_bos = builders[kind](metadata, vocabulary)
            given = {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("add_bos_token", "add_eos_token")}
            settings = {key: bool(value) for key, value in given.items() if value is not None}
            settings.setdefault("add_eos_token", kind == "t5")
            surround(backend, special, settings, bos=add_bos)
            _add_special(backend, vocabulary)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    templates = {name: metadata[key] for name, key in _TEMPLATE_KEYS.items() if key in metadata}
    return Tokenizer(backend, templates, special)


_Types = npt.NDArray[np.integer[Any]]
"""The type of each token (`TokenType`)."""


Built = tuple[Backend, bool]
"""A tokenizer, and whether a text begins with the token BOS if the file does not say."""


class _Vocabulary:
    """The tokens by id, their ids, their types (`TokenType`), and the texts of special tokens.

    Raises `ModelError` if a text is there twice, or if there are too few or too many types.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self.tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
        if "" in self.tokens:  # it cannot be found in the vocabulary
            self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.tokens)]
        count = len(self.tokens)
        self.ids = dict(zip(self.tokens, range(count), strict=True))
        if len(self.ids) != count:
            raise ModelError("several tokens have the same text; convert the model again")
        types = np.asarray(metadata.get("tokenizer.ggml.token_type", []))
        if not len(types):
            types = np.full(count, TokenType.NORMAL)
        if len(types) != count:
            raise ModelError(
                f"there are {len(types):,} types of tokens for {count:,} tokens; convert the model again"
            )
        self.types = _corrected(types, self.ids, metadata)
        self.special = {key: self.tokens[i] for key, i in _special_ids(metadata).items()}


def _corrected(types: _Types, ids: Mapping[str, int], metadata: Mapping[str, Any]) -> _Types:
    """The types of tokens, with those of a chat's marks that the file takes for normal text, as some do.

    A text is never cut into a normal token that is not made of two others: such a mark was added to the
    vocabulary. llama.cpp goes by the texts of tokens too.
    """
    tokens = list(ids)
    types = types.copy()
    ends = [i for i in stop_ids(metadata) if tokens[i] in _ENDS or _MARK.fullmatch(tokens[i])]
    types[ends] = TokenType.CONTROL
    written = "".join(str(metadata.get(key, "")) for key in _TEMPLATE_KEYS.values())
    for i in np.flatnonzero(types == TokenType.NORMAL).tolist():
        text = tokens[i]
        if text[0] in "<[" and _MARK.fullmatch(text) and not _is_made(text, ids):
            if _CONTROL_MARK.fullmatch(text):
                types[i] = TokenType.CONTROL
            elif text in written:
                types[i] = TokenType.USER_DEFINED
    return types


def _is_made(text: str, ids: Mapping[str, int]) -> bool:
    """Whether two tokens together have this text."""
    return any(text[:cut] in ids and text[cut:] in ids for cut in range(1, len(text)))


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """`bos`, `eos`, `eot`, `eom`, `unknown`, `padding` -> id, as far as the file has them."""
    defaults = _DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model", ""), {})
    size = len(metadata.get("tokenizer.ggml.tokens", []))
    found = {key: metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key)) for key in _IDS}
    # 2^32 - 1 means that there is none
    return {key: int(i) for key, i in found.items() if i is not None and 0 <= i < size}


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Built:
    """SentencePiece's BPE: the neighbours that form the token with the best score merge first."""
    tokens, scores = vocabulary.tokens, _scores(metadata, vocabulary)
    best_first = np.argsort(-scores, kind="stable")
    normal = best_first[vocabulary.types[best_first] == TokenType.NORMAL]
    ranked = [tokens[i] for i in normal.tolist()]
    backend = piece_bpe(vocabulary.ids, Merges(ranked), vocabulary.special.get("unknown"))
    add_spaces(backend, bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    return backend, True


def _scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> npt.NDArray[np.float64]:
    """The score of each token. Raises `ModelError` for another number of them."""
    scores, count = np.asarray(metadata["tokenizer.ggml.scores"], np.float64), len(vocabulary.tokens)
    if len(scores) != count:
        raise ModelError(f"there are {len(scores):,} scores for {count:,} tokens; convert the model again")
    return scores


def _unigram(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Built:
    """SentencePiece's most probable pieces, without the unused tokens after the last one.

    The converter gives tokens that are no pieces very low scores. An unknown character scores less than the
    lowest, so these are raised to that of a piece.
    """
    scores, types = _scores(metadata, vocabulary), vocabulary.types
    if not np.isfinite(scores).all():
        raise ModelError("a score is not a finite number; convert the model again")
    count = int(np.flatnonzero(types != TokenType.UNUSED).max()) + 1
    model = SentencePieceModel(
        vocabulary.tokens[:count],
        np.maximum(scores, scores[types == TokenType.NORMAL].min())[:count].tolist(),
        byte_fallback=TokenType.BYTE in types,
        ids={"unk": vocabulary.ids.get(vocabulary.special.get("unknown", ""), -1)},
        character_map=np.asarray(metadata.get("tokenizer.ggml.precompiled_charsmap", []), np.uint8).tobytes(),
        prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        joins_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", True)),
    )
    return sentencepiece(model, {}, always_prefix=True), False


def _merged_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Built:
    """BPE over SentencePiece's characters, with the merges that the file lists (Gemma 4)."""
    backend = piece_bpe(vocabulary.ids, _merges(metadata), vocabulary.special.get("unknown"))
    add_spaces(backend, bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    return backend, True


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs that the file lists, the first to merge first."""
    return [
        (left, right) for left, _, right in (one.partition(" ") for one in metadata["tokenizer.ggml.merges"])
    ]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Built:
    """GPT-2's BPE over bytes, with the merges that the file lists."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        warnings.warn(
            "the file does not say how words are cut (tokenizer.ggml.pre), so they are cut as GPT-2's. "
            "Answers may be worse; convert the model again with a current llama.cpp",
            stacklevel=4,
        )
        name = "default"
    if name not in WORDS:
        why = REFUSED.get(name, f"soothsay knows only {', '.join(WORDS)}")
        raise ModelError(
            f"the pre-tokenizer {name!r:.80} (tokenizer.ggml.pre) is not supported: {why}; "
            "load the model from its Hugging Face directory instead"
        )
    return byte_level(vocabulary.ids, _merges(metadata), WORDS[name]), WORDS[name].add_bos


def _add_special(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Add tokens that are found in a text before it is cut. Control tokens are left out in decoding."""

    def added(*kinds: int) -> list[AddedToken]:
        ids = np.flatnonzero(np.isin(vocabulary.types, kinds)).tolist()
        return [AddedToken(vocabulary.tokens[i], normalized=False) for i in ids]

    backend.add_special_tokens(added(TokenType.CONTROL, TokenType.UNKNOWN))
    backend.add_tokens(added(TokenType.USER_DEFINED))
