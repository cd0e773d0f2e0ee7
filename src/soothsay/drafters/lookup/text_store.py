"""A file of texts that finds earlier occurrences of a request's last tokens in microseconds.

The text is stored *backwards*. So a request's last tokens, newest first, are a prefix to look up. One binary
search in a suffix array (Manber and Myers 1990) gives the longest match, and the tokens that followed it are
just before its place. The array is sorted by the first `SORTED_BY` tokens, the maximum length of a match.

The file is mapped into memory and never read as a whole. Its parts, each beginning at a multiple of 8 bytes:

- a header of 64 bytes, `_HEADER`;
- the text: `[size]` token ids of 2 bytes if the vocabulary allows it, else 4, big-endian, so that the order
  of bytes is that of tokens. Separators, whose id is the vocabulary's size, are between documents, before the
  first and after the last;
- the first-token index: `[vocab_size + 1]` uint32, the first entry of each token in the suffix array;
- the suffix array: `[size - separators]` uint32 places in the text, of all tokens except separators.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from soothsay.core.arrays import IntArray
from soothsay.errors import DrafterError
from soothsay.files import replacing
from soothsay.tokenizer import Tokenizer

SORTED_BY = 16
"""Number of tokens by which suffixes are sorted: the maximum length of a match. It is that of REST."""

SORTED_AT_ONCE = 2**21
"""Number of suffixes that are sorted together. Sorting takes 150 MB for any size of text, or 70 bytes for
each occurrence of the most frequent token if that is more."""

VERSION = 1

_MAGIC = b"soothsay store\0\0"
_HEADER = struct.Struct("<16sIIIIQQ16s")
"""Magic, version, vocabulary size, bytes of a token, `SORTED_BY`, tokens and separators of the text, length
of the suffix array, `fingerprint` of the tokenizer."""

_LARGEST = 2**32 - 1  # places are uint32

AnyArray = npt.NDArray[Any]

Progress = Callable[[int, int], None]
"""Called with the number of sorted tokens and the number of all tokens."""


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id."""
    return 1 + max(tokenizer.vocabulary().values(), default=-1)


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches of a context's last tokens, the longest first."""

    places: IntArray
    """`[k]` places in the backward text. The tokens that followed a match are at smaller places."""

    lengths: list[int]
    """Length of each match in tokens."""


class Datastore:
    """An open datastore. Its methods are thread-safe.

    Args:
        path: a file written by `write_datastore`.

    Raises `DrafterError` for a file that is missing, damaged, cut short or of another version.
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
        """Number of tokens without separators."""
        self.num_documents = size - count - 1
        self.num_bytes = found
        self._width = width
        self._text = np.frombuffer(self._bytes, f">u{width}", size, _HEADER.size)
        self._starts = np.frombuffer(self._bytes, "<u4", self.vocab_size + 1, starts_at)
        self._suffixes = np.frombuffer(self._bytes, "<u4", count, suffixes_at)
        self._order = memoryview(self._bytes)[suffixes_at:].cast("I")  # the same, faster for bisect
        if (self._starts[0], self._starts[-1]) != (0, count) or (np.diff(self._starts.astype(int)) < 0).any():
            raise _unusable(path, "has a damaged index of first tokens")
        self.num_distinct = int((np.diff(self._starts) > 0).sum())
        """Number of distinct tokens."""
        self.largest = int(np.searchsorted(self._starts, count, "left")) - 1
        """The largest token id that occurs; -1 if there is none."""

    def find(self, context: IntArray, most: int, longest: int = SORTED_BY) -> Matches:
        """The longest matches of a context's last tokens, at most `most`.

        If more than `most` places have the longest match, an even choice is returned. They are sorted by the
        tokens before the match, so all kinds of contexts are represented. With fewer places, shorter matches
        are added, which are close by in the sorted array.

        Args:
            context: `[n]` token ids, the newest last.
            most: maximum number of matches, at least 1.
            longest: maximum length of a match, 1 to `SORTED_BY`.
        """
        newest_first = context[-longest:][::-1]
        unknown = np.flatnonzero(newest_first >= self.vocab_size)
        if len(unknown):  # the model has more tokens than its tokenizer
            newest_first = newest_first[: unknown[0]]
        if not len(newest_first):
            return Matches(np.empty(0, dtype=np.int64), [])
        token = int(newest_first[0])
        begin, end = int(self._starts[token]), int(self._starts[token + 1])
        sought = newest_first.astype(self._text.dtype).tobytes()
        at = bisect_left(self._order, sought, begin, end, key=self._reader(len(sought)))
        # the longest matches are around `at`
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
        """The tokens after each match: `depth`, or fewer if its document ends before."""
        said = self._text.take(matches.places[:, None] - np.arange(1, depth + 1), mode="clip")
        ends = (said >= self.vocab_size).any(axis=1).tolist()  # separators, or other ids in a damaged file
        rows = zip(said.tolist(), ends, strict=True)
        return [_until(tokens, self.vocab_size) if end else tokens for tokens, end in rows]

    def _evenly(self, sought: bytes, begin: int, at: int, end: int, most: int) -> IntArray:
        """`most` of the places of `sought`, evenly chosen. `at` is one of them, or the first after them."""
        read = self._reader(len(sought))
        begin = bisect_left(self._order, sought, begin, at, key=read)
        end = bisect_right(self._order, sought, at, end, key=read)
        return self._suffixes[begin + np.arange(most) * (end - begin) // most].astype(np.int64)

    def _reader(self, size: int) -> Callable[[int], bytes]:
        """A function from a place to the `size` bytes of text from there on."""
        content, width, first = self._bytes, self._width, _HEADER.size

        def read(place: int) -> bytes:
            at = first + place * width
            return content[at : at + size]

        return read


def check_tokenizer(store: Datastore, tokenizer: Tokenizer | None, model: str) -> None:
    """Raise `DrafterError` if a datastore was built with another tokenizer than that of `model`."""
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
    """Write a datastore of documents, `[n]` token ids each. The file appears when it is complete.

    Raises `DrafterError` if the documents are empty or too large, or if the file cannot be written.
    """
    if path.is_file() and not _is_datastore(path):
        raise DrafterError(f"{path} exists already, and is not a datastore: name another file")
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

    Suffixes are sorted by their first `SORTED_BY` tokens, and then by place.

    Args:
        text: `[size]` unsigned token ids. The largest id, `len(starts) - 1`, is the separator. Its places are
            left out, and it is the last token.
        starts: `[V + 1]`: for each token, the number of suffixes that begin with a smaller token.
    """
    separator = len(starts) - 1
    per_key = 64 // separator.bit_length()  # tokens that fit into an integer key
    num_keys = -(-SORTED_BY // per_key)
    padded = np.concatenate([text, np.full(num_keys * per_key, separator, text.dtype)])
    first = 0
    while first < separator:
        # sort the suffixes of tokens from `first` to `end`: as many as allowed, at least those of one token
        end = int(np.searchsorted(starts, starts[first] + SORTED_AT_ONCE, "right")) - 1
        end = min(max(end, first + 1), separator)
        places = np.flatnonzero((text >= first) & (text < end))
        keys = []
        for key in range(num_keys):
            packed = np.zeros(len(places), dtype=np.uint64)
            for offset in range(key * per_key, (key + 1) * per_key):
                packed <<= np.uint64(separator.bit_length())
                packed |= padded[places + offset]
            keys.append(packed)
        yield places[np.lexsort(keys[::-1])]
        first = end


def _is_datastore(path: Path) -> bool:
    """Whether a file is a datastore, of any version."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read_header(path: Path, head: bytes) -> tuple[Any, ...]:
    """The header's fields. Raises `DrafterError` if this version cannot read them."""
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
    """Yield an open file that replaces `path` when the block ends; see `soothsay.files.replacing`.

    Raises `DrafterError` if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            yield file
    except OSError as error:
        raise DrafterError(
            f"{path} cannot be written ({error.strerror or error}): name another file"
        ) from None


def _write(file: BinaryIO, part: AnyArray) -> None:
    """Write a part of the file and pad it to a multiple of 8 bytes."""
    file.write(part.tobytes())
    file.write(bytes(_aligned(file.tell()) - file.tell()))


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def _until(tokens: list[int], separator: int) -> list[int]:
    """The tokens before the first separator."""
    return tokens[: next(i for i, token in enumerate(tokens) if token >= separator)]
