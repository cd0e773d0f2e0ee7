"""Kernels in Triton's language, and nothing else. `soothsay.model.gpu.launching` starts them."""
