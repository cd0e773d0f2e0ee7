"""The output file of a batch, and the file beside it that says what its answers depend on.

Each answer is one line, which is written at once. If the process is killed, only the last line can be torn.
It is dropped when the batch goes on.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from soothsay.errors import RequestError
from soothsay.files import write_json
from soothsay.server.batch.batch_lines import BatchLine, Keys
from soothsay.server.http.json_streams import to_line
from soothsay.server.http.safe_json import JsonError, read_json

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
        with self._writing():
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self._state = self._read_state() if os.path.getsize(path) else {}
            self.keys, self.failed = self._read_answers()
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
                first = self._state.get(name)
                raise RequestError(
                    f"{self.path} was begun with another {name}: {first}, and now it is {value}. "
                    "Use the first one again, or write to another file"
                )

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
        self.failed += status != OK
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
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another process writes {self.path}; wait for its end, or end it") from None

    def _read_state(self) -> dict[str, Any]:
        """The state of an output that has answers."""
        try:
            with self.state_path.open("rb") as file:
                state = read_json(file.read(MAX_STATE))
        except FileNotFoundError:
            raise RequestError(
                f"{self.path} exists, and there is no {self.state_path.name} that says how it was made; "
                "write to another file, or remove it"
            ) from None
        except (OSError, JsonError) as error:
            raise RequestError(f"{self.state_path} cannot be read ({error})") from None
        if not isinstance(state, dict) or not state:
            raise RequestError(f"{self.state_path} is not the state of a batch; write to another file")
        return state

    def _read_answers(self) -> tuple[Keys, int]:
        """The keys of all answers, and how many of them are errors. Cuts off a torn last line."""
        keys, failed, end = array("Q"), 0, 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file, end)
                    break
                found = ANSWER.fullmatch(line)
                if found is None:
                    raise RequestError(
                        f"line {number} of {self.path} is not an answer of a batch; remove the line, "
                        "or write to another file"
                    )
                keys.append(int(found[1], 16))
                failed += int(found[2]) != OK
                end += len(line)
        return np.frombuffer(keys, np.uint64), failed

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be written ({error.strerror or error}). The answers in it are kept: "
                "once it can be written, the same command goes on"
            ) from None
