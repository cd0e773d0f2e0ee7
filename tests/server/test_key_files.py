"""Files of API keys that are broken, missing, hostile or open to others."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from serving import serving

from soothsay.files import locked
from soothsay.server.access.accounts import Key
from soothsay.server.access.api_keys import (
    MAX_FILE,
    MAX_KEYS,
    KeyFileError,
    KeyRing,
    add_key,
    read_keys,
    remove_key,
)

HASH = "0" * 64
ENTRY: dict[str, Any] = {"name": "alice", "sha256": HASH}


def written(path: Path, content: str | bytes | object) -> Path:
    """A file of keys with some content."""
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens_per_minute": "100"}, r"entry 2 \('alice'\)\.tokens_per_minute: it must be an integer"),
        ({"tokens_per_minute": 0}, r"tokens_per_minute: it must be at least 1"),
        ({"requests_per_minute": 1.5}, r"entry 2 \('alice'\)\.requests_per_minute"),
        ({"requests_per_minute": True}, r"requests_per_minute"),
        ({"running": -1}, r"running"),
        ({"priority": 2**31}, r"priority"),
        ({"priority": None}, r"priority"),
        ({"trace": 1}, r"trace: it must be true or false"),
        ({"operator": "yes"}, r"operator"),
        ({"sha256": 5}, r"sha256"),
        ({"sha256": "0"}, r"sha256"),
        ({"sha256": HASH.replace("0", "G")}, r"sha256"),
        ({"name": ["alice"]}, r"entry 2\.name"),
        ({"name": ""}, r"name"),
        ({"name": "a" * 300}, r"name"),
        ({"limits": 5}, r"limits"),
        ({"name": "bob"}, "two entries have the same name"),
        ({"sha256": "1" * 64}, "two entries have the same sha256"),
    ],
    ids=str,
)
def test_wrong_entries_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    first = {"name": "bob", "sha256": "1" * 64}
    file = written(tmp_path / "keys.json", {"keys": [first, {**ENTRY, **change}]})
    with pytest.raises(KeyFileError, match=f"keys.json is not a file of API keys: .*{said}"):
        read_keys(file)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        {},
        {"keys": {}},
        {"keys": [None]},
        {"keys": ["alice"]},
        {"keys": [[ENTRY]]},
        {"keys": [ENTRY], "more": 1},
        {"keys": [{**ENTRY, "name": f"{n}", "sha256": f"{n:064x}"} for n in range(MAX_KEYS + 1)]},
        '{"keys": [], "keys": []}',
        "[" * 100_000,
        b"\xff",
        b'{"keys": [' + b" " * MAX_FILE + b"]}",
        json.dumps({"keys": [{**ENTRY, "running": 5}]}).replace("5", "9" * 5000),
    ],
    ids=range(16),
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(KeyFileError, match="is not a file of API keys"):
        read_keys(written(tmp_path / "keys.json", content))


def test_devices_and_folders_are_no_files_of_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(KeyFileError):
            read_keys(path)


@pytest.mark.parametrize(
    "grants", [{"running": 0}, {"priority": -(2**31) - 1}, {"trace": "yes"}, {"more": 1}]
)
def test_wrong_grants_are_not_written(tmp_path: Path, grants: dict[str, Any]) -> None:
    with pytest.raises(KeyFileError, match=next(iter(grants))):
        add_key(tmp_path / "keys.json", "a", **grants)
    with pytest.raises(KeyFileError, match="name"):
        add_key(tmp_path / "keys.json", "\udc80")
    assert not (tmp_path / "keys.json").exists()


def test_grants_are_kept(tmp_path: Path) -> None:
    grants: dict[str, Any] = {"running": 2, "priority": -3, "trace": True, "operator": True}
    add_key(tmp_path / "keys.json", "a", **grants)
    (key,) = read_keys(tmp_path / "keys.json")
    assert key == Key(name="a", sha256=key.sha256, **grants)
    plain = Key(name="a", sha256=key.sha256)
    assert (plain.priority, plain.trace, plain.operator, plain.running) == (0, False, False, None)


def test_no_key_is_added_that_would_make_the_file_unreadable(tmp_path: Path) -> None:
    entries = [{**ENTRY, "name": f"{n}", "sha256": f"{n:064x}"} for n in range(MAX_KEYS - 1)]
    file = written(tmp_path / "keys.json", {"keys": entries})
    add_key(file, "last")
    with pytest.raises(KeyFileError, match="more are not possible"):
        add_key(file, "beyond")
    assert len(read_keys(file)) == MAX_KEYS


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    file, secrets = tmp_path / "keys.json", list[str]()
    for number in range(20):
        add_key(file, f"old {number}")
    slow = partial(slowly, read_keys)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(40) as threads:
        patch.setattr("soothsay.server.access.api_keys.read_keys", slow)
        added = [threads.submit(add_key, file, f"new {number}") for number in range(20)]
        removed = [threads.submit(remove_key, file, f"old {number}") for number in range(20)]
        secrets = [future.result() for future in added]
        assert [future.result() for future in removed] == [None] * 20
    ring = KeyRing(file)
    assert all(ring.find(secret) for secret in secrets)
    assert {key.name for key in read_keys(file)} == {f"new {number}" for number in range(20)}


def slowly(read: Callable[[Path], list[Key]], path: Path) -> list[Key]:
    keys = read(path)
    time.sleep(0.005)
    return keys


def test_a_change_waits_for_another_process_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "alice")
    before = file.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(file)
    monkeypatch.setattr("soothsay.server.access.api_keys.PATIENCE", 0.03)
    with locked(tmp_path / ".keys.json.lock"):
        for change in (partial(add_key, file, "bob"), partial(remove_key, link, "alice")):
            with pytest.raises(KeyFileError, match="another process changes"):
                change()
    assert file.read_bytes() == before
    add_key(link, "bob")
    assert link.is_symlink()
    assert len(read_keys(file)) == 2


@pytest.mark.parametrize("name", ["none/keys.json", "file/keys.json"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeyFileError, match=r"keys\.json cannot be changed .* its folder"):
        add_key(tmp_path / name, "alice")


def test_a_key_keeps_its_account_and_a_name_does_not(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = add_key(file, "alice", tokens_per_minute=100, running=2)
    ring = KeyRing(file)
    account = ring.find(secret)
    assert account is not None
    account.tokens.charge(90)
    (key,) = read_keys(file)
    changed = key.model_copy(update={"name": "al", "tokens_per_minute": 50, "running": 9})
    written(file, {"keys": [changed.model_dump()]})
    assert ring.find(secret) is account
    assert account.key == changed
    assert account.tokens.wait() == pytest.approx(41 / 50 * 60, rel=0.01), "90 are spent"
    remove_key(file, "al")
    again = add_key(file, "al", tokens_per_minute=50)
    assert ring.find(secret) is None
    other = ring.find(again)
    assert other is not None
    assert other is not account
    assert other.tokens.wait() == 0


def test_another_file_of_the_same_size_and_time_is_read(tmp_path: Path) -> None:
    """As `cp -p` and `rsync -t` leave it. A key that was revoked must not stay valid."""
    file, other = tmp_path / "keys.json", tmp_path / "other.json"
    old, new = add_key(file, "alice"), add_key(other, "alice")
    ring, about = KeyRing(file), file.stat()
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert ring.find(old) is None
    assert ring.find(new) is not None


BREAK: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "broken": lambda file: written(file, "{"),
    "wrong type": lambda file: written(file, {"keys": [{**ENTRY, "tokens_per_minute": "many"}]}),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", BREAK.values(), ids=BREAK)
def test_no_key_is_valid_while_the_file_is_broken(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    now, file = [0.0], tmp_path / "keys.json"
    secret = add_key(file, "alice")
    good = file.read_bytes()
    ring = KeyRing(file, clock=lambda: now[0])
    account = ring.find(secret)
    assert account is not None
    damage(file)
    for now[0] in (1.0, 1.1, 5.0):
        with pytest.raises(KeyFileError, match=r"keys\.json"):
            ring.find(secret)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1  # once a change, not once a request
    if file.is_dir():
        file.rmdir()
    written(file, good)
    now[0] = 6.0
    assert ring.find(secret) is account  # with what is left of its limits


def test_a_file_that_could_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "keys.json"
    secret = add_key(file, "alice")
    ring = KeyRing(file, clock=lambda: now[0])
    reads: list[Path] = []

    def failing(path: Path) -> list[Key]:
        reads.append(path)
        raise KeyFileError("too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("soothsay.server.access.api_keys.read_keys", failing)
        os.utime(file, (1, 1))
        for now[0] in (1.0, 1.5, 1.9):
            with pytest.raises(KeyFileError):
                ring.find(secret)
    assert len(reads) == 1  # not at every request
    now[0] = 2.0
    assert ring.find(secret) is not None


def test_files_that_others_can_read_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    secret = add_key(file, "alice")
    ring = KeyRing(file)
    assert not caplog.records
    file.chmod(0o640)
    for _ in range(3):
        assert ring.find(secret)
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "other users have access" in warning.getMessage()
    assert vars(warning)["mode"] == "640"


def test_the_server_says_that_it_cannot_read_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = add_key(file, "alice")
    good = file.read_bytes()
    headers = {"Authorization": f"Bearer {secret}"}
    with serving(engines.sibyl, KeyRing(file)) as running:
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200
        written(file, {"keys": [{**ENTRY, "tokens_per_minute": []}]})
        for given in (headers, {}, {"Authorization": "Bearer wrong"}):
            reply = httpx.get(f"{running.url}/v1/models", headers=given)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "keys_unreadable")
            assert reply.json()["error"]["message"] == "the server cannot read its API keys"
            assert "keys.json" not in reply.text
        assert httpx.get(f"{running.url}/ready").status_code == 503
        assert httpx.get(f"{running.url}/health").status_code == 200  # a restart would not help
        written(file, good)
        assert httpx.get(f"{running.url}/ready").status_code == 200
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == 200
