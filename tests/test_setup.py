"""Installation compiles this machine's kernels, says so, and goes on without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from skips import has_compiler, is_x86

from soothsay.model.native.library import VARIANTS


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of setup.py with the file that asks the processor, and a small one in place of all others."""
    if not has_compiler():
        pytest.skip("no portable kernels: there is no compiler, so they are not compiled")
    (tmp_path / "csrc").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name in ("support.cpp", "kernels.h"):
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc")
    (tmp_path / "csrc" / "linear.cpp").write_text("int answer() { return 42; }\n")
    return tmp_path


def build(folder: Path, **variables: str) -> tuple[list[str], set[str]]:
    """The lines that are printed, and the names of the libraries that there are then."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", "built"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("running build_ext\n")
    built = (folder / "built").rglob("*.so")
    return done.stdout.splitlines()[1:], {file.name.removeprefix("_").partition(".")[0] for file in built}


def test_the_fastest_is_compiled_with_a_line_for_each_file(sources: Path) -> None:
    lines, built = build(sources)
    (name,) = built
    assert len(lines) == 3
    assert sorted(line.partition("] ")[2].partition(":")[0] for line in lines[:2]) == [
        f"csrc/linear.cpp, {name}",
        f"csrc/support.cpp, {name}",
    ]
    assert all(re.fullmatch(rf"\[{n}/2\] .*: \d+\.\d s", line) for n, line in enumerate(lines[:2], 1))
    assert lines[2] == f"native kernels: {name}"
    files = {file.name: file for file in (ROOT / "src" / "soothsay" / "model" / "native").glob("_*.so")}
    if len(files) == len(VARIANTS):  # all are compiled, so the best is what loads here
        from soothsay.model.native.native_kernels import load_native

        best = load_native()
        assert best is not None
        assert best.variant == name


def test_all_are_compiled_if_asked_for(sources: Path) -> None:
    lines, built = build(sources, SOOTHSAY_KERNELS="all")
    assert built == (set(VARIANTS) if is_x86() else {"portable"})
    assert len(lines) == 2 * len(built) + 1


def test_without_a_compiler_one_line_says_so(sources: Path) -> None:
    missing = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), "/nowhere/c++")
    lines, built = build(sources, **missing)
    assert not built
    (line,) = lines
    assert line.startswith("native kernels: none, so PyTorch's slower operations are used (")
    assert "/nowhere/c++" in line


def test_a_file_that_does_not_compile_ends_in_a_line(sources: Path) -> None:
    (sources / "csrc" / "linear.cpp").write_text("int answer() { return }\n")
    lines, built = build(sources)
    assert not built
    assert lines[-1] == "native kernels: none, so PyTorch's slower operations are used (see the errors above)"
