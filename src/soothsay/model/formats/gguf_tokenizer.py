"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import TokenType
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from soothsay.chat_layout import TEMPLATE_NAMES
from soothsay.errors import ModelError
from soothsay.tokenizer import Tokenizer, backend_errors
from soothsay.vocabulary.byte_level import byte_level
from soothsay.vocabulary.merges import check_lengths
from soothsay.vocabulary.sentencepiece import add_spaces, merge_bpe, score_bpe
from soothsay.vocabulary.words import REFUSED, WORDS

_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""SentencePiece's defaults, for files that name none."""

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
    builders = {"llama": _sentencepiece, "gpt2": _byte_level, "gemma4": _merged_sentencepiece}
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


_Types = npt.NDArray[np.integer[Any]]
"""The type of each token (`TokenType`)."""


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by id, their ids, and their types (`TokenType`)."""

    tokens: Sequence[str]
    ids: dict[str, int]
    types: _Types


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
    return _Vocabulary(tokens, ids, _corrected(types, ids, metadata))


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
    ranked = [tokens[i] for i in normal.tolist()]
    backend = score_bpe(vocabulary.ids, ranked, None if unknown is None else tokens[unknown])
    add_spaces(backend, bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    _add_template(backend, metadata, vocabulary.tokens, add_bos=True)
    return backend


def _merged_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Backend:
    """BPE over SentencePiece's characters, with the merges that the file lists (Gemma 4)."""
    unknown = _special_ids(metadata).get("unknown")
    backend = merge_bpe(
        vocabulary.ids, _merges(metadata), None if unknown is None else vocabulary.tokens[unknown]
    )
    add_spaces(backend, bool(metadata.get("tokenizer.ggml.add_space_prefix", False)))
    _add_template(backend, metadata, vocabulary.tokens, add_bos=True)
    return backend


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs that the file lists, the first to merge first."""
    return [
        (left, right) for left, _, right in (one.partition(" ") for one in metadata["tokenizer.ggml.merges"])
    ]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Backend:
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
    backend = byte_level(vocabulary.ids, _merges(metadata), WORDS[name])
    _add_template(backend, metadata, vocabulary.tokens, add_bos=WORDS[name].add_bos)
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
