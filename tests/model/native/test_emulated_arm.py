"""The kernels for ARM, from a cross compiler, in an emulator: AVX2's bits, and the tests of all kernels.

Emulation shows bits and the choice of a set. It shows no times, and has the host's order of memory.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import pytest
from emulated import EmulatedLibrary
from places import ROOT

from soothsay.model.native.library import FAMILIES

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
NATIVE, OWN = ROOT / "tests" / "model" / "native", Path(__file__).parents[2] / "helpers"
DIFFERENT = {"linear_2_5", "linear_4", "linear_6_16", "attention", "support"}
"""Files that differ between the sets. The others are compiled once, to save minutes."""

LEVEL = "-O1"
"""For compiling is half of the time."""

PLUGINS = ("-p", "emulated", "-p", "no:cacheprovider")
OWN_KERNELS = (
    "test_equal_bits or (test_attention and 1x1x32) or (test_linear and bfloat16 and not bfloat16-2)"
    " or either_dtype or different_kinds"
)
SHARED_KERNELS = (
    "test_rows or test_experts or (test_glue and not 128 and not 256) or (test_program and int4)"
    " or (test_largest and not 151) or (race and not 4096) or (fewest_bytes and 200-512)"
    " or (test_convolution and float32) or (test_token_rules and float32)"
)
"""Tests of the files in `DIFFERENT`, for each set, and of the others, for one. QEMU computes each product of
bfloat16 by itself, so more heads in that type take minutes."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with the harness and the library of each set. It stays in `build` until a source changes."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no emulated ARM: {tool} is not installed")
    with patch.dict(os.environ, _PYTHON_HOST_PLATFORM="linux-aarch64"), patch("setuptools.setup"):
        flags = runpy.run_path(str(ROOT / "setup.py"))
    sources, harness = sorted((ROOT / "csrc").glob("*.cpp")), OWN / "emulated.cpp"
    read = [*sources, *sorted((ROOT / "csrc").glob("*.h")), harness, ROOT / "setup.py"]
    digest = sha256(b"".join(file.read_bytes() for file in read) + LEVEL.encode()).hexdigest()
    folder = ROOT / "build" / f"arm-{digest[:16]}"
    done = folder / "done"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (name, source)
        for source in sorted(
            sources, key=lambda source: -source.stat().st_size * source.stem.startswith("linear_")
        )
        for name in (FAMILIES["arm"] if source.stem in DIFFERENT else ["portable"])
    ]

    def compile_one(job: tuple[str, Path]) -> None:
        name, source = job
        own = [*flags["FLAGS"], LEVEL, *flags["VARIANTS"][name], "-fPIC"]
        command = [COMPILER, *own, "-c", source, "-o", folder / f"{source.stem}.{name}.o"]
        subprocess.run(command, check=True, capture_output=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    subprocess.run([COMPILER, "-O2", harness, "-o", folder / "harness"], check=True)
    for name in FAMILIES["arm"]:
        each = {source.stem: name if source.stem in DIFFERENT else "portable" for source in sources}
        objects = [folder / f"{stem}.{own}.o" for stem, own in each.items()]
        command = [COMPILER, "-shared", *objects, *flags["LINK_FLAGS"], "-o", folder / f"{name}.so"]
        subprocess.run(command, check=True)
    done.touch()
    return folder


def emulator(folder: Path, cpu: str, system: Path = SYSTEM) -> list[str]:
    """Starts the harness on an emulated processor."""
    return [EMULATOR, "-L", str(system), "-cpu", cpu, str(folder / "harness")]


@pytest.mark.parametrize("name", FAMILIES["arm"])
def test_kernels(folder: Path, name: str) -> None:
    """Each type of weights against AVX2's bits, and a small case of each other kernel."""
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(OWN)]),
        "EMULATED_VARIANT": name,
        "EMULATED_LIBRARY": str(folder / f"{name}.so"),
        "EMULATED_COMMAND": shlex.join(emulator(folder, "max")),
    }
    chosen = f"{OWN_KERNELS} or {SHARED_KERNELS}" if name == "portable" else OWN_KERNELS
    command = [sys.executable, "-m", "pytest", *PLUGINS, "-k", chosen, NATIVE]  # quiet already
    run = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def runs(folder: Path, name: str, cpu: str, system: Path = SYSTEM) -> int:
    """What the library of a set says of an emulated processor: 0, 1 or 2, as `soothsay_runs_here` does."""
    library = EmulatedLibrary(emulator(folder, cpu, system), str(folder / f"{name}.so"))
    try:
        return library.call("soothsay_runs_here", [], [])
    finally:
        library.close()


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [("cortex-a72", "0001"), ("neoverse-n1", "0011"), ("max", "1111")],
)
def test_a_processor_gets_what_it_has(folder: Path, cpu: str, expected: str) -> None:
    assert "".join(str(runs(folder, name, cpu)) for name in FAMILIES["arm"]) == expected


@pytest.mark.parametrize("maker", [0x51, 0x61], ids=["Qualcomm", "Apple"])
def test_matrix_products_gain_nothing_on_some_cores(folder: Path, maker: int, tmp_path: Path) -> None:
    for part in SYSTEM.iterdir():
        (tmp_path / part.name).symlink_to(part)
    own = tmp_path / "sys/devices/system/cpu/cpu0/regs/identification"
    own.mkdir(parents=True)
    (own / "midr_el1").write_text(f"{maker << 24 | 1:#018x}\n")
    assert "".join(str(runs(folder, name, "max", tmp_path)) for name in FAMILIES["arm"]) == "2211"
