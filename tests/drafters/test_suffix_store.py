"""`auto` drafts from the texts that a target has beside its weights, or that come with the package."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams
from soothsay.cli.app import app
from soothsay.config import EngineConfig
from soothsay.drafters.base import Target
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.learned_files import read_learned
from soothsay.drafters.lookup.suffix_matching import Suffix, TextMemory
from soothsay.drafters.lookup.text_store import write_texts
from soothsay.drafters.places import SHIPPED, suffix_store
from soothsay.drafters.registry import build_drafter

QUESTION = [{"role": "user", "content": "Say something about the river."}]


def suffix_of(auto: object) -> Suffix:
    assert isinstance(auto, Controller)
    assert isinstance(auto.parts[0], Suffix)
    return auto.parts[0]


def test_answers_that_were_kept_are_drafted_from_and_change_nothing(sibyl: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    plain = sibyl.chat(QUESTION, params, drafter="none")
    answers = tmp_path / "answers.jsonl"
    conversation = [*QUESTION, {"role": "assistant", "content": plain.text}]
    answers.write_text(json.dumps({"messages": conversation}) + "\n")
    store = tmp_path / "drafters" / "suffix.store"
    result = CliRunner().invoke(app, ["train", "suffix", "sibyl", str(answers), "--out", str(store)])
    assert result.exit_code == 0, result.output
    assert "1 answers" in result.output
    beside = replace(sibyl.engine.target, path=tmp_path)
    assert suffix_store(beside) == store
    auto = build_drafter("auto", beside)
    assert suffix_of(auto).store == store
    said = sibyl.chat(QUESTION, params, drafter=suffix_of(auto))
    assert said.token_ids == plain.token_ids
    assert said.stats.steps < 20, "32 tokens that were said before"


def test_a_store_that_cannot_be_read_is_left_out_and_named(sibyl: LLM, tmp_path: Path) -> None:
    store = tmp_path / "drafters" / "suffix.store"
    store.parent.mkdir()
    write_texts(store, [], "another vocabulary")
    beside = replace(sibyl.engine.target, path=tmp_path)
    with pytest.warns(UserWarning, match="auto goes without .*suffix.store: .*another vocabulary"):
        auto = build_drafter("auto", beside)
    assert suffix_of(auto).store == ""


def test_a_target_without_texts_has_no_store(sibyl: LLM) -> None:
    assert suffix_store(sibyl.engine.target) is None
    assert suffix_store(replace(sibyl.engine.target, path=None)) is None


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [*zip(SHIPPED, (500_000, 341_806), strict=True)],
    ids=[*SHIPPED.values()],
)
def test_texts_of_the_package_are_whole_and_of_their_vocabulary(vocabulary: str, tokens: int) -> None:
    class Shipped(Target):
        vocabulary = ""

    Shipped.vocabulary = vocabulary
    store = suffix_store(Shipped(None, None, EngineConfig(), 0))  # type: ignore[arg-type]
    assert store is not None
    texts = read_learned(store, Suffix.kind, vocabulary)  # checks the digest too
    assert len(texts["tokens"]) == texts["lengths"].sum() == tokens
    assert store.stat().st_size < 3_000_000


def test_a_reset_does_not_read_a_store_again(sibyl: LLM, tmp_path: Path) -> None:
    """It would be read beside what runs next, and slow that down."""
    store = tmp_path / "suffix.store"
    write_texts(store, [np.arange(50)], sibyl.engine.target.vocabulary)
    drafter = Suffix(sibyl.engine.target, store=store)
    store.unlink()
    drafter.reset()
    drafter.save(tmp_path / "kept")
    texts = read_learned(tmp_path / "kept", Suffix.kind, drafter.identity)
    assert texts["tokens"].tolist() == list(range(50))


def test_a_reset_waits_until_the_store_is_read(
    sibyl: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rest is read beside what runs next, and slows that down."""
    store, read = tmp_path / "suffix.store", TextMemory.read
    ended: list[int] = []
    write_texts(store, [np.arange(50)], sibyl.engine.target.vocabulary)

    def slow(self: TextMemory, most: int) -> int:
        time.sleep(0.2)
        done = read(self, most)
        ended.append(done)
        return done

    monkeypatch.setattr(TextMemory, "read", slow)
    drafter = Suffix(sibyl.engine.target, store=store)
    assert ended == []
    drafter.reset()
    assert ended == [50]
