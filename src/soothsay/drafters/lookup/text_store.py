"""A store of texts, and the search in it for earlier occurrences of a request's last tokens.

The file has the form of `learned_files`: safetensors, with the vocabulary as identity. Its arrays are:

- `tokens` `[T]` int32, those of all documents, one after the other, and `lengths` `[D]` int64 of the
  documents. Suffix matching (`suffix(store=...)`) reads these two;
- the index, in which REST searches. It is mapped into memory and never read as a whole. `index.suffixes`
  `[T]` uint32 are all places in `tokens`, sorted by the tokens from there *backwards* to the document's
  begin. So a request's last tokens, newest first, are a prefix to look up, and one binary search in this
  suffix array (Manber and Myers 1990) gives the longest match. `index.starts` `[V + 1]` uint32 is the first
  entry of each token in the suffix array.

The array is sorted by the first `SORTED_BY` tokens, the maximum length of a match.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from soothsay.core.arrays import IntArray
from soothsay.core.tenant import State, check_kept, read_arrays
from soothsay.drafters.learned_files import FORMAT, array_digest, write_learned
from soothsay.errors import DrafterError
from soothsay.files import replacing
from soothsay.tokenizer import Tokenizer

KIND = "suffix"
"""What files of texts say that they hold; see `RememberingDrafter`."""

SORTED_BY = 16
"""Number of tokens by which suffixes are sorted: the maximum length of a match. It is that of REST."""

SORTED_AT_ONCE = 2**21
"""Number of suffixes that are sorted together. Sorting takes 150 MB for any size of text, or 70 bytes for
each occurrence of the most frequent token if that is more."""

_LARGEST = 2**32 - 1  # places are uint32

_TYPES = {"lengths": "int64", "tokens": "int32", "index.starts": "uint32", "index.suffixes": "uint32"}
"""Arrays of a datastore, in the order of the file."""

AnyArray = npt.NDArray[Any]

Progress = Callable[[int, int], None]
"""Called with the number of sorted tokens and the number of all tokens."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches of a context's last tokens, the longest first."""

    places: IntArray
    """`[k]` places of the last token of each match. The tokens that followed it are at larger places."""

    lengths: list[int]
    """Length of each match in tokens."""


class Datastore:
    """An open store with an index. Its methods are thread-safe.

    Args:
        path: a file written by `write_datastore`.

    Raises `DrafterError` for a file that is missing, damaged, cut short or without an index.
    """

    version = FORMAT.split()[-1]

    def __init__(self, path: Path):
        self.path = path
        about, arrays = _mapped(path)
        self.identity = about.get("identity", "")
        """The vocabulary, as `Target.vocabulary` says it."""
        lengths, self._tokens, self._starts, self._suffixes = (arrays[name] for name in _TYPES)
        self.vocab_size, self.num_tokens = len(self._starts) - 1, len(self._tokens)
        self.num_documents, self.num_bytes = len(lengths), path.stat().st_size
        self._ends = np.cumsum(lengths)  # [D], of the documents
        self._begins = np.append(0, self._ends)  # the last one is that of no document
        # the same, faster for bisect
        self._order, self._bounds = self._suffixes.data, self._ends.data
        starts, count = self._starts.astype(np.int64), self.num_tokens
        if not count or len(self._suffixes) != count or self.vocab_size < 1:
            raise _unusable(path, "has an index of another text")
        if not len(lengths) or lengths.min() < 1 or lengths.max() > count or self._ends[-1] != count:
            raise _unusable(path, "has documents of impossible lengths")
        if (starts[0], starts[-1]) != (0, count) or (np.diff(starts) < 0).any():
            raise _unusable(path, "has a damaged index of first tokens")
        self.num_distinct = int((np.diff(starts) > 0).sum())
        """Number of distinct tokens."""
        self.largest = int(np.searchsorted(starts, count, "left")) - 1
        """The largest token id that occurs."""

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
        sought = newest_first.tolist()
        at = bisect_left(self._order, sought, begin, end, key=self._reader(len(sought)))
        # the longest matches are around `at`
        places = self._suffixes[max(begin, at - most) : min(end, at + most)].astype(np.int64)
        before = places[:, None] - np.arange(len(sought))
        stands = self._tokens.take(before, mode="clip") == newest_first
        stands &= before >= self._begins[np.searchsorted(self._ends, places, "right")][:, None]
        lengths = np.logical_and.accumulate(stands, axis=1).sum(axis=1)
        best = int(lengths.max(initial=0))
        if np.count_nonzero(lengths == best) >= most:
            places = self._evenly(sought[:best], begin, at, end, most)
            return Matches(places, [best] * len(places))
        order = np.argsort(-lengths, kind="stable")[:most]
        return Matches(places[order], lengths[order].tolist())

    def continuations(self, matches: Matches, depth: int) -> list[list[int]]:
        """The tokens after each match: `depth`, or fewer if its document ends before."""
        after = matches.places[:, None] + np.arange(1, depth + 1)
        tokens = self._tokens.take(after, mode="clip")
        ends = np.append(self._ends, 0)[np.searchsorted(self._ends, matches.places, "right")]
        # a damaged file may have other ids
        known = (after < ends[:, None]) & (tokens >= 0) & (tokens < self.vocab_size)
        counts = np.logical_and.accumulate(known, axis=1).sum(axis=1).tolist()
        return [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]

    def _evenly(self, sought: list[int], begin: int, at: int, end: int, most: int) -> IntArray:
        """`most` of the places of `sought`, evenly chosen. `at` is one of them, or the first after them."""
        read = self._reader(len(sought))
        begin = bisect_left(self._order, sought, begin, at, key=read)
        end = bisect_right(self._order, sought, at, end, key=read)
        return self._suffixes[begin + np.arange(most) * (end - begin) // most].astype(np.int64)

    def _reader(self, size: int) -> Callable[[int], list[int]]:
        """A function from a place to the `size` tokens from there backwards.

        Where the document has fewer, a number above all tokens follows the last of them.
        """
        text, bounds, beyond = self._tokens.data, self._bounds, self.vocab_size

        def read(place: int) -> list[int]:
            begin, number = place - size + 1, bisect_right(bounds, place)
            if begin >= (first := bounds[number - 1] if number else 0):
                return text[begin : place + 1].tolist()[::-1]
            return [*text[first : place + 1].tolist()[::-1], beyond]

        return read


def check_tokenizer(store: Datastore, tokenizer: Tokenizer | None, model: str) -> None:
    """Raise `DrafterError` if a datastore was built with another tokenizer than that of `model`."""
    if tokenizer is not None and store.identity != tokenizer.fingerprint.hex():
        raise DrafterError(
            f"{store.path} was built with another tokenizer than that of {model}: build one for it with "
            f"'soothsay datastore build {model} FILES... --out FILE'"
        )


def write_texts(path: Path, texts: Sequence[npt.NDArray[np.integer]], vocabulary: str) -> int:
    """Write a store without an index, and return its size in bytes.

    Args:
        path: of the file.
        texts: `[n]` token ids each, the oldest first.
        vocabulary: that of the tokens, as `Target.vocabulary` says it.

    Raises `DrafterError` if the texts are too large, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DrafterError(f"{path.parent} cannot be made ({error.strerror or error})") from None
    return write_learned(path, KIND, vocabulary, text_arrays(texts))


def text_arrays(texts: Sequence[npt.NDArray[np.integer]]) -> State:
    """`tokens` and `lengths` of texts, the oldest first."""
    return {
        "tokens": np.concatenate([np.empty(0, dtype=np.int32), *texts], dtype=np.int32),  # [sum of lengths]
        "lengths": np.array([len(text) for text in texts], dtype=np.int64),  # [texts]
    }


def texts_in(state: State, vocab_size: int) -> list[npt.NDArray[np.int32]]:
    """The inverse of `text_arrays`. Raises `DrafterError` if the arrays are impossible."""
    tokens, lengths = read_arrays("suffix", state, tokens=("int32", 1), lengths=("int64", 1))
    bounded = not len(lengths) or 1 <= lengths.min() <= lengths.max() <= len(tokens)
    check_kept("suffix", bounded and len(lengths) <= len(tokens) and lengths.sum() == len(tokens))
    check_kept("suffix", not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size)
    return np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []


def write_datastore(
    path: Path,
    documents: Iterable[IntArray],
    tokenizer: Tokenizer,
    *,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a store of documents, `[n]` token ids each, with an index. It appears when it is complete.

    Raises `DrafterError` if the documents are empty or too large, or if the file cannot be written.
    """
    if path.is_file() and not _is_store(path):
        raise DrafterError(f"{path} exists already, and is not a datastore: name another file")
    vocab_size = 1 + max(tokenizer.vocabulary().values(), default=-1)
    texts = [document for document in documents if len(document)]
    if not texts:
        raise DrafterError(f"{path} would be empty: there is nothing in the texts given")
    arrays = text_arrays(texts)
    count, ends = len(arrays["tokens"]), np.cumsum(arrays["lengths"])
    if count + len(texts) >= _LARGEST:
        raise DrafterError(f"{path} would hold {count:,} tokens, and {_LARGEST:,} is the most: give less")
    # each document backwards, with separators around it
    dtype = np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)
    separator = np.array([vocab_size], dtype=dtype)
    text = np.concatenate([separator, *(p for t in texts for p in (t[::-1].astype(dtype), separator))])
    starts = np.concatenate([[0], np.cumsum(np.bincount(text, minlength=vocab_size)[:vocab_size])])
    arrays = {**arrays, "index.starts": starts.astype(np.uint32)}
    about = {"format": FORMAT, "kind": KIND, "identity": tokenizer.fingerprint.hex()}
    shapes = {name: arrays[name].shape if name in arrays else (count,) for name in _TYPES}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(_header({**about, "digest": array_digest(arrays)}, shapes))
            for name in _TYPES:
                if name in arrays:
                    file.write(arrays[name].tobytes())
            done = 0
            progress(done, count)
            for suffixes in sorted_suffixes(text, starts):
                number = np.searchsorted(ends + np.arange(1, len(ends) + 1), suffixes)  # of the document
                before = ends[number - 1] * (number > 0)  # tokens of the documents before it
                places = ends[number] - 1 - (suffixes - 1 - number - before)
                file.write(places.astype("<u4").tobytes())
                done += len(suffixes)
                progress(done, count)
    except OSError as error:
        raise DrafterError(
            f"{path} cannot be written ({error.strerror or error}): name another file"
        ) from None


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


def _header(about: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The first bytes of a file of safetensors, before the arrays of `_TYPES` in their order."""
    header, at = dict[str, Any]({"__metadata__": about}), 0
    for name, dtype in _TYPES.items():
        begin, kind = at, np.dtype(dtype)
        at += kind.itemsize * math.prod(shapes[name])
        stored = f"{kind.kind.upper()}{8 * kind.itemsize}"
        header[name] = {"dtype": stored, "shape": shapes[name], "data_offsets": (begin, at)}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _mapped(path: Path) -> tuple[dict[str, str], dict[str, AnyArray]]:
    """The metadata and the arrays of a store with an index. The arrays are views of the mapped file."""
    try:
        with path.open("rb"), safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror or error})") from None
    except (SafetensorError, TypeError, ValueError) as error:
        raise _unusable(path, f"is no datastore, or is damaged ({error})") from None
    types = {name: array.dtype.name for name, array in arrays.items() if array.ndim == 1}
    if (about.get("format"), about.get("kind")) != (FORMAT, KIND) or types != _TYPES:
        raise _unusable(path, "is no datastore of this version, or has no index")
    return about, arrays


def _is_store(path: Path) -> bool:
    """Whether a file is a store with an index, whole or damaged."""
    with path.open("rb") as file:
        head = file.read(4096)
    return f'"format": "{FORMAT}"'.encode() in head and b'"index.suffixes"' in head


def _unusable(path: Path, reason: str) -> DrafterError:
    return DrafterError(
        f"{path} {reason}: build a datastore with 'soothsay datastore build MODEL FILES... --out FILE'"
    )
