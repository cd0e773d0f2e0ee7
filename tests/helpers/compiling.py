"""Compile kernels of a GPU without one, and report what came out.

Run as a script, in a process of its own: the interpreter that other tests use is switched on when kernels are
imported. It reads cases from the standard input, and writes a report for each, both as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A kernel as it is compiled for a device."""

    kernel: str  # module in soothsay.model.gpu.source, and function
    types: str  # of the first arguments, "-" for None; the others are i32
    constants: Mapping[str, int | bool | str]
    warps: int = 4
    stages: int = 3
    wants: str = ""  # instructions that must be there: names in `INSTRUCTIONS`
    lacks: str = "fma"  # instructions that must not be there

    @property
    def name(self) -> str:
        """What tests call it."""
        words = self.kernel, *self.types.split(), *(str(value) for value in self.constants.values())
        return "-".join(words)


@dataclass(frozen=True)
class Report:
    """What a compiler made of a case."""

    instructions: Mapping[str, int] = field(default_factory=dict)  # of `INSTRUCTIONS`, their number
    shared: int = 0  # bytes of shared memory
    registers: int = 0
    spilled: int = 0  # bytes of the stack and of local memory


def compile_all(cases: Sequence[Case], capability: int) -> dict[str, Report]:
    """Compile cases for a compute capability, 80 or 90: the name of each, and its report."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        made = subprocess.run(
            [sys.executable, __file__, str(capability)],
            input=json.dumps([asdict(case) for case in cases]),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    reports = json.loads(made.stdout)
    return {case.name: Report(**report) for case, report in zip(cases, reports, strict=True)}


INSTRUCTIONS = {
    "fma": r"fma\.rn(?:\.ftz)?\.f32",
    "mma": r"(?:wgmma\.mma_async|mma)\.sync",
    "wgmma": r"wgmma\.mma_async\.sync",
    "cp.async": r"cp\.async\.c[ag]\.",
    "ld.global": r"ld\.global",
}


def _compile(case: Case, capability: int) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    from soothsay.model.gpu.launching import OPTIONS

    module, _, function = case.kernel.partition(".")
    kernel: JITFunction[Any] = getattr(
        importlib.import_module(f"soothsay.model.gpu.source.{module}"), function
    )
    types = iter(case.types.split())
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        own = "constexpr" if parameter.is_constexpr else next(types, "i32")
        signature[parameter.name] = "constexpr" if own == "-" else own
        if parameter.is_constexpr or own == "-":
            constants[at,] = case.constants[parameter.name] if parameter.is_constexpr else None
        elif (own.startswith("*") and not parameter.do_not_specialize_on_alignment) or (
            own == "i32" and not parameter.do_not_specialize
        ):
            attributes[at,] = [["tt.divisibility", 16]]
    code = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages, **OPTIONS}
    made = compile(code, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, usage = made.asm["ptx"], _usage(made.asm["cubin"])
    found = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    return asdict(Report(found, made.metadata.shared, usage["REG"], usage["STACK"] + usage["LOCAL"]))


def _usage(binary: bytes) -> dict[str, int]:
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.findall(r"(REG|STACK|LOCAL):(\d+)", shown.stdout + shown.stderr)
    return {name: int(value) for name, value in found}


if __name__ == "__main__":
    wanted = [Case(**case) for case in json.load(sys.stdin)]
    with ProcessPoolExecutor(2) as pool:
        print(json.dumps([*pool.map(_compile, wanted, repeat(int(sys.argv[1])))]))
