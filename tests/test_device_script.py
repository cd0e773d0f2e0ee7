"""The script that runs soothsay on a device: it runs without one, and bad stages cost only themselves."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

SCRIPT = ROOT / "tests" / "device" / "run.py"

STAGE = """
import os, time
def measure(job):
    yield "a number", 3
    yield "a check", False
    yield "a mistake", lambda: 1 / 0
    yield "another", lambda: {"nested": True}
    END
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dry(out: Path, *stages: str) -> dict[str, Any]:
    """Run stages, and return their results. None of them fails."""
    command = [sys.executable, SCRIPT, "--dry", "--out", out, "--work", out / "work", "--seconds", "1000"]
    ended = subprocess.run([*command, "--only", *stages], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    for name in stages:
        assert results["stages"][name]["numbers"], name
        assert f"== {name}: " in ended.stdout
    return results


def test_a_stage_runs_dry(tmp_path: Path) -> None:
    results = dry(tmp_path, "sweep")
    assert results["dry"]
    assert results["commit"]
    assert "('float', 128, 64): 1," in results["stages"]["sweep"]["numbers"]["MEASURED"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    ["setup", "kernels", "guarantee", "bandwidth", "engine", "baseline", "spec", "serve", "train"],
)
def test_each_stage_runs_dry(stage: str, tmp_path: Path) -> None:
    dry(tmp_path, stage)


def run(script: ModuleType, folder: Path, end: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a stage that ends in some way."""
    (folder / "stage_odd.py").write_text(STAGE.replace("END", end))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    asked = Namespace(out=folder, work=folder, dry=True, model="sibyl", questions=None)
    return script._run("odd", limit, asked)


@pytest.mark.parametrize("end", ["os._exit(3)", "raise KeyError('at the end')"])
def test_numbers_are_kept_whatever_comes_after_them(
    end: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(script, tmp_path, end, 100, monkeypatch)
    assert found["numbers"] == {"a number": 3, "a check": False, "another": {"nested": True}}
    problems = script._problems(found)
    assert problems[0] == "a mistake: ZeroDivisionError: division by zero"
    assert problems[-1] == "a check is wrong"
    assert len(problems) == 3
    if end == "os._exit(3)":
        assert found["failures"]["the stage"][0].startswith("ended with 3 after")
    else:
        assert problems[1] == "the stage: KeyError: 'at the end'"


def test_a_stage_that_hangs_is_stopped(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(script, tmp_path, "time.sleep(600)", 1, monkeypatch)
    assert found["failures"]["the stage"][0].startswith("was stopped after")
