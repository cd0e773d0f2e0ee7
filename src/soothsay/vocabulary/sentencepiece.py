"""Reads a `tokenizer.model` of SentencePiece, a message of protocol buffers, and rebuilds its tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from soothsay.vocabulary.merges import Merges, check_lengths

MAX_VARINT = 10
"""Limit of a variable-length integer in bytes."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field of a message, in order.

    A value is an integer for variable-length integers, else its bytes: 4, 8, or as many as the field says.

    Raises `ValueError` for bytes that are no message.
    """
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if size > end - place:
            raise ValueError("a field ends after the message")
        yield number, message[place : place + size]
        place += size


_SIZES = {1: 8, 5: 4}
"""Bytes of fields of a fixed size, by kind."""


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """An integer of seven bits a byte, lowest first, and the place after it."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("an integer without an end")


SPACE = "\u2581"
"""How SentencePiece writes a space."""

MAX_PIECES = 2**20
"""Limit of pieces. Gemma has 262,144."""

MAX_REPLACEMENT = 256
"""Limit of what one character is replaced by, in bytes. SentencePiece's own map has 33."""

UNIGRAM, BPE = 1, 2
"""Kinds of models: the most probable pieces, or pairs that merge."""

_NO_ID = -1


class Kind(IntEnum):
    """Kinds of pieces."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class SentencePieceModel:
    """A `tokenizer.model`. The defaults are those of a file that leaves a setting out."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    space_follows: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": _NO_ID})
    """Ids of special pieces. A negative one: there is none."""

    character_map: bytes = b""
    """Replacements of characters, as the `tokenizers` library reads them too. Empty: none.

    The size of a trie in 4 bytes, the trie, and the texts that it points to, each with a zero after it.
    """

    prefix: bool = True
    """Whether a space is put before a text."""

    joins_spaces: bool = True
    """Whether several spaces become one, and those around a text are dropped."""

    @classmethod
    def parse(cls, content: bytes) -> SentencePieceModel:
        """Raises `ValueError`, or `ModelError` for pieces that are too long."""
        model = cls()
        for part, value in fields(content):
            if part == 1:
                model._add_piece(_bytes(value))
            for number, setting in fields(_bytes(value)) if part in (2, 3) else ():
                if part == 2 and number in _IDS:
                    model.ids[_IDS[number]] = _signed(_integer(setting))
                elif (part, number) in _SETTINGS:
                    name, convert = _SETTINGS[part, number]
                    setattr(model, name, convert(setting))
        if not model.texts:
            raise ValueError("it has no pieces")
        if model.algorithm not in (UNIGRAM, BPE):
            raise ValueError("its pieces are words or characters, which no model here has")
        if model.space_follows:
            raise ValueError("it puts spaces after words, which is not supported")
        check_lengths(model.texts)
        return model

    def special(self) -> dict[str, str]:
        """The text of special pieces by the names that templates have for them."""
        return {f"{name}_token": self.texts[i] for name, i in self.ids.items() if 0 <= i < len(self.texts)}

    def _add_piece(self, message: bytes) -> None:
        text, score, kind = "", 0.0, int(Kind.NORMAL)
        for number, value in fields(message):
            if number == 1:
                text = _bytes(value).decode()
            elif number == 2:
                (score,) = struct.unpack("<f", _bytes(value))
            elif number == 3:
                kind = _integer(value)
        if len(self.texts) >= MAX_PIECES:
            raise ValueError(f"it has more than {MAX_PIECES:,} pieces")
        if not np.isfinite(score):
            raise ValueError(f"the score of piece {len(self.texts)} is not a number")
        if kind == Kind.USER_DEFINED:
            text = text.replace(SPACE, " ")  # it is looked for in the text as it was written
        self.texts.append(text or f"[EMPTY_{len(self.texts)}]")
        self.scores.append(score)
        self.kinds.append(kind)


def sentencepiece(model: SentencePieceModel, names: Mapping[int, str], *, always_prefix: bool) -> Backend:
    """A tokenizer of the pieces of a file.

    Args:
        model: the file.
        names: texts that replace those of pieces, or come after them, by id.
        always_prefix: whether the space before a text also stands after each special token in it.

    Raises `ValueError`, or an exception of the library, if pieces do not fit together.
    """
    texts = _renamed(model.texts, names)
    unknown = model.ids["unk"] if 0 <= model.ids["unk"] < len(texts) else None
    if model.algorithm == BPE:
        ranked = [text for text, kind in _by_score(texts, model) if kind == Kind.NORMAL]
        name = None if unknown is None else texts[unknown]
        ids = {text: i for i, text in enumerate(texts)}
        backend = piece_bpe(ids, Merges(ranked), name, byte_fallback=model.byte_fallback)
    else:
        lowest = min(model.scores)
        scores = [*model.scores, *[lowest] * (len(texts) - len(model.texts))]
        pieces = [*zip(texts, scores, strict=True)]
        backend = Backend(models.Unigram(pieces, unknown, model.byte_fallback))
    add_spaces(backend, model.prefix, always=always_prefix)
    first: list[normalizers.Normalizer] = []
    if model.character_map:
        replacements = model.character_map[4 + int.from_bytes(model.character_map[:4], "little") :]
        if max(map(len, replacements.split(b"\0"))) > MAX_REPLACEMENT:
            raise ValueError(f"it replaces a character by more than {MAX_REPLACEMENT} bytes")
        first.append(normalizers.Precompiled(model.character_map))
    if model.joins_spaces:
        first += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if first:
        backend.normalizer = normalizers.Sequence([*first, backend.normalizer])
    return backend


def piece_bpe(
    ids: dict[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None,
    *,
    byte_fallback: bool = True,
) -> Backend:
    """BPE as SentencePiece does it.

    Args:
        ids: tokens and their ids.
        merges: pairs of neighbours, the first to merge first. `Merges` makes those of tokens by their scores.
        unknown: the token for characters that have none.
        byte_fallback: whether such characters become the tokens of their bytes.
    """
    return Backend(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )


def add_spaces(backend: Backend, prefix: bool, *, always: bool = True) -> None:
    """Let a tokenizer write spaces as SentencePiece does.

    Args:
        backend: the tokenizer.
        prefix: whether a space is put before a text, and dropped when that is decoded.
        always: whether it also stands after each special token in the text.
    """
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix and always else replace
    )
    if prefix and not always:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", left=1)] if prefix else steps)


def _renamed(texts: Sequence[str], names: Mapping[int, str]) -> list[str]:
    """The texts with those of `names` at their places. Raises `ValueError` if a text is there twice."""
    renamed = list(texts)
    for i in range(len(texts), max(names, default=-1) + 1):
        renamed.append(names.get(i, f"[UNUSED_{i}]"))
    for i, text in names.items():
        renamed[i] = text
    if len(set(renamed)) != len(renamed):
        raise ValueError("several tokens have the same text")
    return renamed


def _by_score(texts: Sequence[str], model: SentencePieceModel) -> list[tuple[str, int]]:
    """Text and kind of each piece, the best score first."""
    order = np.argsort(-np.asarray(model.scores, np.float64), kind="stable").tolist()
    return [(texts[i], model.kinds[i]) for i in order]


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has a number where it should have bytes")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field has bytes where it should have a number")
    return value


def _signed(value: int) -> int:
    """An integer of 64 bits that may be negative."""
    return value - 2**64 if value >= 2**63 else value


_SETTINGS: dict[tuple[int, int], tuple[str, Callable[[int | bytes], object]]] = {
    (2, 3): ("algorithm", _integer),
    (2, 24): ("space_follows", bool),
    (2, 35): ("byte_fallback", bool),
    (3, 2): ("character_map", _bytes),
    (3, 3): ("prefix", bool),
    (3, 4): ("joins_spaces", bool),
}
"""Attributes by their fields in parts of a file: part 2 is training, and part 3 is normalization."""

_IDS = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}
"""Special pieces whose ids are in these fields of part 2."""
