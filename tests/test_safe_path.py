"""Processes that are started in a folder do not run the Python files in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

MODULES = ("json", "numpy", "random", "selectors", "sitecustomize", "socket", "struct", "torch", "soothsay")
SCRIPT = """
from soothsay.cli.app import main
if __name__ == "__main__":
    main()
"""
"""What `pip` installs as the command `soothsay`. Python looks for modules in the folder of a script."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules that leave a file if they run. There is no such file yet."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    for name in MODULES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})")
    monkeypatch.chdir(folder)
    return ran


def script(folder: Path, text: str) -> list[str]:
    """The command that runs a script, which lies in a folder of its own."""
    file = folder / "bin" / "script.py"
    file.parent.mkdir()
    file.write_text(text)
    return [sys.executable, str(file)]


def test_a_server_runs_nothing_of_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    options = ["serve", "sibyl", "--port", "0", "--dtype", "int8"]
    with subprocess.Popen(
        [*script(tmp_path, SCRIPT), *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stderr is not None
            lines = (json.loads(line) for line in process.stderr)
            url = next(line["address"] for line in lines if line["event"] == "listening")
            body = {"prompt": "A man", "max_tokens": 4, "structured_outputs": {"choice": ["yes"]}}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == "yes"
        finally:
            process.kill()
    assert not hostile.exists(), hostile.read_text()


STAGE = """
from soothsay.model.pipeline import pipeline
pipeline._start().close()
"""
"""Waits until the process has started, has been told that nobody has layers for it, and has ended."""


def test_a_stage_of_a_script_runs_nothing_of_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    subprocess.run(script(tmp_path, STAGE), check=True)
    assert not hostile.exists(), hostile.read_text()
