"""The datastore against brute force, and what becomes of damaged files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from soothsay import DrafterError, Tokenizer
from soothsay.drafters.learned_files import read_learned
from soothsay.drafters.lookup import text_store
from soothsay.drafters.lookup.text_store import (
    KIND,
    SORTED_BY,
    Datastore,
    check_tokenizer,
    sorted_suffixes,
    texts_in,
    write_datastore,
    write_texts,
)


def words(size: int, first: int = 0) -> Tokenizer:
    return Tokenizer(Backend(WordLevel({str(first + i): i for i in range(size)}, unk_token=str(first))))


def store(path: Path, documents: Sequence[Sequence[int]], vocab_size: int) -> Datastore:
    write_datastore(path, [np.array(d, dtype=np.int64) for d in documents], words(vocab_size))
    return Datastore(path)


def brute_force(
    documents: Sequence[Sequence[int]], context: Sequence[int], longest: int, depth: int
) -> list[tuple[int, tuple[int, ...]]]:
    """For each place where the last token stands: how much of the context matches, and what comes next."""
    found = []
    for document in documents:
        for end in range(1, len(document) + 1):
            length = 0
            while (
                length < min(longest, end, len(context))
                and document[end - 1 - length] == context[-1 - length]
            ):
                length += 1
            if length:
                found.append((length, tuple(document[end : end + depth])))
    return found


@pytest.mark.parametrize("vocab_size", [3, 300, 70_000])
@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_it_finds_what_brute_force_finds(
    vocab_size: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_store, "SORTED_AT_ONCE", at_once)
    rng = np.random.default_rng(vocab_size + at_once)
    used = rng.choice(vocab_size, 3, replace=False)  # few kinds, so that matches are long
    documents = [used[rng.integers(0, 3, int(rng.integers(1, 60)))].tolist() for _ in range(8)]
    opened = store(tmp_path / "x", documents, vocab_size)
    assert (opened.num_tokens, opened.num_documents) == (sum(map(len, documents)), 8)
    some = crowded = 0
    for _ in range(150):
        context = used[rng.integers(0, 3, int(rng.integers(1, 25)))]
        if rng.random() < 0.5:  # one that has been there
            document = documents[int(rng.integers(8))]
            context = np.array(document[: int(rng.integers(1, len(document) + 1))])
        longest, most, depth = int(rng.integers(1, 17)), int(rng.integers(1, 40)), int(rng.integers(1, 6))
        matches = opened.find(context, most, longest)
        said = opened.continuations(matches, depth)
        expected = brute_force(documents, context.tolist(), longest, depth)
        lengths = sorted((length for length, _ in expected), reverse=True)
        assert matches.lengths == lengths[:most]
        pairs = Counter(zip(matches.lengths, map(tuple, said), strict=True))
        assert pairs <= Counter(expected), "each of them stands there"
        assert len(set(matches.places.tolist())) == len(matches.lengths)
        some += len(lengths) > most
        crowded += lengths[: most + 1].count(max(lengths, default=0)) > most
    assert some > crowded > 5


def test_suffixes_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "SORTED_AT_ONCE", 50)
    rng = np.random.default_rng(0)
    text = np.where(rng.random(600) < 0.02, 5, rng.choice([0, 0, 0, 1, 3], 600)).astype(np.uint16)
    text[[0, -1]] = 5
    starts = np.searchsorted(np.sort(text), np.arange(6))
    found = np.concatenate(list(sorted_suffixes(text, starts))).tolist()
    padded = [*text.tolist(), *[5] * SORTED_BY]
    key = lambda place: (padded[place : place + SORTED_BY], place)  # noqa: E731
    assert found == sorted((place for place in range(600) if text[place] != 5), key=key)


def test_of_many_places_some_are_taken_evenly(tmp_path: Path) -> None:
    opened = store(tmp_path / "x", [[x, 100, x] for x in range(100)], 101)
    matches = opened.find(np.array([100]), 10)
    assert matches.lengths == [1] * 10
    assert opened.continuations(matches, 4) == [[x] for x in range(0, 100, 10)]


def test_the_end_of_a_document_ends_matches_and_continuations(tmp_path: Path) -> None:
    opened = store(tmp_path / "x", [[1, 2], [3, 4]], 5)
    assert opened.find(np.array([1, 2, 3]), 5).lengths == [1]
    assert opened.continuations(opened.find(np.array([1]), 5), 9) == [[2]]
    assert opened.continuations(opened.find(np.array([2]), 5), 9) == [[]]


@pytest.mark.parametrize("context", [[], [4], [5], [6], [1, 70_000], [2, 5]])
def test_what_it_cannot_know_is_nowhere(context: list[int], tmp_path: Path) -> None:
    opened = store(tmp_path / "x", [[1, 2], [3, 1]], 5)
    matches = opened.find(np.array(context, dtype=np.int64), 5)
    assert (matches.lengths, opened.continuations(matches, 3)) == ([], [])


def test_a_token_beyond_the_vocabulary_cuts_the_context(tmp_path: Path) -> None:
    opened = store(tmp_path / "x", [[1, 2], [3, 1, 2]], 5)
    assert opened.find(np.array([3, 5, 2]), 5).lengths == [1, 1], "a separator is no token to look for"


def test_suffix_matching_reads_a_store_with_an_index(tmp_path: Path) -> None:
    store(tmp_path / "x", [[1, 2, 3], [4, 4]], 5)
    state = read_learned(tmp_path / "x", KIND, words(5).fingerprint.hex())
    assert [text.tolist() for text in texts_in(state, 5)] == [[1, 2, 3], [4, 4]]


def test_a_store_is_the_same_however_it_was_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [np.random.default_rng(i).integers(0, 9, 50).tolist() for i in range(9)]
    store(tmp_path / "a", documents, 9)
    monkeypatch.setattr(text_store, "SORTED_AT_ONCE", 20)
    store(tmp_path / "b", documents, 9)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_progress_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "SORTED_AT_ONCE", 30)
    seen: list[tuple[int, int]] = []
    documents = [np.arange(9)] * 10
    write_datastore(tmp_path / "x", documents, words(9), progress=lambda *done: seen.append(done))
    assert seen == [(0, 90), (30, 90), (60, 90), (90, 90)]


class TestWhatCannotBeRead:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        store(tmp_path / "x", [[1, 2, 3, 1, 2], [2, 2]], 5)
        return tmp_path / "x"

    def refused(self, path: Path, reason: str) -> None:
        with pytest.raises(
            DrafterError, match=rf"{path.name} {reason}.*soothsay datastore build MODEL FILES"
        ):
            Datastore(path)

    def test_none_at_all(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nothing", "cannot be read .No such file")
        self.refused(tmp_path, "cannot be read")

    @pytest.mark.parametrize("content", [b"", b"{}", b"soothsay stor", b"x" * 1000])
    def test_another_file(self, content: bytes, path: Path) -> None:
        path.write_bytes(content)
        self.refused(path, "is no datastore")

    def test_one_cut_short_or_grown(self, path: Path) -> None:
        whole = path.read_bytes()
        for size in range(16, len(whole)):
            path.write_bytes(whole[:size])
            self.refused(path, "is no datastore, or is damaged")
        path.write_bytes(whole + b"x")
        self.refused(path, "is no datastore, or is damaged")

    def test_texts_without_an_index(self, path: Path) -> None:
        write_texts(path, [np.array([1, 2])], words(5).fingerprint.hex())
        self.refused(path, "is no datastore of this version, or has no index")

    @pytest.mark.parametrize(
        ("name", "values", "reason"),
        [
            ("index.starts", [0, 0, 1, 2, 3, 4], "has a damaged index of first tokens"),
            ("index.starts", [0, 9, 1, 5, 6, 7], "has a damaged index of first tokens"),
            ("index.starts", [], "has an index of another text"),
            ("index.suffixes", [0, 1, 2], "has an index of another text"),
            ("lengths", [5, 3], "has documents of impossible lengths"),
            ("lengths", [8, -1], "has documents of impossible lengths"),
            ("lengths", [], "has documents of impossible lengths"),
            ("tokens", [1.0], "is no datastore of this version"),
        ],
    )
    def test_arrays_that_are_impossible(
        self, name: str, values: list[float], reason: str, path: Path
    ) -> None:
        with safe_open(path, "numpy") as file:
            about = file.metadata()
        arrays = load(path.read_bytes())
        kind = arrays[name].dtype if name != "tokens" else np.dtype(np.float32)
        path.write_bytes(save({**arrays, name: np.array(values, dtype=kind)}, about))
        self.refused(path, reason)

    @pytest.mark.parametrize(("key", "value"), [("format", "soothsay learned 2"), ("kind", "ngram")])
    def test_another_kind_or_version(self, key: str, value: str, path: Path) -> None:
        with safe_open(path, "numpy") as file:
            about = {**file.metadata(), key: value}
        path.write_bytes(save(load(path.read_bytes()), about))
        self.refused(path, "is no datastore of this version")

    def test_damage_anywhere_is_told_or_harmless(self, path: Path) -> None:
        """Guesses may be wrong, but they are tokens."""
        whole, harmless = path.read_bytes(), 0
        for at in range(len(whole)):
            for flip in (0x01, 0x80, 0xFF):
                content = bytearray(whole)
                content[at] ^= flip
                path.write_bytes(content)
                try:
                    opened = Datastore(path)
                except DrafterError:
                    continue
                harmless += 1
                for context in ([1], [2], [1, 2], [3, 1, 2], [2, 2]):
                    said = opened.continuations(opened.find(np.array(context), 3), 4)
                    assert all(0 <= token < opened.vocab_size for tokens in said for token in tokens)
        assert harmless > 50

    def test_another_tokenizers(self, path: Path) -> None:
        check_tokenizer(Datastore(path), words(5), "one")
        check_tokenizer(Datastore(path), None, "one without")
        with pytest.raises(DrafterError, match=r"another tokenizer than that of two: .* build two FILES"):
            check_tokenizer(Datastore(path), words(5, first=1), "two")


def test_a_fingerprint_is_of_tokens_and_their_ids() -> None:
    made = [words(5), words(6), words(5, first=1)]
    swapped = Tokenizer(Backend(WordLevel({"1": 0, "0": 1, "2": 2, "3": 3, "4": 4}, unk_token="1")))
    assert len({tokenizer.fingerprint for tokenizer in [*made, swapped]}) == 4
    assert words(5).fingerprint == made[0].fingerprint


def test_names_of_missing_tokens_do_not_change_a_fingerprint() -> None:
    named = {str(i): i for i in range(5)}
    padded = Tokenizer(Backend(WordLevel({**named, "[PAD5]": 5, "[PAD6]": 6}, unk_token="0")))
    assert padded.fingerprint == words(5).fingerprint
    other = Tokenizer(Backend(WordLevel({**named, "[PAD6]": 5}, unk_token="0")))
    assert other.fingerprint != words(5).fingerprint


class TestWriting:
    def test_an_interrupt_leaves_what_was_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x"

        def interrupted(done: int, total: int) -> None:
            if done:
                raise KeyboardInterrupt

        def write() -> None:
            write_datastore(path, [np.array([1, 2])], words(5), progress=interrupted)

        with pytest.raises(KeyboardInterrupt):
            write()
        assert not list(tmp_path.iterdir())
        before = store(path, [[1, 1]], 5)
        with pytest.raises(KeyboardInterrupt):
            write()
        assert list(tmp_path.iterdir()) == [path]
        assert Datastore(path).num_tokens == before.num_tokens == 2

    def test_a_store_is_replaced_under_one_that_reads_it(self, tmp_path: Path) -> None:
        old = store(tmp_path / "x", [[1, 2, 3]], 5)
        new = store(tmp_path / "x", [[1, 4]], 5)
        said = [s.continuations(s.find(np.array([1]), 3), 3) for s in (old, new)]
        assert said == [[[2, 3]], [[4]]]

    def test_another_file_is_not_written_over(self, tmp_path: Path) -> None:
        (tmp_path / "notes").write_text("mine")
        with pytest.raises(DrafterError, match="notes exists already, and is not a datastore: name another"):
            store(tmp_path / "notes", [[1]], 5)
        assert (tmp_path / "notes").read_text() == "mine"
        write_texts(tmp_path / "suffix.store", [np.array([1, 2])], "a vocabulary")
        with pytest.raises(DrafterError, match=r"suffix\.store exists already, and is not a datastore"):
            store(tmp_path / "suffix.store", [[1]], 5)

    def test_nowhere_to_write(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DrafterError, match=r"file/x cannot be written .*: name another file"):
            store(tmp_path / "file" / "x", [[1]], 5)

    @pytest.mark.parametrize("documents", [[], [[]]])
    def test_nothing_to_write(self, documents: list[list[int]], tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match="would be empty"):
            store(tmp_path / "x", documents, 5)
        assert not list(tmp_path.iterdir())

    def test_documents_are_read_one_by_one(self, tmp_path: Path) -> None:
        def documents() -> Iterator[np.ndarray]:
            yield np.array([1])
            yield np.array([2, 3])

        write_datastore(tmp_path / "x", documents(), words(5))
        assert Datastore(tmp_path / "x").num_documents == 2
