"""The machine: its memory, its processor, and its directory for caches."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from soothsay.own_process import SYSTEM, group_folders, numbers_of, text_of

if TYPE_CHECKING:
    import torch

RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""What the system takes back from a control group that needs memory: mostly what it has read of files."""


class Memory(NamedTuple):
    """Memory that this process may use. The smallest of several is the one that counts."""

    free: int  # bytes that can be allocated without swapping
    whole: str  # what it is a part of, in words


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, and without being killed by a limit."""
    return usable_memory().free


def usable_memory(root: Path = SYSTEM) -> Memory:
    """The memory of this machine, or of what limits this process further: a control group or `ulimit`.

    It is 4 GiB if the system does not tell.

    Args:
        root: see `SYSTEM`.
    """
    machine = numbers_of(root / "proc/meminfo", ":")
    free = machine.get("MemAvailable", 2**22) * 1024  # none: not Linux
    whole = f"this machine's {machine.get('MemTotal', 2**22) * 1024 / 1e9:,.1f} GB"
    return min([Memory(free, whole), *_granted_to_groups(root), *_granted_to_process(root)])


def memory_of(device: torch.device) -> Memory:
    """The memory that pools on a device may use."""
    if device.type != "cuda":
        return usable_memory()
    import torch

    free, whole = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch holds it
    return Memory(free + idle, f"the {whole / 1e9:,.1f} GB of {torch.cuda.get_device_name(device)}")


def _granted_to_groups(root: Path) -> Iterator[Memory]:
    """What control groups of versions 1 and 2 allow."""
    for folder in group_folders("memory", root):
        stat = numbers_of(folder / "memory.stat")
        limits = [text_of(folder / f"memory.{name}").strip() for name in ("max", "high", "limit_in_bytes")]
        limits.append(str(stat.get("hierarchical_memory_limit", "")))
        limit = min((int(limit) for limit in limits if limit.isdecimal()), default=None)
        if limit is not None:
            used = (text_of(folder / f"memory.{name}").strip() for name in ("current", "usage_in_bytes"))
            # version 1 counts the groups inside apart
            back = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in RECLAIMABLE)
            usage = max(sum(int(text) for text in used if text.isdecimal()) - back, 0)
            whole = f"the {limit / 1e9:,.1f} GB of a control group (of a container, for example)"
            yield Memory(max(limit - usage, 0), whole)


def _granted_to_process(root: Path) -> Iterator[Memory]:
    """What `ulimit` allows."""
    sizes, limits = numbers_of(root / "proc/self/status", ":"), text_of(root / "proc/self/limits")
    for name, size, option in (("address space", "VmSize", "-v"), ("data size", "VmData", "-d")):
        if found := re.search(rf"^Max {name} +(\d+)", limits, re.MULTILINE):
            limit = int(found[1])
            whole = f"the {limit / 1e9:,.1f} GB of ulimit {option}"
            yield Memory(max(limit - sizes.get(size, 0) * 1024, 0), whole)


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


def processor_seconds_of_others() -> float | None:
    """Processor seconds that other processes of this machine have used so far. None: it does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system
