"""Runs kernels of another processor in an emulator. `emulated.cpp` has the other half.

It is a pytest plugin too, with which the tests of this processor's kernels test the others. Environment
variables say what runs: `EMULATED_VARIANT` is an instruction set, `EMULATED_LIBRARY` its library, and
`EMULATED_COMMAND` starts the emulator with the harness.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shlex
import struct
import subprocess
import threading
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import pytest

FETCH, CHANGE, RESULT, COLLISION = range(4)
FETCHED = 2**16
"""Bytes that are sent together, if the memory that follows exists."""

_address_of = ctypes.CDLL(None).memmove  # of nothing: it returns where its first argument points to
_address_of.restype, _address_of.argtypes = c_void_p, [c_void_p, c_void_p, c_size_t]


class EmulatedFunction:
    """A function of an emulated library, called as those of ctypes are."""

    restype: type[Any] | None
    argtypes: Sequence[type[Any]]

    def __init__(self, library: EmulatedLibrary, name: str):
        self.library, self.name = library, name

    def __call__(self, *arguments: Any) -> int | None:
        integers, floats = list[int](), list[bytes]()
        for kind, value in zip(self.argtypes, arguments, strict=True):
            if kind in (c_float, c_double):
                floats.append(struct.pack("<d" if kind is c_double else "<f4x", value))
            else:
                number = _address_of(value, None, 0) if kind is c_void_p else int(value)
                integers.append((number or 0) % 2**64)
        result = self.library.call(self.name, integers, floats)
        return c_int(result % 2**32).value if self.restype is c_int else result


class EmulatedLibrary:
    """A library of kernels in an emulator. Its functions read and write the memory of this process."""

    def __init__(self, command: Sequence[str], file: str):
        self._command, self._lock = [*command, file], threading.Lock()
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self._start()

    def __getattr__(self, name: str) -> EmulatedFunction:
        function = EmulatedFunction(self, name)
        setattr(self, name, function)
        return function

    def close(self) -> None:
        """End the emulator."""
        self._process.communicate()
        os.close(self._memory)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )

    def call(self, name: str, integers: list[int], floats: list[bytes]) -> int:
        """Call a function. Raises `RuntimeError` if the emulator ends."""
        numbers = struct.pack("<16Q", *integers, *[0] * (16 - len(integers)))
        message = name.encode().ljust(64, b"\0") + numbers + b"".join(floats).ljust(64, b"\0")
        with self._lock:
            self._send(message)
            while True:
                what, address, size = struct.unpack("<3Q", self._receive(24))
                if what == FETCH:
                    data = os.pread(self._memory, FETCHED, address)
                    self._send(struct.pack("<Q", len(data)) + data)
                elif what == CHANGE:
                    ctypes.memmove(address, self._receive(size), size)
                elif what == COLLISION:  # the emulator itself lives there, in another place each time
                    self._start()
                    self._send(message)
                else:
                    return int(address)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"the emulator ended with status {self._process.wait()}")
        return data


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Put the emulated set in the place of this processor's own ones, but for those that a test names."""
    from soothsay.model.native import library

    variant, open_native = os.environ["EMULATED_VARIANT"], library._opened

    @cache
    def opened(name: str) -> EmulatedLibrary | ctypes.CDLL:
        if name != variant:
            return open_native(name)
        own = EmulatedLibrary(shlex.split(os.environ["EMULATED_COMMAND"]), os.environ["EMULATED_LIBRARY"])
        for function, result, arguments in library.signatures():
            declared = getattr(own, function)
            declared.restype, declared.argtypes = result, arguments
        if not own.soothsay_runs_here():
            raise OSError(f"this processor lacks {name}")
        atexit.register(own.close)
        return own

    library.VARIANTS, library._opened = (variant,), opened  # type: ignore[assignment]
