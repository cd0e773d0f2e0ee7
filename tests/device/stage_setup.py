"""Build the native library for the host, and compile the kernels, before anything is measured."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from job import Job, Numbers

from soothsay.model.native.native_kernels import load_native

ROOT = Path(__file__).parents[2]
PROCESSES = 12


def measure(job: Job) -> Numbers:
    """Which compilers there are, what was built, and what is wrong with a compiled kernel."""
    yield "compilers", " ".join(name for name in ("gcc", "g++", "ptxas", "ninja") if shutil.which(name))
    building = None if job.dry or _native() else _build(job)
    yield "kernels", lambda: _compile(job)
    if building is not None:
        building.wait(job.left)
        yield "native library was built", building.returncode == 0
    yield "native library", _native() or "stock operations"


def _native() -> str:
    """The name of the native library that runs here; empty: there is none, or it is an old one."""
    try:
        native = load_native()
    except AttributeError:  # a function is missing
        return ""
    return "" if native is None else native.name


def _build(job: Job) -> subprocess.Popen[bytes]:
    """Begin to build the fastest variant that this machine can run."""
    log, command = (job.out / "build.log").open("w"), [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def _compile(job: Job) -> dict[str, Any]:
    """Compile the table of the compile check. Triton keeps the kernels, and every later stage finds them."""
    import compiling
    import test_gpu_compiling as table

    cases = [*table.CASES, *getattr(table, "MORE_CASES", ())][: 1 if job.dry else None]
    major, minor = (9, 0) if job.dry else torch.cuda.get_device_capability()
    capability = 10 * major + minor
    os.environ.pop("TRITON_INTERPRET", None)  # new processes import kernels anew
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = pool.map(compiling._compile, cases, repeat(capability))
        reports = [compiling.Report(**report) for report in made]
    faults = [
        f"{case.name}: {fault}"
        for case, report in zip(cases, reports, strict=True)
        for fault in table.faults(case, report, capability)
    ]
    return {"compiled": len(cases), "faults": faults, "without faults": not faults}
