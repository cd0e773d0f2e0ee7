"""`soothsay pull` as a process of its own, with a hub on this machine, under bad luck."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from commands import Command
from gguf_files import write_gguf

COMMIT = "1" * 40
FILE = "m.F32.gguf"


class Hub(ThreadingHTTPServer):
    """A model hub with one repository, org/m, that has one file."""

    def __init__(self, content: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.digest = content, hashlib.sha256(content).hexdigest()
        self.cut = len(content)  # bytes of the file after which connections end
        self.stall = False  # whether connections stay open there
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.begins: list[int] = []  # where answers with the file began
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        hub = self.server
        entry = {"type": "file", "path": FILE, "size": len(hub.content), "oid": "2" * 40}
        entry["lfs"] = {"oid": hub.digest, "size": len(hub.content), "pointerSize": 130}
        if path.startswith("/api/models/org/m/tree/"):
            self._send(json.dumps([entry]).encode(), {"content-type": "application/json"})
        elif path.startswith("/api/models/org/m"):
            about = {"id": "org/m", "sha": COMMIT, "siblings": [{"rfilename": FILE}]}
            self._send(json.dumps(about).encode(), {"content-type": "application/json"})
        elif path.startswith("/org/m/resolve/"):
            begin = int(self.headers.get("range", "bytes=0-").split("=")[1].split("-")[0])
            headers = {"etag": f'"{hub.digest}"', "x-linked-etag": f'"{hub.digest}"'}
            headers |= {"x-repo-commit": COMMIT, "x-linked-size": str(len(hub.content))}
            if with_body:
                hub.begins.append(begin)
                headers["content-range"] = f"bytes {begin}-{len(hub.content) - 1}/{len(hub.content)}"
            self._send(hub.content[begin:], headers, 206 if begin else 200, with_body)
            if with_body and hub.stall:
                hub.stalled.set()
                hub.go_on.wait()
        else:
            self.send_response(404)
            self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[: self.server.cut] if "etag" in headers else body)
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (file,) = write_gguf(tmp_path / "made" / FILE)
    server = Hub(file.read_bytes())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


Start = Callable[[str], Command]


@pytest.fixture
def start(tmp_path: Path, hub: Hub) -> Start:
    """A function that starts the command for a model."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9"}
    environment.pop("UV_DEFAULT_INDEX", None)
    return lambda model: Command("pull", model, environment=environment)


def finish(process: Command) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr in one line."""
    code, out, err = process.finish()
    return code, out.strip(), " ".join(err.split())


def test_a_model_of_the_hub(hub: Hub, start: Start) -> None:
    code, out, _ = finish(start("org/m"))
    assert code == 0
    path = Path(out)
    assert path.read_bytes() == hub.content

    path.resolve().write_bytes(bytes(len(hub.content)))  # as after a fault of the disk
    code, _, err = finish(start("org/m"))
    assert code == 2
    assert "'org/m' had files with a wrong digest (1); they are deleted. Try again" in err
    assert not path.exists()
    assert finish(start("org/m"))[:2] == (0, str(path))
    assert path.read_bytes() == hub.content
    hub.content = b""  # what is there needs no network
    assert finish(start("org/m"))[:2] == (0, str(path))


def test_a_wrong_file_from_the_hub(hub: Hub, start: Start) -> None:
    right = hub.content
    hub.content = right[:-1] + bytes([right[-1] ^ 1])
    code, out, err = finish(start("org/m"))
    assert (code, out) == (2, "")
    assert "files with a wrong digest" in err
    hub.content = right
    code, out, _ = finish(start("org/m:F32"))
    assert code == 0
    assert Path(out).read_bytes() == right


def test_ctrl_c(hub: Hub, start: Start, tmp_path: Path) -> None:
    hub.cut, hub.stall = len(hub.content) // 2, True
    process = start("org/m")
    assert hub.stalled.wait(120)
    process.send(signal.SIGINT)
    hub.go_on.set()
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert "soothsay pull org/m goes on where it stopped" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "hf").rglob(FILE))
    hub.cut, hub.stall = len(hub.content), False
    code, out, _ = finish(start("org/m"))
    assert code == 0
    assert Path(out).read_bytes() == hub.content


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/m:F32", "'org/m' is not a local path and could not be downloaded"),
        ("smollm2", "smollm2 could not be downloaded from http://127.0.0.1:9"),
    ],
)
def test_no_network(hub: Hub, start: Start, tmp_path: Path, model: str, message: str) -> None:
    hub.server_close()
    code, out, err = finish(start(model))
    assert (code, out) == (2, "")
    assert message in err
    assert "check the network" in err
    assert "Retrying" not in err  # a user waits for this message
    assert "Traceback" not in err
    assert not [file for file in tmp_path.rglob("*.gguf") if "made" not in file.parts]


def test_no_such_repository(start: Start) -> None:
    code, out, err = finish(start("org/other"))
    assert (code, out) == (2, "")
    assert "check the name" in err
    assert "network" not in err
