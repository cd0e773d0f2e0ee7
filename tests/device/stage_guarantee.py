"""The tests of the guarantee on the device, in several processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from job import Job, Numbers

ROOT = Path(__file__).parents[2]
WORKERS = 8
SPARE = 6
"""Seconds at the end in which nothing is tested any more."""

CHOSEN = (
    *("TestEveryDrafter", "mixed_batch", "priorities", "come_and_go", "another_engine"),
    *("chunks_that_depend", "n_answers", "a_seed_gives"),
)
"""Tests of the bundled model. The others make models that are on the CPU."""

OUTCOME = re.compile(r"^\[gw\d+\].*?(PASSED|FAILED|ERROR) (\S.*)|^(tests/\S.*?) (PASSED|FAILED|ERROR)", re.M)


def measure(job: Job) -> Numbers:
    """How many tests passed, and which failed."""
    yield "tests", lambda: _test(job)


def _test(job: Job) -> dict[str, Any]:
    chosen = ["-k", "a_seed_gives", "-n", "0"] if job.dry else ["-k", " or ".join(CHOSEN), "-n", str(WORKERS)]
    command = [sys.executable, "-m", "pytest", "tests/test_guarantee.py", "-v", "-m", "slow or not slow"]
    # what warns on a device must not end a test, and nothing is written beside the tests
    command += [*chosen, "-o", "filterwarnings=default", "-o", "addopts=", "-p", "no:cacheprovider"]
    log = job.out / "guarantee-tests.log"
    with log.open("w") as output:
        running = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            running.wait(job.left - SPARE)
        except subprocess.TimeoutExpired:
            running.terminate()
    text = log.read_text(errors="replace")
    found = [(a or d, b or c) for a, b, c, d in OUTCOME.findall(text)]
    wrong = sorted({name for outcome, name in found if outcome != "PASSED"})
    passed = len({name for outcome, name in found if outcome == "PASSED"} - set(wrong))
    ended = running.returncode is not None
    return {"passed": passed, "all were run": ended, "failed": wrong, "none failed": passed > 0 and not wrong}
