"""The control groups of this process. A container is one: it limits what its processes use of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

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
