"""The cores that a process may use, and how processes of one machine share them. Without torch."""

from __future__ import annotations

import ctypes
import math
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from soothsay.files import lock
from soothsay.own_process import SYSTEM, group_folders, text_of


def granted_processors(root: Path = SYSTEM) -> int:
    """Physical cores that this process may use, by affinity and control groups' quotas. At least 1.

    Args:
        root: see `SYSTEM`.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    return max(1, math.ceil(min(len(_cores(root)), _processor_quota(root))))


def use_threads(count: int | None) -> None:
    """Let this process compute with some threads.

    None: as many as PyTorch chooses, the physical cores, unless `granted_processors` are fewer: PyTorch does
    not know the quotas of control groups.
    """
    import torch

    if count is None and torch.get_num_threads() > (granted := granted_processors()):
        count = granted
    if count is not None:
        torch.set_num_threads(count)


_threads = threading.local()
"""`kept`: the number of threads of the kernels, while PyTorch has one. Each thread of Python has its own."""


def num_threads() -> int:
    """Threads in which kernels may compute for this thread."""
    from torch import get_num_threads  # here, since a command line has its options checked without torch

    return getattr(_threads, "kept", 0) or get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run PyTorch's operations in one thread, and the kernels in as many as before.

    Weights are unpacked by thousands of short operations. Several threads gain nothing there, and wait for
    each other where other processes need the cores. `torch.set_num_threads` would also limit the threads that
    a program starts meanwhile, so OpenMP is told. Where there is no OpenMP, nothing changes.
    """
    count = num_threads()
    try:
        use = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # the last one on Windows
        use = None
    if use is None or hasattr(_threads, "kept"):  # within another one
        yield
        return
    _threads.kept = count
    use(1)
    try:
        yield
    finally:
        use(count)
        del _threads.kept


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
        for name, numbers in sorted(_cores(SYSTEM).items()):
            file = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                lock(file)
            except BlockingIOError:
                os.close(file)
                continue
            locks.append(file)
            claimed += numbers
            if len(locks) == count:
                os.sched_setaffinity(0, claimed)
                return claimed
    except OSError:
        pass
    for file in locks:
        os.close(file)
    return ()


def _cores(root: Path) -> dict[str, list[int]]:
    """The processors that this process may run on, by physical core. Names are of the core's processors."""
    topology = root / "sys/devices/system/cpu"
    cores: dict[str, list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        name = text_of(topology / f"cpu{number}/topology/thread_siblings_list").strip() or str(number)
        cores.setdefault(name, []).append(number)
    return cores


def _processor_quota(root: Path) -> float:
    """Processors that control groups (version 1 and 2) grant to this process; infinity without a limit."""
    granted = math.inf
    for folder in group_folders("cpu", root):
        quota = text_of(folder / "cpu.max").split()
        quota = quota or [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(quota) == 2 and all(number.isdecimal() and int(number) for number in quota):
            granted = min(granted, int(quota[0]) / int(quota[1]))
    return granted
