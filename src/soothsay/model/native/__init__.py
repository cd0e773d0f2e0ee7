"""The native kernels: C libraries behind ctypes, one for each instruction set."""
