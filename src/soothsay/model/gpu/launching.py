"""How kernels start. No other module starts one."""

from typing import Any

OPTIONS = {"enable_fp_fusion": False}
"""How all kernels are compiled. A sum's bits would depend on which products the compiler fused with it."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, **constants: Any
) -> None:
    """Start `grid` programs of a kernel, after the kernels that were started before.

    Args:
        kernel: from `soothsay.model.gpu.source`.
        grid: number of programs along each axis. There may be none.
        args: tensors and numbers, in the kernel's order.
        warps: threads of a program, in groups of 32.
        stages: tiles of a loop that are in flight at once.
        constants: the kernel's `tl.constexpr` parameters.
    """
    if 0 in grid:
        return
    kernel[grid](*args, num_warps=warps, num_stages=stages, **OPTIONS, **constants)
