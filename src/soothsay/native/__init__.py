"""The native kernels: C libraries, one for each instruction set, of which the best that runs here is loaded.

They are compiled when the package is installed, if a compiler is there. Each kernel has a twin in stock
operations, which is its reference, its fallback and its oracle in the tests.
"""

from soothsay.native.kernels import VARIANTS, NativeKernels, native_kernels

__all__ = ["VARIANTS", "NativeKernels", "native_kernels"]
