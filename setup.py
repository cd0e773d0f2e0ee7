"""Compiles the native kernels, once for each instruction set, if there is a compiler.

The libraries export plain C functions, which ctypes calls, so one wheel serves every Python from 3.11 on.
They link only the C library and have threads of their own. Without them, stock operations do everything.
With SOOTHSAY_KERNELS=native, only the fastest that this machine can run is compiled.
"""

import copy
import os
import platform
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # Python asks for debug information, five times the size of the code
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # bits depend on it: only the source says what is rounded once
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",  # both warn of the intrinsics themselves
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
VARIANTS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {
        "avx2": AVX2,
        "avxvnni": [*AVX2, "-mavxvnni"],
        "avx512": AVX512,
        "avx512vnni": [*AVX512, "-mavx512vnni"],
        "avx512bf16": AVX512BF16,
        "amx": [*AVX512BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    }


def fastest() -> str:
    """The last variant whose instructions this machine has, as the compiler sees it."""
    command = [os.environ.get("CXX", "c++"), "-march=native", "-dM", "-E", "-xc++", os.devnull]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def has(flag: str) -> bool:  # "-mamx-tile" defines __AMX_TILE__
        return f"__{flag.removeprefix('-m').upper().replace('-', '_')}__" in found

    return [name for name, flags in VARIANTS.items() if all(map(has, flags))][-1]


if os.environ.get("SOOTHSAY_KERNELS") == "native":
    VARIANTS = {name: VARIANTS[name] for name in (fastest(),)}


class BuildKernels(build_ext):
    """Compiles several variants at once, each in a folder of its own: their object files have the same names."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext):
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        super(BuildKernels, own).build_extension(ext)


setup(
    ext_modules=[
        Extension(
            f"soothsay.model.native._{name}",
            sources=sorted(str(source) for source in Path("csrc").glob("*.cpp")),
            depends=sorted(str(header) for header in Path("csrc").glob("*.h")),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread", "-static-libstdc++", "-static-libgcc"],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
        for name, flags in VARIANTS.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildKernels},
)
