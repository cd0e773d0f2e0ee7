"""Memory of this machine."""

from pathlib import Path

import pytest

from soothsay.machine import usable_memory

MEMINFO = {"proc/meminfo": "MemTotal:   8000 kB\nMemFree: 10 kB\nMemAvailable:   4000 kB\n"}
NONE = "9223372036854771712\n"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
CGROUP = "31 24 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n"


def v2(folder: str, limit: object, usage: int = 0, high: object = "max", stat: str = "") -> dict[str, str]:
    top = f"{V2}/{folder}"
    return {
        f"{top}/memory.max": f"{limit}\n",
        f"{top}/memory.high": f"{high}\n",
        f"{top}/memory.current": f"{usage}\n",
        f"{top}/memory.stat": stat,
    }


def v1(folder: str, limit: object, usage: int = 0, stat: str = "") -> dict[str, str]:
    top = f"{V1}/{folder}"
    return {
        f"{top}/memory.limit_in_bytes": f"{limit}\n",
        f"{top}/memory.usage_in_bytes": f"{usage}\n",
        f"{top}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "free", "whole"),
    [
        ({}, 4_096_000, "this machine's 0.0 GB"),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", "max", 3_000_000)}, 4_096_000, "machine"),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", 3_000_000, 1_000_000)}, 2_000_000, "control group"),
        ({"proc/self/cgroup": "0::/\n", **v2("", 3_000_000, 1_000_000)}, 2_000_000, "control group"),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", 9_000_000, 1_000, high=50_000)}, 49_000, "control group"),
        (
            {"proc/self/cgroup": "0::/a/b/c\n", **v2("a", 500_000, 300_000), **v2("a/b", 400_000, 100_000)},
            200_000,
            "control group",
        ),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                **v2("a", 500_000, 400_000, stat="anon 7\nactive_file 90000\ninactive_file 10000\nshmem 9\n"),
            },
            200_000,
            "control group",
        ),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", 500_000, 600_000)}, 0, "control group"),
        ({"proc/self/cgroup": "0::/../elsewhere\n", **v2("", 500_000)}, 500_000, "control group"),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", "none", -3, "\0", "x\n\ny z\n")}, 4_096_000, "machine"),
        ({"proc/self/cgroup": "nonsense\n\n:\n", **v2("a", 500_000)}, 4_096_000, "machine"),
        (
            {
                "proc/self/cgroup": "9:cpu:/x\n4:memory,hugetlb:/m/n\n0::/\n",
                **v1("m/n", NONE, 900),
                **v1("m", 500_000, 400_000, "active_file 1\ntotal_active_file 0\ntotal_inactive_file 50000"),
                **v1("", NONE, 500_000),
                **v1("x", 1),
            },
            150_000,
            "control group",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x\n",
                **v1("", NONE, 1_000, "hierarchical_memory_limit 90000"),
            },
            89_000,
            "control group",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x/inner\n",
                "proc/self/mountinfo": CGROUP
                + "nonsense\n35 31 0:32 /docker/x /mnt/mem rw shared:1 - cgroup cgroup rw,memory\n",
                "mnt/mem/inner/memory.limit_in_bytes": "70000",
            },
            70_000,
            "control group",
        ),
        (
            {
                "proc/self/cgroup": "0::/x\n",
                "proc/self/mountinfo": CGROUP + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 none rw\n",
                **v2("unified/x", 80_000),
            },
            80_000,
            "control group",
        ),
        (
            {
                "proc/self/limits": "Limit\nMax address space         900000   unlimited    bytes\n",
                "proc/self/status": "VmSize:\t 100 kB\n",
            },
            797_600,
            "ulimit -v",
        ),
        (
            {
                "proc/self/limits": "Max data size   90000  90000 bytes\nMax address space  unlimited x\n",
                "proc/self/status": "VmData:\t 1000 kB\n",
            },
            0,
            "ulimit -d",
        ),
    ],
    ids=[
        "no limit", "max", "version 2", "own top", "high", "nested", "page cache", "overrun", "not seen",
        "garbage", "garbage of groups", "version 1", "limit outside", "place of the mount", "both versions",
        "address space", "data",
    ],
)  # fmt: skip
def test_free_memory_is_what_the_tightest_limit_leaves(
    files: dict[str, str], free: int, whole: str, tmp_path: Path
) -> None:
    for name, text in {**MEMINFO, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = usable_memory(tmp_path)
    assert memory.free == free
    assert whole in memory.whole


def test_a_system_that_says_nothing_has_4_gib(tmp_path: Path) -> None:
    assert usable_memory(tmp_path).free == 2**32
