"""The processors that the system grants, read from given files."""

import os
from pathlib import Path

import pytest

from soothsay.processors import granted_processors

SIBLINGS = {
    f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)
}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "6:cpuset:/s\n5:memory:/m\n4:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "1\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/s/cpu.cfs_quota_us": "1\n",
                "sys/fs/cgroup/cpu/s/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (SIBLINGS, 4),
    ],
    ids=["none", "parent", "half", "max", "version 1", "siblings"],
)  # fmt: skip
def test_granted_processors(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_processors(tmp_path) == expected
