"""Kernels of NVIDIA GPUs, in Triton. Nothing imports this package unless a GPU or a test asks for it."""
