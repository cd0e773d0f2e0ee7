"""A file of texts in which the places behind any last few tokens are found in microseconds.

The text is stored *backwards*, so that what stands before a place reads forwards from it: the last tokens of
a request, newest first, are a prefix to look up, one binary search gives the longest match of all, and what
was said next stands just before. The suffix array (Manber and Myers 1990) is sorted by the first
`SORTED_BY` tokens only, which is as much as is ever looked up.

The file is mapped into memory and never read as a whole. In order, each part beginning at a multiple of 8:

- a header of 64 bytes, `_HEADER`;
- the text: `[size]` token ids, 2 bytes each where the vocabulary allows it, else 4, big-endian, so that bytes
  compare as tokens do. Documents stand between separators, whose id is the vocabulary's size; a separator is
  the first and the last;
- the first-token index: `[vocab_size + 1]` uint32, where in the suffix array each token's suffixes begin;
- the suffix array: `[size - separators]` uint32 places in the text, of all tokens but separators.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from soothsay.errors import DrafterError
from soothsay.tokenizer import Tokenizer

SORTED_BY = 16
"""Tokens that suffixes are sorted by; no longer match can be told. REST looks up as many."""

SORTED_AT_ONCE = 2**21
"""Suffixes that are sorted together, so that sorting takes 150 MB whatever the text's size, or 70 bytes for
each place of the commonest token if these are more."""

VERSION = 1

_MAGIC = b"soothsay store\0\0"
_HEADER = struct.Struct("<16sIIIIQQ16s")
"""Magic, version, vocabulary size, bytes of a token, `SORTED_BY`, tokens and separators of the text, length
of the suffix array, `fingerprint` of the tokenizer."""

_LARGEST = 2**32 - 1  # places are uint32

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

Progress = Callable[[int, int], None]
"""Called with the tokens that have been sorted, and how many there are."""


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id."""
    return 1 + max(tokenizer.vocabulary().values(), default=-1)


@dataclass(frozen=True, slots=True)
class Matches:
    """Where the last tokens of a context have stood, the longest matches first."""

    places: IntArray
    """`[k]`, in the text that stands backwards: what was said next is at smaller places."""

    lengths: list[int]
    """Of each match, in tokens, at most as many as were looked for."""


class Datastore:
    """A store that is open for look-ups. Any thread may look things up.

    Args:
        path: the file, as `write_datastore` has made it.

    Raises `DrafterError` for a file that is not there, damaged, cut short or of another version.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
                found = os.fstat(file.fileno()).st_size
                fields = _read_header(path, head)
                _, self.version, self.vocab_size, width, _, size, count, self.fingerprint = fields
                starts_at = _aligned(_HEADER.size + width * size)
                suffixes_at = _aligned(starts_at + 4 * (self.vocab_size + 1))
                expected = suffixes_at + 4 * count
                if found != expected:
                    raise _unusable(path, f"has {found:,} bytes where {expected:,} are expected")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error.strerror or error})") from None
        self.num_tokens = count
        """Separators not counted."""
        self.num_documents = size - count - 1
        self.num_bytes = found
        self._width = width
        self._text = np.frombuffer(self._bytes, f">u{width}", size, _HEADER.size)
        self._starts = np.frombuffer(self._bytes, "<u4", self.vocab_size + 1, starts_at)
        self._suffixes = np.frombuffer(self._bytes, "<u4", count, suffixes_at)
        self._order = memoryview(self._bytes)[suffixes_at:].cast("I")  # the same, as bisect likes it
        if (self._starts[0], self._starts[-1]) != (0, count) or (np.diff(self._starts.astype(int)) < 0).any():
            raise _unusable(path, "has an index of first tokens that is none")
        self.num_distinct = int((np.diff(self._starts) > 0).sum())
        """Tokens of the vocabulary that occur."""
        self.largest = int(np.searchsorted(self._starts, count, "left")) - 1
        """The largest token id that occurs; -1 if there is none."""

    def find(self, context: IntArray, most: int, longest: int = SORTED_BY) -> Matches:
        """The places, at most `most`, where most of a context's last tokens stood.

        Where the longest match has more places than that, so many are taken evenly: they are sorted by what
        stands further before, so all kinds of contexts have their share. Otherwise those that match less come
        too; suffixes beside each other are alike, so they are never far.

        Args:
            context: `[n]` token ids, the newest last.
            most: places, at least 1.
            longest: tokens to look at, 1 to `SORTED_BY`.
        """
        newest_first = context[-longest:][::-1]
        unknown = np.flatnonzero(newest_first >= self.vocab_size)
        if len(unknown):  # of a model with more tokens than its tokenizer
            newest_first = newest_first[: unknown[0]]
        if not len(newest_first):
            return Matches(np.empty(0, dtype=np.int64), [])
        token = int(newest_first[0])
        begin, end = int(self._starts[token]), int(self._starts[token + 1])
        sought = newest_first.astype(self._text.dtype).tobytes()
        at = bisect_left(self._order, sought, begin, end, key=self._reader(len(sought)))
        # the best matches are around it
        places = self._suffixes[max(begin, at - most) : min(end, at + most)].astype(np.int64)
        stands = self._text.take(places[:, None] + np.arange(len(newest_first)), mode="clip")
        lengths = np.logical_and.accumulate(stands == newest_first, axis=1).sum(axis=1)
        best = int(lengths.max(initial=0))
        if np.count_nonzero(lengths == best) >= most:
            places = self._evenly(sought[: best * self._width], begin, at, end, most)
            return Matches(places, [best] * len(places))
        order = np.argsort(-lengths, kind="stable")[:most]
        return Matches(places[order], lengths[order].tolist())

    def continuations(self, matches: Matches, depth: int) -> list[list[int]]:
        """What was said next at each place, `depth` tokens, or fewer where the document ended."""
        said = self._text.take(matches.places[:, None] - np.arange(1, depth + 1), mode="clip")
        ends = (said >= self.vocab_size).any(axis=1).tolist()  # separators; in a damaged file, anything
        rows = zip(said.tolist(), ends, strict=True)
        return [_until(tokens, self.vocab_size) if end else tokens for tokens, end in rows]

    def _evenly(self, sought: bytes, begin: int, at: int, end: int, most: int) -> IntArray:
        """`most` of the places where `sought` stands; `at` is among them or just behind."""
        read = self._reader(len(sought))
        begin = bisect_left(self._order, sought, begin, at, key=read)
        end = bisect_right(self._order, sought, at, end, key=read)
        return self._suffixes[begin + np.arange(most) * (end - begin) // most].astype(np.int64)

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """From a place to the `size` bytes of text there."""
        content, width, first = self._bytes, self._width, _HEADER.size

        def read(place: int) -> bytes:
            at = first + place * width
            return content[at : at + size]

        return read


def check_tokenizer(store: Datastore, tokenizer: Tokenizer | None, model: str) -> None:
    """Raise `DrafterError` unless a store was built with the tokenizer of `model`, if that has one."""
    if tokenizer is not None and store.fingerprint != tokenizer.fingerprint:
        raise DrafterError(
            f"{store.path} was built with another tokenizer than that of {model}: build one for it with "
            f"'soothsay datastore build {model} FILES... --out FILE'"
        )


def write_datastore(
    path: Path,
    documents: Iterable[IntArray],
    tokenizer: Tokenizer,
    *,
    progress: Progress = lambda done, total: None,
) -> None:
    """Make a store of documents, `[n]` token ids each. The file is there whole or not at all.

    Raises `DrafterError` if there is nothing in it, if it is too large, or if it cannot be written.
    """
    if path.is_file() and not _is_datastore(path):
        raise DrafterError(f"{path} is there already, and is no datastore: name another file")
    vocab_size = vocabulary_size(tokenizer)
    dtype = np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)
    separator = np.array([vocab_size], dtype=dtype)
    parts, count = [separator], 0
    for document in documents:
        if len(document):
            parts += [document[::-1].astype(dtype), separator]
            count += len(document)
    if not count:
        raise DrafterError(f"{path} would be empty: there is nothing in the texts given")
    text = np.concatenate(parts)
    if len(text) > _LARGEST:
        raise DrafterError(f"{path} would hold {len(text):,} tokens, and {_LARGEST:,} is the most: give less")
    fields = (VERSION, vocab_size, dtype.itemsize, SORTED_BY, len(text), count, tokenizer.fingerprint)
    del parts
    with _replacing(path) as file:
        file.write(_HEADER.pack(_MAGIC, *fields))
        _write(file, text.astype(dtype.newbyteorder(">")))
        starts = np.concatenate([[0], np.cumsum(np.bincount(text, minlength=vocab_size)[:vocab_size])])
        _write(file, starts.astype("<u4"))
        done = 0
        progress(done, count)
        for suffixes in sorted_suffixes(text, starts):
            file.write(suffixes.astype("<u4").tobytes())
            done += len(suffixes)
            progress(done, count)


def sorted_suffixes(text: AnyArray, starts: IntArray) -> Iterator[IntArray]:
    """The suffix array of a text, part by part.

    Suffixes are told apart by their first `SORTED_BY` tokens, and those alike stand in order of place.

    Args:
        text: `[size]` unsigned token ids. Places of the largest, `len(starts) - 1`, the separator, are left
            out; the last token is one.
        starts: `[V + 1]`: how many suffixes begin with a smaller token.
    """
    separator = len(starts) - 1
    per_key = 64 // separator.bit_length()  # tokens that fit into a number
    num_keys = -(-SORTED_BY // per_key)
    padded = np.concatenate([text, np.full(num_keys * per_key, separator, text.dtype)])
    first = 0
    while first < separator:
        # tokens from `first` up to `behind` have no more suffixes than are sorted at once, or it is one token
        behind = int(np.searchsorted(starts, starts[first] + SORTED_AT_ONCE, "right")) - 1
        behind = min(max(behind, first + 1), separator)
        places = np.flatnonzero((text >= first) & (text < behind))
        keys = []
        for key in range(num_keys):
            packed = np.zeros(len(places), dtype=np.uint64)
            for offset in range(key * per_key, (key + 1) * per_key):
                packed <<= np.uint64(separator.bit_length())
                packed |= padded[places + offset]
            keys.append(packed)
        yield places[np.lexsort(keys[::-1])]
        first = behind


def _is_datastore(path: Path) -> bool:
    """Of whatever version."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read_header(path: Path, head: bytes) -> tuple[Any, ...]:
    """The header's fields. Raises `DrafterError` where they are none that this version can read."""
    if not head.startswith(_MAGIC):
        raise _unusable(path, "is no datastore")
    if len(head) < _HEADER.size:
        raise _unusable(path, "is cut short")
    fields: tuple[Any, ...] = _HEADER.unpack(head)
    _, version, vocab_size, width, sorted_by, size, count, _ = fields
    if version != VERSION or sorted_by != SORTED_BY:
        raise _unusable(path, f"is of version {version}, and this soothsay reads version {VERSION}")
    if width not in (2, 4) or vocab_size >= 256**width or not 0 < count < size <= _LARGEST:
        raise _unusable(path, "has a header that makes no sense")
    return fields


def _unusable(path: Path, reason: str) -> DrafterError:
    return DrafterError(
        f"{path} {reason}: build a datastore with 'soothsay datastore build MODEL FILES... --out FILE'"
    )


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all is written; if anything fails, nothing is left of it.

    Raises `DrafterError` if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as directory:
            unfinished = Path(directory, path.name)
            with unfinished.open("wb") as file:
                yield file
            unfinished.replace(path)
    except OSError as error:
        raise DrafterError(
            f"{path} cannot be written ({error.strerror or error}): name another file"
        ) from None


def _write(file: BinaryIO, part: AnyArray) -> None:
    """Write a part of the file and fill it up to a multiple of 8 bytes."""
    file.write(part.tobytes())
    file.write(bytes(_aligned(file.tell()) - file.tell()))


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _until(tokens: list[int], separator: int) -> list[int]:
    """The tokens before the first separator."""
    return tokens[: next(i for i, token in enumerate(tokens) if token >= separator)]
