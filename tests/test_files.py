"""Files are replaced whole: a failure leaves the old content, and nothing else."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from soothsay.files import replacing, write_bytes, write_json, write_text


def test_content_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_text(file, "wörld\n")
    assert file.read_bytes() == "wörld\n".encode()
    write_bytes(file, b"\x00\xff")
    assert file.read_bytes() == b"\x00\xff"
    write_json(file, {"a": [1]}, indent=2)
    assert json.loads(file.read_text()) == {"a": [1]}
    assert file.read_text().endswith("}\n")
    assert [*tmp_path.iterdir()] == [file]


def test_the_old_content_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with replacing(file) as temporary:
        temporary.write_text("half")
        assert file.read_text() == "old"
        assert temporary.parent == tmp_path  # a rename needs the same file system
        temporary.write_text("new")
    assert file.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_content_alone(error: type[BaseException], tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")

    def write_half() -> None:
        with replacing(file) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def test_content_reaches_the_disk_before_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash after the rename could leave an empty file under the name."""
    file, order = tmp_path / "a", list[str]()
    flush, rename = os.fsync, Path.replace

    def note_flush(descriptor: int) -> None:
        order.append("flush")
        flush(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "replace", note_rename)
    write_text(file, "new")
    assert order == ["flush", "rename"]


def test_permissions(tmp_path: Path) -> None:
    def mode(file: Path) -> int:
        return stat.S_IMODE(file.stat().st_mode)

    plain, secret = tmp_path / "plain", tmp_path / "secret"
    plain.touch()
    usual = mode(plain)
    write_text(tmp_path / "new", "x")
    assert mode(tmp_path / "new") == usual
    write_text(secret, "x", mode=0o600)
    assert mode(secret) == 0o600
    write_text(secret, "y")
    assert mode(secret) == 0o600  # kept
    plain.chmod(0o644)
    write_text(plain, "x", mode=0o600)
    assert mode(plain) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "a", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_a_device_is_written_to() -> None:
    write_text(Path("/dev/null"), "x")
    assert not Path("/dev/null").is_file()
