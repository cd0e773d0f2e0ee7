"""NOTICE names all weights and texts that come along, and goes into the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from places import ROOT

PACKED = (".safetensors", ".store", ".gz")
FOLDERS = sorted(
    {
        folder / file.relative_to(folder).parts[0]
        for folder in (ROOT / "src" / "soothsay" / "bundled", ROOT / "training")
        for file in folder.rglob("*")
        if file.suffix in PACKED
    }
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_with_weights_or_texts_is_named(folder: Path) -> None:
    assert f"\n{folder.relative_to(ROOT).as_posix()}: " in (ROOT / "NOTICE").read_text()


def test_notice_and_licence_go_into_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["license-files"]) == {"LICENSE", "NOTICE"}
