"""The machine: its memory, its processor, and its directory for caches."""

from __future__ import annotations

import math
import mmap
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def available_memory() -> int:
    """Bytes that can be allocated without swapping; 4 GiB if the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return 4 * 2**30


def cache_directory() -> Path | None:
    """The directory for measurements of this machine: `$XDG_CACHE_HOME/soothsay`, or `~/.cache/soothsay`.

    None if the user has no home directory. The directory may not exist.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "soothsay"
    except RuntimeError:  # as in a container with a user id that has no name
        return None


def processor_name() -> str:
    """The processor's name, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor without a name
        return platform.processor()


def granted_processors(root: Path = Path("/")) -> int:
    """Physical cores that this process may use, by affinity and control groups' quotas. At least 1.

    Args:
        root: of the file system that has `proc` and `sys`.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    topology = root / "sys/devices/system/cpu"
    cores = {
        _first_line(topology / f"cpu{number}/topology/thread_siblings_list") or str(number)
        for number in os.sched_getaffinity(0)
    }
    return max(1, math.ceil(min(len(cores), _processor_quota(root))))


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


def mapped_zeros(shape: Sequence[int], dtype: torch.dtype, *, large_pages: bool = False) -> Tensor:
    """Allocate zeros in a memory mapping of their own.

    A page takes memory only once it is written to. Freeing the tensor returns all of it to the system.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        large_pages: whether to ask for large pages, where the system has them. For tensors that will be
            written to in most places.
    """
    if 0 in shape:  # which cannot be mapped
        return torch.zeros(shape, dtype=dtype)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **private)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(*shape)
