"""This process: its heap, its control groups, and where the Python processes that it starts find modules."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

TIDY_INTERVAL = 30.0
"""Seconds between two returns of freed memory to the system. One takes some milliseconds. Texts and batches
of all sizes leave gaps in the heap, which otherwise grows for hours."""


def return_freed_memory() -> None:
    """Return freed memory to the system.

    The GNU allocator keeps freed memory. After many large tensors of different sizes, the gaps that it keeps
    add up to a good part of a model. Other allocators return memory by themselves.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


SYSTEM = Path("/")
"""The root of the file system that has `proc` and `sys`."""


def group_folders(controller: str, root: Path = SYSTEM) -> Iterator[Path]:
    """The folders of this process's groups and of the groups around them, in versions 1 and 2.

    A process sees only a part of the groups in a container. A folder may lack the files of a controller.

    Args:
        controller: such as "memory".
        root: see `SYSTEM`.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue  # version 2 names no controllers
        top, place = _mount(controller if controllers else "", root)
        try:
            group = PurePosixPath(path).relative_to(place)
        except ValueError:  # not visible here
            group = PurePosixPath()
        for folder in (group, *group.parents):
            yield root / top / folder


def text_of(file: Path) -> str:
    """The text of a file of the system; empty if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def numbers_of(file: Path, separator: str | None = None) -> Mapping[str, int]:
    """The numbers in a file with a name and a number in each line, as far as they are such."""
    pairs = (line.split(separator, 1) for line in text_of(file).splitlines())
    words = {pair[0]: pair[1].split() for pair in pairs if len(pair) == 2}
    return {name: int(value[0]) for name, value in words.items() if value and value[0].isdecimal()}


def _mount(controller: str, root: Path) -> tuple[str, str]:
    """Where a hierarchy is mounted, below `root`, and which of its groups is there. "": version 2."""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2:
            is_mount = kind[0] == "cgroup" and controller in kind[2].split(",")
            if is_mount if controller else kind[0] == "cgroup2":
                return fields[4].lstrip("/"), fields[3]
    return f"sys/fs/cgroup/{controller}", "/"


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The variable that forbids it, to the processes of a process too."""


def module_environment() -> dict[str, str]:
    """Variables for a process `python -m MODULE`. It finds the modules that this process finds."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, **SAFE_PATH}
