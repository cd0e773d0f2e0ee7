"""What drafters learn comes back after a restart: for its tenant alone, and never from a file that lies."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.core.tenant import MAX_TENANTS, State, Tenant
from soothsay.drafters import learned_files as files
from soothsay.drafters.base import Drafter
from soothsay.drafters.learned_files import LearnedFiles, read_learned, write_learned
from soothsay.drafters.lookup.ngram import NGram
from soothsay.drafters.registry import build_drafter

LOOKUP = ["suffix", "ngram", "recycling"]

PROMPT = "The old boat on the river"
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ANN, BOB = Tenant("ann"), Tenant("bob")


@pytest.fixture
def keeping(sibyl: LLM, tmp_path: Path) -> Iterator[LearnedFiles]:
    """The session's engine, which keeps what drafters learn."""
    sibyl.engine._used.clear()  # drafters of other tests, which may not be collected yet
    sibyl.engine.kept = LearnedFiles(tmp_path / "kept")
    yield sibyl.engine.kept
    sibyl.engine.kept = None


def answer(
    llm: LLM, drafter: Drafter, tenant: Tenant = ANN, params: SamplingParams = PARAMS, text: str = PROMPT
) -> Any:
    """The request, after its answer."""
    (request,) = llm.requests(text, params, drafter=drafter, tenant=tenant)
    llm.engine.add(request)
    while request.finish_reason is None:
        llm.engine.step()
    return request


def said(request: Any) -> list[int]:
    return [int(token) for token in request.tokens[request.num_prompt :]]


@pytest.mark.parametrize("spec", [*LOOKUP, "suffix + recycling", "suffix | ngram"])
def test_a_fresh_drafter_drafts_as_well_as_the_old_one(sibyl: LLM, keeping: LearnedFiles, spec: str) -> None:
    target = sibyl.engine.target
    plain = said(answer(sibyl, build_drafter("none", target)))
    old = build_drafter(spec, target)
    first = answer(sibyl, old)
    sibyl.save_learned()
    again, restored = answer(sibyl, old), answer(sibyl, build_drafter(spec, target))
    assert said(first) == said(again) == said(restored) == plain
    if "|" not in spec:  # a controller looks at the clock
        assert restored.stats.steps == again.stats.steps < first.stats.steps


@pytest.mark.parametrize("spec", LOOKUP)
def test_sampled_tokens_do_not_depend_on_it(sibyl: LLM, keeping: LearnedFiles, spec: str) -> None:
    params = replace(PARAMS, temperature=1.0, seed=3)
    plain = said(answer(sibyl, build_drafter("none", sibyl.engine.target), params=params))
    for _ in range(2):
        drafter = build_drafter(spec, sibyl.engine.target)
        assert said(answer(sibyl, drafter, params=params)) == plain
        sibyl.save_learned()


@pytest.mark.parametrize("spec", LOOKUP)
def test_tenants_do_not_meet(sibyl: LLM, keeping: LearnedFiles, spec: str) -> None:
    target = sibyl.engine.target
    fresh = answer(sibyl, build_drafter(spec, target), BOB).stats
    answer(sibyl, build_drafter(spec, target), ANN)
    sibyl.save_learned()
    for path in keeping.directory.glob(f"*{BOB.digest.hex()}*"):
        path.unlink()
    assert answer(sibyl, build_drafter(spec, target), BOB).stats == fresh
    assert not any("ann" in path.name for path in keeping.directory.iterdir())


@pytest.mark.parametrize("spec", ["suffix", "ngram"])
def test_a_smaller_memory_takes_over_the_latest_part(sibyl: LLM, spec: str) -> None:
    target = sibyl.engine.target
    large, small = build_drafter(spec, target), build_drafter(f"{spec}(memory=60)", target)
    answer(sibyl, large)
    (full,), (part,) = large.learned(), small.learned()
    part.restore(ANN, full.memories[ANN].state())
    assert 0 < _size(part.memories[ANN].state()) < _size(full.memories[ANN].state())


def _size(state: State) -> int:
    return sum(array.nbytes for array in state.values())


def learned_in(sibyl: LLM, spec: str) -> Any:
    """What a drafter has learned from one answer to Ann."""
    drafter = build_drafter(spec, sibyl.engine.target)
    answer(sibyl, drafter)
    (learned,) = drafter.learned()
    return learned


class TestLies:
    """Arrays that no drafter has made, with a right digest."""

    @pytest.mark.parametrize(
        ("spec", "name", "change"),
        [
            ("suffix", "tokens", lambda a: a[:-1]),
            ("suffix", "tokens", lambda a: a * 0 + 8192),
            ("suffix", "tokens", lambda a: -a - 1),
            ("suffix", "tokens", lambda a: a.astype(np.float32)),
            ("suffix", "tokens", lambda a: a[:, None]),
            ("suffix", "lengths", lambda a: a + 1),
            ("suffix", "lengths", lambda a: np.append(a, np.zeros(2**20, a.dtype))),
            ("suffix", "lengths", lambda a: np.append(a, [2**63 - 1, -(2**63) + 1])),
            ("suffix", "lengths", lambda a: None),
            ("ngram", "contexts", lambda a: a[:, :-1]),
            ("ngram", "contexts", lambda a: a[:-1]),
            ("ngram", "contexts", lambda a: a * 0 - 1),
            ("ngram", "contexts", lambda a: a * 0 + 8192),
            ("ngram", "contexts", lambda a: a.astype(np.int64)),
            ("ngram", "sizes", lambda a: a * 0),
            ("ngram", "sizes", lambda a: a * 17),
            ("ngram", "followers", lambda a: a * 0 + 8192),
            ("ngram", "followers", lambda a: -a - 1),
            ("ngram", "counts", lambda a: a * 0),
            ("ngram", "counts", lambda a: a[:-1]),
            ("ngram", "counts", lambda a: None),
            ("recycling", "tokens", lambda a: a * 0 + 8192),
            ("recycling", "tokens", lambda a: a * 0 - 1),
            ("recycling", "tokens", lambda a: a[:-1]),
            ("recycling", "log_probs", lambda a: a * np.float16(np.nan)),
            ("recycling", "log_probs", lambda a: np.ones_like(a)),
            ("recycling", "log_probs", lambda a: None),
        ],
    )
    def test_they_are_refused_and_nothing_changes(
        self, sibyl: LLM, spec: str, name: str, change: Callable[[Any], Any]
    ) -> None:
        learned = learned_in(sibyl, spec)
        before = {key: array.copy() for key, array in learned.memories[ANN].state().items()}
        changed = {**before, name: change(before[name])}
        with pytest.raises(DrafterError, match="kept is damaged"):
            learned.restore(ANN, {key: array for key, array in changed.items() if array is not None})
        after = learned.memories[ANN].state()
        assert all((before[key] == after[key]).all() for key in before)
        learned.restore(BOB, before)
        assert all((before[key] == learned.memories[BOB].state()[key]).all() for key in before)


STATE: State = {"numbers": np.arange(50, dtype=np.int32)}


class TestFiles:
    def test_they_hold_what_was_written_and_are_private(self, tmp_path: Path) -> None:
        path = tmp_path / "one"
        assert write_learned(path, "kind", "me", STATE) == path.stat().st_size
        assert (read_learned(path, "kind", "me")["numbers"] == STATE["numbers"]).all()
        assert path.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize(
        ("kind", "identity", "message"),
        [
            ("other", "me", "is not what 'other' has learned"),
            ("kind", "you", "another vocabulary or drafter"),
        ],
    )
    def test_those_of_others_are_refused(
        self, tmp_path: Path, kind: str, identity: str, message: str
    ) -> None:
        write_learned(tmp_path / "one", "kind", "me", STATE)
        with pytest.raises(DrafterError, match=message):
            read_learned(tmp_path / "one", kind, identity)

    def test_a_changed_number_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "one"
        write_learned(path, "kind", "me", STATE)
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(DrafterError, match="does not have its digest"):
            read_learned(path, "kind", "me")

    def test_another_version_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_learned(tmp_path / "one", "kind", "me", STATE)
        monkeypatch.setattr(files, "FORMAT", "soothsay learned 2")
        with pytest.raises(DrafterError, match=r"version 2; it says 'soothsay learned 1 kind'"):
            read_learned(tmp_path / "one", "kind", "me")

    def test_what_is_too_large_is_neither_written_nor_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_learned(tmp_path / "one", "kind", "me", STATE)
        monkeypatch.setattr(files, "MAX_FILE", 300)
        with pytest.raises(DrafterError, match="more than 300 bytes"):
            read_learned(tmp_path / "one", "kind", "me")
        with pytest.raises(DrafterError, match="300 is the limit"):
            write_learned(tmp_path / "two", "kind", "me", STATE)
        assert not (tmp_path / "two").exists()

    def test_a_directory_that_cannot_be_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DrafterError, match=r"file/kept cannot keep .* name a directory"):
            LLM("sibyl", keep=tmp_path / "file" / "kept", max_context=64)

    def test_saving_needs_a_directory(self, sibyl: LLM) -> None:
        with pytest.raises(DrafterError, match="keep=DIRECTORY"):
            sibyl.save_learned()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "noise": lambda path: path.write_bytes(b"\xff" * 999),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "a header of 2**62 bytes": lambda path: path.write_bytes((2**62).to_bytes(8, "little") + b"{}"),
    "no metadata": lambda path: path.write_bytes(save({"tokens": np.zeros(3, np.int32)})),
    "a pipe": _fifo,
    "a directory": _directory,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_answers_go_on(
    sibyl: LLM, keeping: LearnedFiles, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = sibyl.engine.target
    first = answer(sibyl, build_drafter("suffix", target))
    sibyl.save_learned()
    (path,) = keeping.directory.iterdir()
    DAMAGES[damage](path)
    fresh = answer(sibyl, build_drafter("suffix", target))
    assert (said(fresh), fresh.stats) == (said(first), first.stats)
    assert [record.message for record in caplog.records] == ["kept file set aside"]
    assert str(path) in vars(caplog.records[0])["reason"]
    assert not path.exists()
    assert path.with_suffix(".unusable").exists()
    sibyl.save_learned()  # a new one takes its place
    assert path.is_file()


def test_the_oldest_files_make_room(
    sibyl: LLM, keeping: LearnedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build_drafter("suffix", sibyl.engine.target)
    answer(sibyl, drafter)
    sibyl.save_learned()
    (old,) = keeping.directory.iterdir()
    (keeping.directory / "notes.txt").write_text("mine" * 1000)
    os.utime(old, (1, 1))
    monkeypatch.setattr(files, "MAX_TOTAL", 2 * old.stat().st_size + 10)
    drafter.reset()
    for name in "bcd":
        answer(sibyl, drafter, Tenant(name))
        os.utime(old, (1, 1)) if old.exists() else None
    sibyl.save_learned()
    kept = {path.name for path in keeping.directory.iterdir()}
    assert len(kept) == 3
    assert old.name not in kept
    assert "notes.txt" in kept


def test_files_that_were_set_aside_are_removed_too(tmp_path: Path) -> None:
    """They hold what users wrote."""
    for name in ("one.learned", "two.unusable", "notes.txt"):
        (tmp_path / name).touch()
    LearnedFiles(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_file_a_tenant_and_no_more_tenants_than_drafters_keep(
    sibyl: LLM, keeping: LearnedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LEAST_BYTES", 0)
    drafter = build_drafter("suffix", sibyl.engine.target)
    short = SamplingParams(temperature=0, max_tokens=1)
    for number in range(MAX_TENANTS + 3):
        answer(sibyl, drafter, Tenant("ann", str(number)), short)
    assert sibyl.save_learned() == MAX_TENANTS
    assert len(list(keeping.directory.iterdir())) == MAX_TENANTS
    monkeypatch.setattr(files, "MAX_FILES", 7)
    sibyl.save_learned()
    assert len(list(keeping.directory.iterdir())) == 7


class TestSharedDirectories:
    """Several engines keep what they learn in one directory."""

    @pytest.mark.parametrize("spec", LOOKUP)
    def test_what_all_have_learned_comes_back(self, sibyl: LLM, tmp_path: Path, spec: str) -> None:
        engines = [LearnedFiles(tmp_path) for _ in range(2)]
        for text, engine in zip(TEXTS, engines, strict=True):
            taught(sibyl, spec, text, engine)
        assert len({*tmp_path.iterdir()}) == 2
        third = LearnedFiles(tmp_path)
        both = build_drafter(spec, sibyl.engine.target)
        third.recall(both, ANN)
        for text in TEXTS:
            fresh = build_drafter(spec, sibyl.engine.target)
            new, known = (answer(sibyl, one, text=text).stats for one in (fresh, both))
            assert known.steps < new.steps
        third.save([both])
        assert len({*tmp_path.iterdir()}) == 1, "it contains the two that it has read"

    def test_successors_of_all_engines_are_joined(self, sibyl: LLM, tmp_path: Path) -> None:
        states = list[State]()
        for text in TEXTS:
            (part,) = taught(sibyl, "recycling", text, LearnedFiles(tmp_path)).learned()
            states.append(part.memories[ANN].state())
        both = build_drafter("recycling", sibyl.engine.target)
        LearnedFiles(tmp_path).recall(both, ANN)
        (joined,) = both.learned()
        first, last, rows = (
            state["log_probs"][:, 0] > -np.inf for state in (*states, joined.memories[ANN].state())
        )
        assert (rows == (first | last)).all()
        assert not (rows == last).all()

    @pytest.mark.parametrize("spec", LOOKUP)
    def test_nothing_counts_twice(self, sibyl: LLM, tmp_path: Path, spec: str) -> None:
        drafter = taught(sibyl, spec, TEXTS[0], LearnedFiles(tmp_path))
        LearnedFiles(tmp_path).save([drafter])
        assert len({*tmp_path.iterdir()}) == 2
        fresh = build_drafter(spec, sibyl.engine.target)
        LearnedFiles(tmp_path).recall(fresh, ANN)
        (old,), (new,) = drafter.learned(), fresh.learned()
        before, after = old.memories[ANN].state(), new.memories[ANN].state()
        assert all(np.array_equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("spec", LOOKUP)
    def test_older_files_do_not_replace_newer_learning(self, sibyl: LLM, tmp_path: Path, spec: str) -> None:
        kept = LearnedFiles(tmp_path)
        drafter = taught(sibyl, spec, TEXTS[0], kept)
        answer(sibyl, drafter, text=TEXTS[1])
        (learned,) = drafter.learned()
        before = {name: array.copy() for name, array in learned.memories[ANN].state().items()}
        for again in (kept, LearnedFiles(tmp_path)):
            again.recall(drafter, ANN)
        assert all(
            np.array_equal(before[name], array) for name, array in learned.memories[ANN].state().items()
        )

    @pytest.mark.parametrize("last", [0, 1])
    def test_the_newest_stays_where_not_all_fits(self, sibyl: LLM, tmp_path: Path, last: int) -> None:
        for text in TEXTS:
            taught(sibyl, "suffix", text, LearnedFiles(tmp_path))
        parts = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(parts[last], (2**31, 2**31))
        newest = read_tokens(parts[last])
        small = build_drafter(f"suffix(memory={2 * len(newest)})", sibyl.engine.target)
        LearnedFiles(tmp_path).recall(small, ANN)
        (learned,) = small.learned()
        assert learned.memories[ANN].state()["tokens"].tolist()[-len(newest) :] == newest

    def test_of_too_many_files_the_newest_are_read(
        self, sibyl: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for text in TEXTS:
            taught(sibyl, "suffix", text, LearnedFiles(tmp_path))
        newest, _ = tmp_path.iterdir()
        os.utime(newest, (2**31, 2**31))
        monkeypatch.setattr(files, "MAX_PARTS", 1)
        fresh = build_drafter("suffix", sibyl.engine.target)
        LearnedFiles(tmp_path).recall(fresh, ANN)
        (learned,) = fresh.learned()
        assert learned.memories[ANN].state()["tokens"].tolist() == read_tokens(newest)

    def test_a_file_that_cannot_be_written_keeps_no_other_from_it(
        self, sibyl: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drafter = build_drafter("suffix", sibyl.engine.target)
        for tenant in (ANN, BOB):
            answer(sibyl, drafter, tenant)
        failed = list[Path]()

        def write(path: Path, *rest: Any) -> int:
            if not failed:
                failed.append(path)
                raise DrafterError("the disk is full")
            return write_learned(path, *rest)

        monkeypatch.setattr(files, "write_learned", write)
        with pytest.raises(DrafterError, match="disk is full"):
            LearnedFiles(tmp_path).save([drafter])
        (written,) = tmp_path.iterdir()
        assert BOB.digest.hex() in written.name

    def test_models_and_drafters_that_differ_keep_files_of_their_own(
        self, sibyl: LLM, tmp_path: Path
    ) -> None:
        kept, specs = LearnedFiles(tmp_path), ("ngram(order=3)", "ngram(order=4)")
        for spec in specs:
            taught(sibyl, spec, TEXTS[0], kept)
        for spec in specs:
            fresh = build_drafter(spec, sibyl.engine.target)
            kept.recall(fresh, ANN)
            (learned,) = fresh.learned()
            assert [*learned.memories] == [ANN]
        assert [path.suffix for path in tmp_path.iterdir()] == [".learned"] * 2

    def test_forks_write_files_of_their_own(self, sibyl: LLM, tmp_path: Path) -> None:
        drafter = build_drafter("suffix", sibyl.engine.target)
        answer(sibyl, drafter)
        loaded = LearnedFiles(tmp_path)
        for fork in (copy.copy(loaded), copy.copy(loaded)):  # of the process that has loaded the model
            fork.save([drafter])
        assert len({*tmp_path.iterdir()}) == 2

    def test_files_that_changed_meanwhile_stay(self, sibyl: LLM, tmp_path: Path) -> None:
        first, second = LearnedFiles(tmp_path), LearnedFiles(tmp_path)
        drafter = taught(sibyl, "suffix", TEXTS[0], first)
        other = build_drafter("suffix", sibyl.engine.target)
        second.recall(other, ANN)
        (path,) = tmp_path.iterdir()
        answer(sibyl, drafter, text=TEXTS[1])
        first.save([drafter])
        os.utime(path, (2**31, 2**31))
        second.save([other])
        assert path.exists()

    def test_tenants_without_files_take_no_memory(self, sibyl: LLM, tmp_path: Path) -> None:
        kept = LearnedFiles(tmp_path)
        taught(sibyl, "suffix", TEXTS[0], kept)
        fresh = build_drafter("suffix", sibyl.engine.target)
        for tenant in (ANN, *(Tenant("bob", str(salt)) for salt in range(9))):
            kept.recall(fresh, tenant)
        assert [len(names) for names in kept._read.values()] == [1]

    def test_a_part_that_is_damaged_does_not_hide_the_others(self, sibyl: LLM, tmp_path: Path) -> None:
        taught(sibyl, "suffix", TEXTS[0], LearnedFiles(tmp_path))
        (whole,) = tmp_path.iterdir()
        broken = whole.with_name(whole.name.replace(".learned", "0.learned"))
        broken.write_bytes(b"x" * 500)
        fresh = build_drafter("suffix", sibyl.engine.target)
        LearnedFiles(tmp_path).recall(fresh, ANN)
        (learned,) = fresh.learned()
        assert learned.memories[ANN].state()["tokens"].tolist() == read_tokens(whole)
        assert not broken.exists()


TEXTS = PROMPT, "A recipe for bread needs flour and"


def taught(llm: LLM, spec: str, text: str, kept: LearnedFiles) -> Drafter:
    """A drafter that has learned from an answer, which was saved."""
    drafter = build_drafter(spec, llm.engine.target)
    answer(llm, drafter, text=text)
    while drafter.study():
        pass
    assert kept.save([drafter]) == 1
    return drafter


def read_tokens(path: Path) -> list[int]:
    return [int(token) for token in load_file(path)["tokens"]]


def test_a_few_tokens_are_not_worth_a_file(sibyl: LLM, keeping: LearnedFiles) -> None:
    answer(sibyl, build_drafter("suffix", sibyl.engine.target), params=replace(PARAMS, max_tokens=2))
    assert sibyl.save_learned() == 0


def test_counts_of_another_order_are_another_identity(sibyl: LLM) -> None:
    target = sibyl.engine.target
    assert NGram(target, order=3).identity != NGram(target).identity


def test_a_name_that_no_directory_can_have() -> None:
    with pytest.raises(DrafterError, match=r"keep what drafters learn \(embedded null byte\)"):
        LearnedFiles("a\0b")
