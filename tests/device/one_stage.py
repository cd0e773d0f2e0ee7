"""One stage of the device script, in a process of its own: `one_stage.py NAME FILE JOB`, JOB in JSON.

FILE has, after each number, all that is known so far: {"numbers": {...}, "failures": {...}}. It has no
"seconds" before the stage has ended by itself.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

SPARE = 3.0
"""Seconds before the limit at which no further number is begun."""


def run(name: str, file: Path, options: dict[str, Any]) -> None:
    """Run a stage, and keep its numbers in a file."""
    known: dict[str, Any] = {"numbers": {}, "failures": {}}

    def failed(what: str) -> None:
        known["failures"][what] = traceback.format_exc().strip().splitlines()[-8:]

    def keep() -> None:
        file.with_suffix(".new").write_text(json.dumps(known, indent=1, default=str))
        file.with_suffix(".new").replace(file)

    keep()
    if options["dry"]:
        import interpreter  # noqa: F401 - before any kernel
    import torch
    from job import Job

    torch.inference_mode().__enter__()
    paths = {key: Path(options[key]) for key in ("out", "work", "questions") if options[key] is not None}
    job = Job(**options | paths)
    if options["dry"]:
        _use_the_interpreter()
    try:
        for what, number in importlib.import_module(f"stage_{name}").measure(job):
            if job.left < SPARE:
                known["failures"][what] = [f"not run: {job.seconds:.0f} s did not suffice"]
                break
            print(f"{job.seconds - job.left:6.1f} {what}", flush=True)
            try:
                known["numbers"][what] = number() if callable(number) else number
            except Exception:
                failed(what)
            keep()
    except Exception:
        failed("the stage")
    known["seconds"] = round(job.seconds - job.left, 1)
    keep()


def _use_the_interpreter() -> None:
    """Let models that are loaded by name, and draft models, run on the kernels of a GPU."""
    from soothsay.model import kernel_sets
    from soothsay.model.gpu.gpu_kernels import GpuKernels

    kernel_sets.best_kernels = lambda spec, device="cpu": GpuKernels(device)  # type: ignore[assignment]


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
