"""The files of a batch: the lines of its input, its output, and what the answers depend on.

A batch reads one line at a time, within bounds, and again where it needs one again. It writes each answer as
one line. If the process is killed, only the last line can be torn. It is dropped when the batch goes on.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from soothsay.errors import RequestError
from soothsay.files import lock, write_json
from soothsay.server.http.api_errors import ApiError, unsupported
from soothsay.server.http.bodies import parse
from soothsay.server.http.json_streams import to_line
from soothsay.server.http.safe_json import JsonError, read_json
from soothsay.server.server_config import ServerConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""What a line may ask for. The server itself refuses embeddings, and says why."""

MAX_LINE = ServerConfig.max_body + 2**16
"""Limit of bytes in a line: the largest body, and what stands around it."""

Keys = npt.NDArray[np.uint64]


class _Fields(BaseModel):
    """The fields of a line. Whatever else is wrong with it, its error names the `custom_id`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Any = None
    url: Any = None
    body: Any = None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input.

    `key` is 64 bits that stand for the line: a digest of its `custom_id`, or of its number if it has none.
    """

    number: int  # from 1
    key: int
    custom_id: str | None
    url: str = ""
    body: Any = None
    error: ApiError | None = None  # why the server does not get it


class BatchInput:
    """A file of requests that was read once: the keys of its lines, and a digest of its content.

    It takes 8 bytes of memory for each line.

    Args:
        path: the file. Blank lines do not count.

    Raises `RequestError` if the file cannot be read, or two lines have the same `custom_id`.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            if not path.exists():
                raise RequestError(f"there is no file {path}")
            if not path.is_file():
                raise RequestError(f"{path} is not a file; a batch reads its input more than once")
            with path.open("rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            keys = array("Q", (line.key for line in self._lines()))
        except OSError as error:
            raise RequestError(f"{path} cannot be read ({error.strerror or error})") from None
        self.keys: Keys = np.frombuffer(keys, np.uint64)
        self._check_ids()

    def lines(self, wanted: Sequence[bool] | npt.NDArray[np.bool_]) -> Iterator[BatchLine]:
        """Yield the lines at which `wanted` is true. Raises `RequestError` if the file has changed."""
        left = int(np.count_nonzero(wanted))
        try:
            for line, key in zip(self._lines(wanted), self.keys[np.asarray(wanted)], strict=False):
                if line.key != key:
                    break
                left -= 1
                yield line
        except OSError as error:
            raise RequestError(f"{self.path} cannot be read ({error.strerror or error})") from None
        if left:
            raise RequestError(f"{self.path} was changed while the batch ran; restore it, and run it again")

    def unanswered(self, answered: Keys) -> npt.NDArray[np.bool_]:
        """At which lines there is no answer yet. Raises `RequestError` if an answer is of no line."""
        found = np.isin(self.keys, answered)
        if np.count_nonzero(found) != len(answered):
            problem = f"the output has two answers to one line of {self.path}, or an answer to none"
            raise RequestError(f"{problem}; write to another file")
        return ~found

    def _lines(self, wanted: Sequence[bool] | npt.NDArray[np.bool_] | None = None) -> Iterator[BatchLine]:
        with self.path.open("rb") as file:
            for index, (number, raw) in enumerate(_split(file)):
                if wanted is None or (index < len(wanted) and wanted[index]):
                    yield read_line(number, raw)

    def _check_ids(self) -> None:
        """Raise `RequestError` if two lines have the same `custom_id`."""
        if len(np.unique(self.keys)) == len(self.keys):
            return
        seen: dict[int, int] = {}  # by key: the number of the first line that has it
        used = [
            (line.custom_id or "", seen[line.key], line.number)
            for line in self._lines()
            if seen.setdefault(line.key, line.number) != line.number
        ]
        custom_id, first, second = used[0]
        shown = repr(custom_id if len(custom_id) <= 80 else f"{custom_id:.76} ...")
        more = f" (lines with a used id: {len(used)})" if len(used) > 1 else ""
        places = f"in line {first} and again in line {second}{more}"
        raise RequestError(f"{self.path} has the custom_id {shown} {places}; give each line an id of its own")


def read_line(number: int, raw: bytes | None) -> BatchLine:
    """The request of a line. What cannot be a request has an error. `raw` is None if the line is too long."""
    try:
        if raw is None:
            message = f"the line is longer than {MAX_LINE} bytes"
            raise ApiError(413, message, "request_too_large")
        fields = parse(raw, _Fields)
    except ApiError as error:
        placed = ApiError(error.status, f"line {number}: {error.message}", error.code, param=error.param)
        return BatchLine(number, _digest(str(number), b"line"), None, error=placed)
    key = _digest(fields.custom_id, b"custom_id")
    if (problem := _problem(fields)) is not None:
        return BatchLine(number, key, fields.custom_id, error=problem)
    return BatchLine(number, key, fields.custom_id, fields.url, fields.body)


def _problem(fields: _Fields) -> ApiError | None:
    """What is wrong with a line, apart from its body, which the server checks."""
    if fields.method != "POST":
        return ApiError(405, "method must be POST", "not_possible", param="method")
    if fields.url not in (*URLS, "/v1/embeddings"):
        return ApiError(404, f"url must be one of {', '.join(URLS)}", "not_found", param="url")
    if fields.body is None:
        return ApiError(400, "body: it is missing", "missing_required_parameter", param="body")
    if isinstance(fields.body, dict) and fields.body.get("stream") is True:
        return unsupported("stream", "a batch has no streams; leave stream out")
    return None


def _split(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers from 1. None stands for one that is too long."""
    for number in count(1):
        raw = file.readline(MAX_LINE + 1)
        if not raw:
            return
        if len(raw) > MAX_LINE:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE)
            yield number, None
        elif (line := raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip():
            yield number, line


def _digest(text: str, kind: bytes) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=kind).digest()
    return int.from_bytes(digest, "big")


OK = 200
"""Status of a line that was answered. All others have failed."""

ANSWER = re.compile(
    rb'\{"id":"batch_req_([0-9a-f]{16})","custom_id":(?:null|"(?:[^"\\]|\\.)*+"),'
    rb'"response":\{"status_code":([0-9]{3}),.*"error":null\}\n',
    re.DOTALL,
)
"""A whole line of the output, with its key and its status."""

MAX_STATE = 2**16
"""Limit of bytes in a state file. A usual one has less than 1,000."""

DIGEST = " (SHA-256)"
"""At the end of a name in a state: its value is a digest, which tells a user nothing."""

State = Mapping[str, str | int | None]
"""What all answers depend on, by names that users know."""


class BatchOutput:
    """The output file of a batch, locked against other processes. Opening it repairs its end.

    Args:
        path: the file; it is made if there is none.

    Raises `RequestError` if the file cannot be written, is in use, or is not the output of a batch.
    """

    def __init__(self, path: Path):
        self.path = path
        self.state_path = path.with_name(f"{path.name}.state")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            problem = f"{path} cannot be written ({error.strerror or error})"
            if not path.parent.is_dir():
                problem = f"there is no folder {path.parent} for {path.name}; make it first"
            raise RequestError(problem) from None
        try:
            self._lock()
            self._state = self._read_state() if os.path.getsize(path) else {}
            self.keys, self.failures = self._read_answers()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def check(self, state: State) -> None:
        """Raise `RequestError` if the answers in the file depend on something else than `state` says."""
        for name, value in state.items():
            if self._state and self._state.get(name) != value:
                what, digest, _ = name.partition(DIGEST)
                values = "" if digest else f": {self._state.get(name)}, and now it is {value}"
                problem = f"{self.path} was begun with another {what}{values}"
                raise RequestError(f"{problem}. Use the first one again, or write to another file")

    def begin(self, state: State) -> None:
        """Check a complete state, or write it if there is none. Call it before the first answer."""
        self.check(state)
        if not self._state:
            with self._writing():
                write_json(self.state_path, dict(state), indent=2)

    def write(self, line: BatchLine, status: int, body: Any) -> None:
        """Add the answer to a line. Raises `RequestError` if the file cannot be written."""
        key = f"{line.key:016x}"
        answer = {
            "id": f"batch_req_{key}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": f"req-{key}", "body": body},
            "error": None,
        }
        if status != OK:
            self.failures.append(line.key)
        text = memoryview(f"{to_line(answer)}\n".encode())
        with self._writing():
            while text:
                text = text[os.write(self._file, text) :]

    def sync(self) -> None:
        """Wait until all answers are on the disk."""
        with self._writing():
            os.fsync(self._file)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise RequestError(f"{self.path} is not a file; a batch reads its output when it goes on")
        try:
            lock(self._file)
        except BlockingIOError:
            raise RequestError(f"another process writes {self.path}; wait for its end, or end it") from None

    def _read_state(self) -> dict[str, Any]:
        """The state of an output that has answers."""
        try:
            with self.state_path.open("rb") as file:
                state = read_json(file.read(MAX_STATE))
        except FileNotFoundError:
            problem = f"{self.path} exists, and there is no {self.state_path.name} that says how it was made"
            raise RequestError(f"{problem}; write to another file, or remove it") from None
        except (OSError, JsonError) as error:
            raise RequestError(f"{self.state_path} cannot be read ({error})") from None
        if not isinstance(state, dict) or not state:
            raise RequestError(f"{self.state_path} is not the state of a batch; write to another file")
        return state

    def _read_answers(self) -> tuple[Keys, array[int]]:
        """The keys of all answers, and of those that are errors. Cuts off a torn last line."""
        keys, failures, end = array("Q"), array("Q"), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, end)
                    break
                found = ANSWER.fullmatch(line)
                if found is None:
                    problem = f"line {number} of {self.path} is not an answer of a batch"
                    raise RequestError(f"{problem}; remove the line, or write to another file")
                keys.append(int(found[1], 16))
                if int(found[2]) != OK:
                    failures.append(keys[-1])
                end += len(line)
        return np.frombuffer(keys, np.uint64), failures

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror or error}). The answers in it are kept"
            raise RequestError(f"{problem}: once it can be written, the same command goes on") from None
