"""Triton's interpreter, mended: import this before any kernel, and kernels run on the CPU in NumPy.

A product of matrices is defined element by element here, in two ways. "plain" adds products in order of k in
float32, so whatever depends on a row's place is the kernel's fault. "hopper" is the arithmetic of `mma.sync`
and `wgmma` on compute capability 9.0 for 16-bit operands, after MMA-Sim (arXiv 2511.10909): 16 products and
the accumulator are aligned to the largest exponent, cut to 25 fractional bits and added exactly, and the sum
is rounded toward zero. So it predicts a device's bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import numpy.typing as npt
import triton.language as tl
import triton.runtime.interpreter as interpreter

Array = npt.NDArray[Any]

_kind = "plain"


@contextmanager
def dots(kind: str) -> Iterator[None]:
    """Multiply matrices in another way for a while: "plain" or "hopper"."""
    global _kind
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before


def plain(a: Array, b: Array, c: Array) -> Array:
    """`c + a @ b` in float32, product by product in order of k."""
    a, b, c = a.astype(np.float32), b.astype(np.float32), c.astype(np.float32)
    for k in range(a.shape[-1]):
        c = c + a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return c


def hopper(a: Array, b: Array, c: Array) -> Array:
    """`c + a @ b` as compute capability 9.0 has it, of values of bfloat16 or float16."""
    a, b, c = a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)
    for k in range(0, a.shape[1], 16):
        x, y = a[:, k : k + 16, None], b[None, k : k + 16, :]
        products = x * y  # exact: [M, 16, N]
        # exponents of the factors add up, though a product's significand may reach 4
        exponents = np.where(products == 0, -252, _exponent(x) + _exponent(y))
        unit = np.ldexp(1.0, np.maximum(exponents.max(1), _exponent(c)) - 25)
        exact = (np.trunc(products / unit[:, None]).sum(1) + np.trunc(c / unit)) * unit
        nearest = exact.astype(np.float32)
        is_away = np.abs(nearest.astype(np.float64)) > np.abs(exact)
        c = np.where(is_away, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float64)
    return c.astype(np.float32)


def _exponent(x: Array) -> Array:
    exponents = np.frexp(x)[1] - 1
    return np.where(x == 0, -126, np.maximum(exponents, -126))


def _numbers(handle: Any) -> Array:
    """The values of a tensor. The interpreter keeps bfloat16 as bits."""
    data: Array = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: object) -> Any:
    x, y = _numbers(a), _numbers(b)
    if np.issubdtype(x.dtype, np.integer):
        out = d.data + np.matmul(x.astype(np.int32), y.astype(np.int32))
        return interpreter.TensorHandle(out.astype(np.int32), d.dtype.scalar)
    exact = hopper if _kind == "hopper" and a.dtype.scalar != tl.float32 else plain
    return interpreter.TensorHandle(exact(x, y, d.data), d.dtype.scalar)


_cast = interpreter.InterpreterBuilder.cast_impl


def _cast_impl(self: Any, source: Any, dtype: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even, as devices do. The interpreter cuts bits off."""
    if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        kept = np.where(np.isnan(source.data), 0x7FC0, rounded)
        return interpreter.TensorHandle(kept.astype(np.uint16), tl.bfloat16)
    return _cast(self, source, dtype)


_patch_tensor = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    """Let loops have bounds from memory: from NumPy 2.4 on, `int` of an array of one element is an error."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))


_splat = interpreter.InterpreterBuilder.create_splat


def _create_splat(self: Any, kind: Any, source: Any) -> Any:
    """Repeat a number. Triton 3.9 makes an integer of a repeated comparison, and no mask may be one."""
    if source.data.dtype == np.bool_:
        return interpreter.TensorHandle(np.full(kind.shape, source.data.reshape(-1)[0]), source.dtype.scalar)
    return _splat(self, kind, source)


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_splat = _create_splat
interpreter.InterpreterBuilder.cast_impl = _cast_impl
interpreter._patch_lang_tensor = _patched
for _name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):  # bound at birth
    _call = lambda self, source, dtype: self.cast_impl(source, dtype)  # noqa: E731
    setattr(interpreter.InterpreterBuilder, f"create_{_name}", _call)


# a check of each integer sum and product for overflow takes a third of the time
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

_ready: set[str] = set()


def _call_function(self: Any, *args: object, **kwargs: object) -> Any:
    """Call a function of a kernel. Its module's names are replaced once, since that takes a millisecond."""
    if self.fn.__module__ not in _ready:
        interpreter._patch_lang(self.fn)
        _ready.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call_function

_run_grid = interpreter.GridExecutor.__call__


def _run_quietly(self: Any, *args: object, **kwargs: object) -> None:
    """Run programs. A device does not warn of infinities."""
    with np.errstate(all="ignore"):
        _run_grid(self, *args, **kwargs)


interpreter.GridExecutor.__call__ = _run_quietly
