"""Heads that come with the package are found by targets that they fit, and by no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from places import ROOT

from soothsay import LLM
from soothsay.config import EngineConfig
from soothsay.drafters import registry
from soothsay.drafters.base import NoDrafter, Target
from soothsay.drafters.places import HEADS_FOR, SHIPPED, drafter_directory
from soothsay.drafters.registry import build_drafter
from soothsay.errors import MissingDrafterError

BUNDLED = ROOT / "src" / "soothsay" / "bundled"
SMOLLM2 = next(vocabulary for vocabulary, folder in SHIPPED.items() if folder == "smollm2")


def target(layers: int, hidden: int, path: Path | None = None, vocabulary: str = SMOLLM2) -> Target:
    class Known(Target):
        pass

    Known.vocabulary = vocabulary  # type: ignore[assignment, method-assign]
    model = cast(Any, SimpleNamespace(spec=SimpleNamespace(num_layers=layers, hidden_size=hidden)))
    return Known(model, None, EngineConfig(), 0, path)


def test_a_target_that_a_head_fits_finds_it() -> None:
    found = drafter_directory("eagle3", "", target(30, 576))
    assert found == BUNDLED / "smollm2" / "drafters" / "eagle3"
    assert (found / "config.json").is_file()


def test_auto_has_it_as_a_candidate(sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    known, c = sibyl.engine.target, sibyl.model.spec
    monkeypatch.setitem(SHIPPED, known.vocabulary, "smollm2")
    monkeypatch.setitem(HEADS_FOR, "smollm2", (c.num_layers, c.hidden_size))
    monkeypatch.setattr(registry, "suffix_store", lambda _: None)
    alone = replace(known, path=None)
    assert drafter_directory("eagle3", "", alone).is_dir()
    monkeypatch.setitem(registry.REGISTRY, "eagle3", NoDrafter)  # the head itself is for another vocabulary
    auto = build_drafter("auto", alone)
    assert [part.name for part in auto.parts] == ["suffix", "eagle3"]  # type: ignore[attr-defined]


def test_one_beside_the_target_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "drafters" / "eagle3"
    own.mkdir(parents=True)
    assert drafter_directory("eagle3", "", target(30, 576, tmp_path)) == own


@pytest.mark.parametrize(
    "other", [target(32, 576), target(30, 960), target(30, 576, vocabulary="of another model")]
)
def test_other_targets_do_not(other: Target, tmp_path: Path) -> None:
    with pytest.raises(MissingDrafterError):
        drafter_directory("eagle3", "", other)
    with pytest.raises(MissingDrafterError):
        drafter_directory("medusa", "", target(30, 576))


def test_every_folder_with_heads_says_what_they_are_for() -> None:
    folders = {folder for folder in SHIPPED.values() if (BUNDLED / folder / "drafters").is_dir()}
    assert folders <= HEADS_FOR.keys()
    for folder in folders:
        size = sum(file.stat().st_size for file in (BUNDLED / folder).rglob("*") if file.is_file())
        assert size < 22_000_000
