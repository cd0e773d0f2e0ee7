"""What a tag releases: a source distribution with all files, whose tests run, and a wheel made from it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
import yaml
from places import ROOT
from test_docs import Block, parse

import soothsay

MOST = 100 * 2**20
"""Bytes of a wheel or a source distribution: what package indexes take."""

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def done(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder, on the packages of its own. Returns what it prints; fails with that.

    A wheel gets the kernels of all instruction sets, as with `make dist`.
    """
    result = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | {"SOOTHSAY_KERNELS": "all"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_tests_of_a_source_distribution_run_with_a_wheel_made_from_it(tmp_path: Path) -> None:
    build = sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path
    done(*build, "--sdist", ROOT, folder=tmp_path)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        files = {name.partition("/")[2] for name in archive.getnames() if name.count("/")}
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"soothsay-{soothsay.__version__}"
    if (ROOT / ".git").exists():
        assert {*done("git", "ls-files", folder=ROOT).splitlines()} <= files
    assert not [name for name in files if name.endswith((".so", ".pyc"))]
    done(*build, "--wheel", unpacked, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert max(packed.stat().st_size, wheel.stat().st_size) < MOST
    done(sys.executable, "-m", "twine", "check", "--strict", packed, wheel, folder=tmp_path)

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = done(python, "-c", where, folder=tmp_path).strip()
    packages = [place for place in sys.path if place.endswith("site-packages")]
    (Path(own) / "dependencies.pth").write_text("\n".join(packages))
    done(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, folder=tmp_path)
    where = "import soothsay; print(soothsay.__file__)"
    assert done(python, "-c", where, folder=unpacked).startswith(own)
    done(python, "-m", "pytest", "tests/core", "tests/test_docs.py", "tests/test_release.py", folder=unpacked)


def test_the_libraries_need_no_new_system() -> None:
    """The C library of 2021 (glibc 2.34), and none of C++."""
    for file in (ROOT / "src" / "soothsay" / "model" / "native").glob("_*.so"):
        content = file.read_bytes()
        needed = {tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", content)}
        assert max(needed) <= (2, 34), file.name
        assert b"libstdc++.so" not in content


LACKING = """
import os, sys, torch
for name in ("fcntl", "grp", "pty", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("O_CLOEXEC", "O_NOFOLLOW", "fork", "getuid", "register_at_fork", "sched_getaffinity"):
    delattr(os, name)
from soothsay.cli.app import main
main()
"""
"""Runs a command without what Python lacks on Windows."""


def test_what_wheels_are_asked_has_an_answer_without_what_windows_lacks() -> None:
    """Windows itself was never tried."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    program, *arguments = shlex.split(settings["test-command"])
    assert program == "soothsay"
    command = [sys.executable, "-c", LACKING, *arguments, "--kernels", "stock"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def test_the_workflow_runs_commands_that_exist() -> None:
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    commands = Block(ROOT, 0, "sh", "\n".join(step.get("run", "") for step in steps), None).commands
    for program, *arguments in commands:
        name = Path(program).name
        if name == "soothsay":
            parse(arguments)
        elif name == "make":
            done("make", "--dry-run", arguments[-1], folder=ROOT)
        elif program.startswith(".ci/"):
            assert (ROOT / program).is_file()
        else:
            assert name in ("pip", "cibuildwheel", "rm", "tar", "gh", "CI=true")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what the release's notes are made of, at version 2.0.0, which may be released."""
    for name, text in {
        "src/soothsay/__init__.py": '__version__ = "2.0.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 2.0.0 (2026-12-01)\n\nNew.\n\n## 1.0.0 (2026-11-01)\n\nOld.\n",
        "pyproject.toml": '[project.urls]\nIssues = "https://soothsay.test/issues"\n',
        ".ci/release-notes": (ROOT / ".ci" / "release-notes").read_text(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def notes(repository: Path, tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release-notes", tag]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def test_notes_are_the_section_of_the_version(repository: Path) -> None:
    assert notes(repository, "v2.0.0").stdout == "New.\n"


@pytest.mark.parametrize(
    ("tag", "file", "old", "new", "reason"),
    [
        ("v2.0.1", "CHANGELOG.md", "", "", "the tag v2.0.1 is not v2.0.0"),
        ("v2.0.0", "CHANGELOG.md", "(2026-12-01)", "(unreleased)", "CHANGELOG.md needs one section"),
        ("v2.0.0", "pyproject.toml", "soothsay.test", "example.org/soothsay", "[project.urls]"),
    ],
)
def test_what_is_not_ready_is_not_released(
    repository: Path, tag: str, file: str, old: str, new: str, reason: str
) -> None:
    path = repository / file
    path.write_text(path.read_text().replace(old, new))
    result = notes(repository, tag)
    assert result.returncode != 0
    assert result.stderr.startswith(reason)


def test_the_changelog_has_the_version() -> None:
    assert f"\n## {soothsay.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
