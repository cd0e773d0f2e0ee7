"""The cores that a process may use, and how processes of one machine share them. Without torch."""

from __future__ import annotations

import fcntl
import math
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path


def granted_processors(root: Path = Path("/")) -> int:
    """Physical cores that this process may use, by affinity and control groups' quotas. At least 1.

    Args:
        root: of the file system that has `proc` and `sys`.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(_cores(root)), _processor_quota(root))))


def claim_cores(count: int, folder: Path | None = None) -> Sequence[int]:
    """Pin this process to physical cores that no other process has claimed, until it ends.

    A claim is a lock on a file, which the system releases when the process ends, however it ends. If fewer
    cores are free, or the system has no affinity, nothing is pinned.

    Args:
        count: number of physical cores.
        folder: for the locks; None: one of this user in the folder for temporary files.

    Returns:
        The numbers of the processors that this process runs on now; empty: nothing was pinned.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return ()
    folder = folder or Path(tempfile.gettempdir()) / f"soothsay-cores-{os.getuid()}"
    claimed: list[int] = []
    locks: list[int] = []
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or not stat.S_ISDIR(folder.lstat().st_mode):
            return ()  # another user's
        for name, numbers in sorted(_cores(Path("/")).items()):
            lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            locks.append(lock)
            claimed += numbers
            if len(locks) == count:
                os.sched_setaffinity(0, claimed)
                return claimed
    except OSError:
        pass
    for lock in locks:
        os.close(lock)
    return ()


def _cores(root: Path) -> dict[str, list[int]]:
    """The processors that this process may run on, by physical core. Names are of the core's processors."""
    topology = root / "sys/devices/system/cpu"
    cores: dict[str, list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        name = _first_line(topology / f"cpu{number}/topology/thread_siblings_list") or str(number)
        cores.setdefault(name, []).append(number)
    return cores


def _processor_quota(root: Path) -> float:
    """Processors that control groups (version 1 and 2) grant to this process; infinity without a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    granted = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 names no controllers.
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # a container sees its own group at the top
            if controllers:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                fields = [_first_line(top / folder / name) for name in names]
            else:
                fields = _first_line(top / folder / "cpu.max").split()
            if len(fields) == 2 and all(field.isdigit() and int(field) for field in fields):
                granted = min(granted, int(fields[0]) / int(fields[1]))
    return granted


def _first_line(file: Path) -> str:
    """The first line of a small file; empty if it cannot be read."""
    try:
        with file.open() as text:
            return text.readline(4096).strip()
    except OSError:
        return ""
