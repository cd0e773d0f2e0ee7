"""Run soothsay on a device, and write down what it does there: `run.py --out DIR`.

Each stage is a process with a limit of its own, so one that crashes or hangs costs nothing but itself.
`results.json` has what is known after each stage, and a short table is printed last. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATHS = ROOT / "src", ROOT / "tests" / "helpers", ROOT / "tests" / "model" / "gpu", HERE

STAGES = {"setup": 60, "kernels": 45, "guarantee": 60, "bandwidth": 85, "engine": 75, "baseline": 40}
"""Limits in seconds. A stage that ends earlier leaves its time to the others: `--seconds` bounds the sum."""

NAMED = {"spec": 400, "serve": 200, "train": 300, "sweep": 150}
"""Stages that run only if they are named, and their limits."""

LEAST = 8
"""Seconds that a stage needs to begin at all."""

DRY_SECONDS = 200
"""Limit of a stage in a dry run."""


def main() -> int:
    """Run the stages that were asked for. Returns the number of those in which something failed."""
    asked = _arguments()
    stages = asked.only or (["setup", "sweep"] if asked.sweep else [*STAGES])
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"commit": _commit(), "dry": asked.dry, "machine": _machine(), "stages": {}}
    end = time.monotonic() + asked.seconds
    for name in stages:
        limit = DRY_SECONDS if asked.dry else min((STAGES | NAMED)[name], end - time.monotonic())
        if limit < LEAST:
            found: dict[str, Any] = {"failures": {"the stage": ["no time was left"]}}
        else:
            found = _run(name, limit, asked)
        results["stages"][name] = found
        (asked.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    _print(results)
    return sum(bool(_problems(found)) for found in results["stages"].values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*STAGES, *NAMED]
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument("--seconds", type=float, default=330, help="limit of all stages together")
    parser.add_argument("--only", nargs="+", choices=known, metavar="STAGE", help=", ".join(known))
    parser.add_argument("--sweep", action="store_true", help="measure tiles and splits, and nothing else")
    parser.add_argument("--dry", action="store_true", help="show on a CPU that every stage runs")
    parser.add_argument("--model", default="smollm2", help="a model with a trained head: a path or a name")
    parser.add_argument("--questions", type=Path, help="Spec-Bench: JSON lines with category and turns")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "soothsay-device")
    return parser.parse_args()


def _run(name: str, limit: float, asked: argparse.Namespace) -> dict[str, Any]:
    """Run a stage in a process of its own, with all processes that it starts."""
    file, log = asked.out / f"{name}.json", asked.out / f"{name}.log"
    file.unlink(missing_ok=True)
    options = {"out": asked.out.resolve(), "work": asked.work.resolve(), "seconds": limit, "dry": asked.dry}
    options |= {"model": asked.model, "questions": asked.questions and asked.questions.resolve()}
    own = {"PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])}
    own |= {"SOOTHSAY_DEVICE": "cpu" if asked.dry else "cuda", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, HERE / "one_stage.py", name, file, json.dumps(options, default=str)]
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | own, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
    found: dict[str, Any] = {"numbers": {}, "failures": {}}
    if file.exists():
        found = json.loads(file.read_text())
        file.unlink()
    if "seconds" not in found:
        last = log.read_text(errors="replace").splitlines()[-8:]
        how = f"ended with {process.returncode}" if process.returncode != -signal.SIGKILL else "was stopped"
        found["failures"]["the stage"] = [f"{how} after {time.monotonic() - begin:.0f} s", *last]
    return found


def _commit() -> str:
    """The commit of this tree; "unknown" where git or the history is missing."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _machine() -> dict[str, Any]:
    """The device and the versions that numeric modes depend on."""
    import torch
    import triton

    known = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    known |= {"cores": os.cpu_count(), "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        known |= {"device": about.name, "capability": f"{about.major}.{about.minor}"}
        known |= {"cuda": torch.version.cuda, "multiprocessors": about.multi_processor_count}
        known |= {"memory": about.total_memory}
    return known


def _problems(found: dict[str, Any]) -> list[str]:
    """Failures, and the names of numbers that are not as they must be."""
    lines = [f"{name}: {lines[-1] if lines else ''}" for name, lines in found["failures"].items()]
    return lines + [f"{name} is wrong" for name, value in _flat(found.get("numbers", {})) if value is False]


def _flat(numbers: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Names and numbers of nested mappings."""
    pairs: list[tuple[str, Any]] = []
    for name, value in numbers.items():
        own = f"{before}{name}"
        pairs += _flat(value, f"{own}, ") if isinstance(value, dict) else [(own, value)]
    return pairs


def _print(results: dict[str, Any]) -> None:
    """A line for each number, and then what failed."""
    print(json.dumps(results["machine"]), results["commit"])
    for stage, found in results["stages"].items():
        numbers = _flat(found.get("numbers", {}))
        checks = sum(value is True for _, value in numbers)
        print(f"== {stage}: {found.get('seconds', '?')} s, {checks} checks hold")
        for name, value in numbers:
            if isinstance(value, list):
                print(f"  {name}:", *value, sep="\n    ")
            elif not isinstance(value, bool):
                print(f"  {name:60} {f'{value:.4g}' if isinstance(value, float) else value}")
    for stage, found in results["stages"].items():
        for line in _problems(found):
            print(f"!! {stage}: {line[:300]}")


if __name__ == "__main__":
    sys.exit(main())
