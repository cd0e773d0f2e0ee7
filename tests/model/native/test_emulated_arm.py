"""The kernels for ARM, from a cross compiler, in an emulator: AVX2's bits, and the tests of all kernels.

Emulation shows bits and the choice of a set. It shows no times, and has the host's order of memory.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from places import ROOT

from soothsay.model.native.library import FAMILIES

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
NATIVE, OWN = ROOT / "tests" / "model" / "native", Path(__file__).parents[2] / "helpers"
DIFFERENT = {"linear_2_5", "linear_4", "linear_6_16", "attention", "support"}
"""Files that differ between the sets. The others are compiled once, to save minutes."""

PLUGINS = ("-p", "emulated", "-p", "no:cacheprovider")
CHOSEN = " or ".join(
    ["equal_bits", "rows", "glue", "draws", "largest", "convolution", "program", "bfloat16", "1x1x32"]
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the harness and the library of each set, or that of `SOOTHSAY_ARM_LIBRARIES`."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no emulated ARM: {tool} is not installed")
    folder = tmp_path_factory.mktemp("arm")
    subprocess.run([COMPILER, "-O2", OWN / "emulated.cpp", "-o", folder / "harness"], check=True)
    if prebuilt := os.environ.get("SOOTHSAY_ARM_LIBRARIES"):
        for name in FAMILIES["arm"]:
            shutil.copy(Path(prebuilt) / f"_{name}.abi3.so", folder / f"{name}.so")
        return folder
    with patch.dict(os.environ, _PYTHON_HOST_PLATFORM="linux-aarch64"), patch("setuptools.setup"):
        flags = runpy.run_path(str(ROOT / "setup.py"))
    sources = sorted((ROOT / "csrc").glob("*.cpp"))
    jobs = [
        (name, source)
        for source in sorted(
            sources, key=lambda source: -source.stat().st_size * source.stem.startswith("linear_")
        )
        for name in (FAMILIES["arm"] if source.stem in DIFFERENT else ["portable"])
    ]

    def compile_one(job: tuple[str, Path]) -> None:
        name, source = job
        own = [*flags["FLAGS"], "-O1", *flags["VARIANTS"][name], "-fPIC"]
        command = [COMPILER, *own, "-c", source, "-o", folder / f"{source.stem}.{name}.o"]
        subprocess.run(command, check=True, capture_output=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    for name in FAMILIES["arm"]:
        each = {source.stem: name if source.stem in DIFFERENT else "portable" for source in sources}
        objects = [folder / f"{stem}.{own}.o" for stem, own in each.items()]
        command = [COMPILER, "-shared", *objects, *flags["LINK_FLAGS"], "-o", folder / f"{name}.so"]
        subprocess.run(command, check=True)
    return folder


def environment(folder: Path, name: str, cpu: str, system: Path = SYSTEM) -> dict[str, str]:
    paths = [str(ROOT / "src"), str(OWN)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "EMULATED_VARIANT": name,
        "EMULATED_LIBRARY": str(folder / f"{name}.so"),
        "EMULATED_COMMAND": f"{EMULATOR} -L {system} -cpu {cpu} {folder / 'harness'}",
    }


@pytest.mark.parametrize("name", FAMILIES["arm"])
def test_kernels(folder: Path, name: str) -> None:
    """All of `test_equal_bits.py`, and the other tests that emulation does not stretch to minutes."""
    command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, "-k", CHOSEN, NATIVE]
    own = environment(folder, name, "max")
    run = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def runs(folder: Path, name: str, cpu: str, system: Path = SYSTEM) -> str:
    """What the library of a set says of an emulated processor: 0, 1 or 2, as `soothsay_runs_here` does."""
    code = """
import os, shlex
from ctypes import c_int
from emulated import EmulatedLibrary
own = EmulatedLibrary(shlex.split(os.environ["EMULATED_COMMAND"]), os.environ["EMULATED_LIBRARY"])
asks = own.soothsay_runs_here
asks.restype, asks.argtypes = c_int, []
print(asks())
own.close()
"""
    command = [sys.executable, "-c", code]
    own = environment(folder, name, cpu, system)
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [("cortex-a72", "0001"), ("neoverse-n1", "0011"), ("max", "1111")],
)
def test_a_processor_gets_what_it_has(folder: Path, cpu: str, expected: str) -> None:
    assert "".join(runs(folder, name, cpu) for name in FAMILIES["arm"]) == expected


@pytest.mark.parametrize("maker", [0x51, 0x61], ids=["Qualcomm", "Apple"])
def test_matrix_products_gain_nothing_on_some_cores(folder: Path, maker: int, tmp_path: Path) -> None:
    for part in SYSTEM.iterdir():
        (tmp_path / part.name).symlink_to(part)
    own = tmp_path / "sys/devices/system/cpu/cpu0/regs/identification"
    own.mkdir(parents=True)
    (own / "midr_el1").write_text(f"{maker << 24 | 1:#018x}\n")
    assert "".join(runs(folder, name, "max", tmp_path) for name in FAMILIES["arm"]) == "2211"
