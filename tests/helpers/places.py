"""The folders that tests read: the repository, and the data beside it."""

from __future__ import annotations

from pathlib import Path


def find_root(file: Path) -> Path:
    """Find the closest folder above `file` that has a pyproject.toml. Raises `FileNotFoundError`."""
    for folder in file.resolve().parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    raise FileNotFoundError(f"no folder above {file} has a pyproject.toml")


def find_shared(root: Path, chosen: str | None) -> Path | None:
    """Find the folder of shared data: `chosen` if given, else `shared` beside the repository at `root`.

    None if there is no folder beside the repository. Raises `FileNotFoundError` if `chosen` is no folder.
    """
    if chosen:
        folder = Path(chosen)
        if not folder.is_dir():
            raise FileNotFoundError(f"SOOTHSAY_SHARED names {folder}, which is no folder")
        return folder
    folder = root.parent / "shared"
    return folder if folder.is_dir() else None


ROOT = find_root(Path(__file__))
