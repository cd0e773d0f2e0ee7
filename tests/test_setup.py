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

from soothsay.model.native.library import FAMILIES, VARIANTS


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


def build(folder: Path, faked: str = "", **variables: str) -> tuple[list[str], set[str]]:
    """The lines that are printed, and the names of the libraries that there are then.

    Args:
        faked: statements that change what Python says of this machine.
    """
    code = f"import platform, runpy; {faked}\nrunpy.run_path('setup.py')"
    command = [sys.executable, "-c", code, "build_ext", "--build-lib", "built"]
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


def strict_compiler(folder: Path, refused: str, removed: str = "nothing") -> dict[str, str]:
    """Variables for a compiler that refuses an argument, and ignores those that begin with another."""
    script = folder / "strict-c++"
    script.write_text(
        f"""#!{sys.executable}
import subprocess, sys
if {refused!r} in sys.argv: sys.exit("unknown argument {refused}")
kept = [argument for argument in sys.argv[1:] if not argument.startswith({removed!r})]
sys.exit(subprocess.run(["c++", *kept]).returncode)
"""
    )
    script.chmod(0o755)
    return {
        "CC": str(script),
        "CXX": str(script),
        "LDSHARED": f"{script} -shared",
        "LDCXXSHARED": f"{script} -shared",
    }


def test_macos_is_not_asked_for_what_its_linker_refuses(sources: Path) -> None:
    strict = strict_compiler(sources, "-Wl,--gc-sections")
    _, built = build(sources, "platform.system = lambda: 'Darwin'", **strict)
    assert built
    shutil.rmtree(sources / "built")
    lines, built = build(sources, **strict)
    assert not built
    assert "--gc-sections" in lines[-1] or "compiler does not work" in lines[-1]


def test_windows_is_told_that_it_has_no_kernels(sources: Path) -> None:
    lines, built = build(sources, "platform.system = lambda: 'Windows'")
    assert not built
    assert lines == [
        "native kernels: none, so PyTorch's slower operations are used (they are not written for Windows yet)"
    ]


@pytest.mark.parametrize(
    ("faked", "variables"),
    [
        ("platform.machine = lambda: 'arm64'", {}),
        ("", {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}),
    ],
    ids=["native", "cross"],
)
def test_arm_has_instruction_sets_of_its_own(sources: Path, faked: str, variables: dict[str, str]) -> None:
    strict = strict_compiler(sources, "-mavx2", removed="-march=armv8")
    _, built = build(sources, faked, SOOTHSAY_KERNELS="all", **strict, **variables)
    assert built == set(FAMILIES["arm"])


def test_a_set_that_is_no_faster_is_not_compiled(sources: Path) -> None:
    """As matrix products on Apple's cores."""
    (sources / "csrc" / "support.cpp").write_text(
        """
#if defined(__AVX2__)
extern "C" int soothsay_runs_here() { return 2; }
#else
extern "C" int soothsay_runs_here() { return 1; }
#endif
"""
    )
    assert build(sources)[1] == {"portable"}


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
