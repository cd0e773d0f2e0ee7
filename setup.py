"""Compiles the native kernels for this machine, if there is a compiler.

The libraries export plain C functions, which ctypes calls, so one wheel serves every Python from 3.11 on.
They link only the libraries of C and GCC, and have threads of their own. Without them, stock operations do everything.
With SOOTHSAY_KERNELS=all, there is a library for each instruction set: for tests, and wheels for others.
"""

import copy
import ctypes
import itertools
import logging
import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, LinkError

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
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-fno-tree-ter"]  # the last: GCC spills fewer registers
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512vnni", "-mavx512bf16"]
X86 = {
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
    "avx512bf16": AVX512BF16,
    "amx": [*AVX512BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
}
ARM = {
    "dotprod": ["-march=armv8.2-a+dotprod"],
    "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    "bf16": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
}
FAMILIES = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM", platform.machine()).rpartition("-")[2]
"""The processor for which is compiled. Python reads this variable too, to name wheels: "linux-aarch64"."""
VARIANTS = {"portable": []} | FAMILIES.get(MACHINE.lower(), {})
"""Instruction sets of a family of processors, the fastest last."""
LINK_FLAGS = ["-pthread", "-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]
"""The last two leave out what nothing calls. Some of that needs a C library of 2022 (glibc 2.36)."""
if platform.system() == "Darwin":  # where the linker refuses them, and every system has libc++
    LINK_FLAGS = []
EVERY = os.environ.get("SOOTHSAY_KERNELS") == "all"
PROBE = "csrc/support.cpp"
"""Says whether a processor has the instructions with which it is compiled."""


class BuildKernels(build_ext):
    """Compiles several files at once, each library in a folder of its own. Prints a line for each file."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        """Compile the libraries of `chosen`. Says in one line which, or why there are none."""
        logging.disable(logging.INFO)  # commands of 600 characters
        self.extensions, reason = self.chosen()
        self.ended, self.files = itertools.count(1), sum(len(ext.sources) for ext in self.extensions)
        with ThreadPoolExecutor(self.parallel) as self.pool:
            super().build_extensions()
        built = [ext.name for ext in self.extensions if Path(self.get_ext_fullpath(ext.name)).is_file()]
        names = ", ".join(name.rpartition("_")[2] for name in built)
        if not names:
            names = f"none, so PyTorch's slower operations are used ({reason or 'see the errors above'})"
        print(f"native kernels: {names}", flush=True)
        logging.disable(logging.NOTSET)

    def chosen(self):
        """The libraries to compile: the fastest one here, or all of them; and why there is none."""
        if platform.system() == "Windows":
            return [], "they are not written for Windows yet"
        reason = ""
        for ext in reversed(self.extensions):
            try:
                if self.gains_here(ext):
                    return self.extensions if EVERY else [ext], ""
            except (CCompilerError, CompileError, LinkError) as error:
                reason = f"the compiler does not work: {error}"
        return [], reason

    def gains_here(self, ext):
        with tempfile.TemporaryDirectory() as folder:
            flags = {"output_dir": folder, "extra_postargs": ext.extra_compile_args}
            objects, library = self.compiler.compile([PROBE], **flags), os.path.join(folder, "probe.so")
            flags = {"extra_postargs": ext.extra_link_args, "target_lang": "c++"}
            self.compiler.link_shared_object(objects, library, **flags)
            return EVERY or ctypes.CDLL(library).soothsay_runs_here() == 1

    def build_extension(self, ext):
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        own.compiler = copy.copy(self.compiler)
        own.compiler.compile = partial(self.compile_together, ext)
        super(BuildKernels, own).build_extension(ext)

    def compile_together(self, ext, sources, **options):
        """Takes the place of the compiler's `compile`, which compiles one file after the other."""
        name = ext.name.rpartition("_")[2]

        def compile_one(source):
            begin = time.monotonic()
            objects = self.compiler.compile([source], **options)
            seconds = time.monotonic() - begin
            print(f"[{next(self.ended)}/{self.files}] {source}, {name}: {seconds:.1f} s", flush=True)
            return objects

        return [*itertools.chain(*self.pool.map(compile_one, sources))]


setup(
    ext_modules=[
        Extension(
            f"soothsay.model.native._{name}",
            sources=sorted(str(source) for source in Path("csrc").glob("*.cpp")),
            depends=sorted(str(header) for header in Path("csrc").glob("*.h")),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=LINK_FLAGS,
            language="c++",
            optional=True,
            py_limited_api=True,
        )
        for name, flags in VARIANTS.items()
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    cmdclass={"build_ext": BuildKernels},
)
