"""Between requests: drafters learn, and what was learned is saved."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from encoder_decoders import random_sequence_oracle
from families import load

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.drafters import learned_files
from soothsay.drafters.learned_files import LearnedFiles
from soothsay.server.engines import idle_work
from soothsay.server.engines.engine_messages import RequestOptions, Submit
from soothsay.server.engines.idle_work import BUSY_FACTOR, SAVE_INTERVAL, STUDY_PAUSE, IdleWork
from soothsay.server.engines.worker import Worker


class FakeEngine:
    """Counts saves, and has some pieces to learn."""

    def __init__(self, pieces: int = 0) -> None:
        self.kept, self.saves, self.broken, self.pieces = object(), 0, False, pieces

    def study(self) -> bool:
        self.pieces = max(self.pieces - 1, 0)
        return self.pieces > 0

    def save_learned(self) -> int:
        self.saves += 1
        if self.broken:
            raise DrafterError("the disk is full")
        return 1


def test_it_saves_after_an_interval_with_steps() -> None:
    now, engine = [0.0], FakeEngine()
    work = IdleWork(engine, lambda: now[0])  # type: ignore[arg-type]
    work.run()
    assert work.seconds_to_next() is None
    work.after_step()
    work.run()
    assert work.seconds_to_next() == SAVE_INTERVAL
    now[0] = SAVE_INTERVAL - 1
    work.run()
    assert engine.saves == 0
    now[0] = SAVE_INTERVAL + 1
    assert work.seconds_to_next() == 0
    work.run()
    assert engine.saves == 1
    assert work.seconds_to_next() is None, "nothing was served since"


def test_drafters_learn_in_idle_time_until_nothing_waits() -> None:
    engine = FakeEngine(pieces=3)
    work = IdleWork(engine, lambda: 0.0)  # type: ignore[arg-type]
    work.after_step()
    for left in (2, 1, 0):
        assert work.seconds_to_next() == STUDY_PAUSE
        work.run()
        assert engine.pieces == left
    assert work.seconds_to_next() == SAVE_INTERVAL


def test_passes_are_measured_before_the_first_request() -> None:
    engine = FakeEngine(pieces=2)
    work = IdleWork(engine, lambda: 0.0)  # type: ignore[arg-type]
    assert work.seconds_to_next() == STUDY_PAUSE
    work.run()
    work.run()
    assert engine.pieces == 0
    assert work.seconds_to_next() is None


def test_a_busy_engine_saves_too_and_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    now, engine = [0.0], FakeEngine()
    engine.broken = True
    work = IdleWork(engine, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        now[0] += BUSY_FACTOR * SAVE_INTERVAL + 1
        for _ in range(5):
            work.after_step()
    assert engine.saves == 3, "a full disk does not delay each step"
    assert vars(caplog.records[0])["reason"] == "the disk is full"


def test_nothing_is_due_where_nothing_is_kept() -> None:
    now, engine = [0.0], FakeEngine()
    engine.kept = None
    work = IdleWork(engine, lambda: now[0])  # type: ignore[arg-type]
    now[0] = 1e9
    work.after_step()
    work.run()
    assert work.seconds_to_next() is None
    assert engine.saves == 0


@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_a_worker_saves_in_idle_time_and_at_its_end(
    sibyl: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float
) -> None:
    monkeypatch.setattr(idle_work, "SAVE_INTERVAL", interval)
    monkeypatch.setattr(learned_files, "LEAST_BYTES", 0)
    llm = LLM(sibyl.model, tokenizer=sibyl.tokenizer, drafter="suffix", keep=tmp_path, kv_tokens=1024)
    inbox, saved = SimpleQueue[Any](), list[int]()

    def tell(message: Any) -> None:
        if interval and 0 in getattr(message, "ended", ()):
            inbox.put(None)

    def save(self: LearnedFiles, drafters: Any) -> int:
        saved.append(1)
        inbox.put(None)
        return original(self, drafters)

    original = LearnedFiles.save
    monkeypatch.setattr(LearnedFiles, "save", save)
    prompt = llm.tokenizer.encode("A man")  # type: ignore[union-attr]
    inbox.put(Submit(0, [prompt], SamplingParams(max_tokens=4, ignore_eos=True), RequestOptions()))
    Worker(llm, tell, inbox).run()
    assert len(saved) == (1 if interval else 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_an_encoder_decoder_shows_its_bits_by_an_answer(tmp_path: Path) -> None:
    random_sequence_oracle("t5").save_pretrained(tmp_path)
    float32, rounded = (
        idle_work.numerics(LLM(load(tmp_path, dtype), drafter="none", kv_tokens=256))
        for dtype in ("float32", "int8")
    )
    assert float32.probe
    assert float32.probe != rounded.probe
