"""The folders that tests read are found from the repository's root."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT, find_root, find_shared


def test_root_is_the_closest_folder_with_a_project(tmp_path: Path) -> None:
    project = tmp_path / "projects" / "one"
    deep = project / "tests" / "a" / "b"
    deep.mkdir(parents=True)
    for folder in (project, tmp_path):
        (folder / "pyproject.toml").touch()
    for file in (deep / "test_x.py", project / "tests" / "conftest.py", project / "setup.py"):
        assert find_root(file) == project.resolve()
    assert (ROOT / "src" / "soothsay").is_dir()
    with pytest.raises(FileNotFoundError, match=r"no folder above .* has a pyproject\.toml"):
        find_root(Path(Path(tmp_path.anchor) / "x.py"))


def test_shared_data_lie_beside_the_repository_or_where_one_says(tmp_path: Path) -> None:
    root, beside, other = tmp_path / "one", tmp_path / "shared", tmp_path / "other"
    assert find_shared(root, None) is None
    beside.mkdir()
    other.mkdir()
    assert find_shared(root, None) == find_shared(root, "") == beside
    assert find_shared(root, str(other)) == other
    with pytest.raises(FileNotFoundError, match=r"SOOTHSAY_SHARED names .*none, which is no folder"):
        find_shared(root, str(tmp_path / "none"))
