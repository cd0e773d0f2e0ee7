"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError
from soothsay.tokenizer import Tokenizer, backend_errors

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
_TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
MAX_TOKEN = 1024
"""Limit of a token's text in characters. SentencePiece's merges need all ways to cut a token in two."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "tokens": list,
    "scores": list,
    "token_type": list,
    "merges": list,
    "model": str,
    "pre": str,
    "add_bos_token": int,
    "add_eos_token": int,
    "add_space_prefix": int,
}
"""Types of the metadata below `tokenizer.ggml`. Truth values are `int`, as in Python."""


def check_types(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise `ModelError` if the metadata of the tokenizer have wrong types. Others rely on them."""
    kinds = {f"tokenizer.ggml.{key}": kind for key, kind in _KINDS.items()}
    kinds["tokenizer.chat_template"] = str
    kinds |= dict.fromkeys((f"tokenizer.ggml.{key}_token_id" for key in _IDS), int)
    for key, kind in kinds.items():
        if key in metadata and not isinstance(metadata[key], kind):
            raise ModelError(f"{path}: {key} is a {type(metadata[key]).__name__}; convert the model again")
    lists = {"tokens": str, "merges": str, "scores": int | float, "token_type": int}
    for name, entries in lists.items():
        if not all(isinstance(entry, entries) for entry in metadata.get(f"tokenizer.ggml.{name}", [])):
            raise ModelError(
                f"{path}: tokenizer.ggml.{name} has entries of a wrong type; convert the model again"
            )
    longest = max(map(len, metadata.get("tokenizer.ggml.tokens", [])), default=0)
    if longest > MAX_TOKEN:
        raise ModelError(f"{path} has a token of {longest:,} characters, and {MAX_TOKEN:,} is the limit")


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer: first those that the file names, then those that are known by their text.

    Files of chat models often name only one, or the base model's. llama.cpp finds the others by text too.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids = _special_ids(metadata)
    named = [ids[key] for key in ("eos", "eot", "eom") if key in ids]
    return tuple(dict.fromkeys([*named, *(tokens.index(text) for text in _ENDS if text in tokens)]))


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
        # an empty text cannot be found in the vocabulary
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(metadata["tokenizer.ggml.tokens"])]
        if len(set(tokens)) != len(tokens):
            raise ModelError("several tokens have the same text; convert the model again")
        types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
        with backend_errors(
            lambda why: ModelError(f"the tokenizer is damaged ({why}); convert the model again")
        ):
            backend = builders[kind](metadata, tokens, types)
            _add_special(backend, tokens, types)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    ids = _special_ids(metadata)
    special = {name: tokens[ids[key]] for key, name in _TEMPLATE_NAMES.items() if key in ids}
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """`bos`, `eos`, `eot`, `eom`, `unknown`, `padding` -> id, as far as the file has them."""
    defaults = _DEFAULT_IDS.get(metadata.get("tokenizer.ggml.model", ""), {})
    size = len(metadata.get("tokenizer.ggml.tokens", []))
    found = {key: metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key)) for key in _IDS}
    return {
        key: i for key, i in found.items() if i is not None and 0 <= i < size
    }  # 2^32 - 1 means that there is none


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """SentencePiece's BPE: the neighbours that form the token with the best score merge first."""
    scores = metadata["tokenizer.ggml.scores"]
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        if token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort(key=lambda merge: -merge[0])
    unknown = _special_ids(metadata).get("unknown")
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for _, left, right in merges],
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
    _add_template(backend, metadata, tokens, add_bos=True)
    return backend


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
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
            vocab={token: i for i, token in enumerate(tokens)},
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
    _add_template(backend, metadata, tokens, add_bos=words.add_bos)
    return backend


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Add tokens that are found in a text before it is cut. Control tokens are left out in decoding."""

    def added(*kinds: int) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]

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
