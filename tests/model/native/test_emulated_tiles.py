"""The kernels for AMX on a processor without it: its instructions are emulated, and the same tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import soothsay
from soothsay.model.native.native_kernels import NativeKernels

FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]
SETS = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx512bf16"]
EMULATED = ["-D__AMX_INT8__", "-D__AMX_BF16__", "-include", str(Path(__file__).with_name("emulated_tiles.h"))]


def compiled(folder: Path) -> Path:
    """The library for AMX, with its instructions emulated."""
    objects = []
    for source in sorted((ROOT / "csrc").glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        emulated = [] if source.stem == "support" else EMULATED  # which would ask the processor for AMX
        flags = [*FLAGS, *(f"-m{name}" for name in SETS), *emulated]
        subprocess.run(["g++", *flags, "-c", source, "-o", objects[-1]], check=True)
    library = folder / "tiles.so"
    subprocess.run(["g++", "-shared", *objects, "-o", library], check=True)
    return library


@pytest.mark.slow
def test_kernels_for_tiles(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    try:
        NativeKernels("avx512bf16")
    except OSError as error:
        pytest.skip(f"the emulation needs avx512bf16: {error}")
    package = tmp_path / "src" / "soothsay"
    shutil.copytree(Path(soothsay.__file__).parent, package, ignore=shutil.ignore_patterns("*.so", "bundled"))
    native = package / "model" / "native"
    shutil.copy(compiled(tmp_path), native / "_amx.abi3.so")
    for other in Path(soothsay.__file__).parent.glob("model/native/_avx2.*"):  # whose bits are compared
        shutil.copy(other, native)
    paths = [
        ROOT / "tests" / "model" / "native",
        ROOT / "tests" / "model" / "formats" / "test_gguf_blocks.py",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "amx", *paths],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
