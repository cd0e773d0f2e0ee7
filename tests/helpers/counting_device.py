"""A device that counts what a real one makes slow: copies to it, and waits of the host for it.

Its tensors are on the CPU, and say that they are elsewhere. What a device would refuse fails here as well: an
operation on tensors of both sides, and a native pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("xpu")

WAITS = {
    *("cpu", "tolist", "item", "nonzero", "masked_select", "unique", "equal", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
}
REFUSED = {
    "data_ptr": "the address of a tensor on a device means nothing to native code",
    "numpy": "NumPy does not see the memory of a device",
    "__array__": "NumPy does not see the memory of a device",
}
COPIES = {"tensor", "as_tensor", "new_tensor"}
INDEXING = {"__getitem__", "__setitem__"}


class OnDevice(Tensor):
    """A tensor that says it is on `DEVICE`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


class CountingDevice(TorchFunctionMode):
    """While it is entered, `DEVICE` can be used, and `waits` and `copies` are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.copies = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "_has_compatible_shallow_copy_type":  # so that `Module.to` replaces parameters
            return False
        if name in ("requires_grad_", "__get__"):  # of a leaf, not of a view of it
            found = func(*args, **kwargs)
            return _placed(found) if name == "__get__" and isinstance(args[0], OnDevice) else found
        given = [*_tensors(args), *_tensors(kwargs)]
        there = any(isinstance(x, OnDevice) for x in given)
        goes_there = name == "to" and any(
            isinstance(x, torch.device) and x == DEVICE for x in (*args[1:], kwargs.get("device"))
        )
        if name == "to" and _names_host(args[1:], kwargs):
            self.waits += there
            there = False
        elif goes_there:
            self._copy(not there, kwargs.get("non_blocking", False))
            there = True
        elif kwargs.get("device") == DEVICE:
            self._copy(name in COPIES)
            there = True
        elif there:
            self._use(name, args, given)
            there = name not in WAITS
        elsewhere = {"device": torch.device("cpu")} if "device" in kwargs else {}
        args, kwargs = _mapped(_bare, args), _mapped(_bare, {**kwargs, **elsewhere})
        if name == "to":
            host = torch.device("cpu")
            args = tuple(host if isinstance(x, torch.device) and x == DEVICE else x for x in args)
        result = func(*args, **kwargs)
        return _mapped(_placed, result) if there else result

    def _copy(self, count: int, is_asynchronous: bool = False) -> None:
        """Count copies to the device. The host waits for those from memory that is not pinned."""
        self.copies += count
        if not is_asynchronous:
            self.waits += count

    def _use(self, name: str, args: Any, given: Iterable[Tensor]) -> None:
        """Count an operation on tensors of the device."""
        if name in REFUSED:
            raise RuntimeError(REFUSED[name])
        self.waits += name in WAITS
        self._copy(name in COPIES or (name == "copy_" and not isinstance(args[1], OnDevice)))
        if name in INDEXING:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self._copy(sum(isinstance(x, list) for x in index))
            self.waits += sum(isinstance(x, Tensor) and x.dtype == torch.bool for x in index)
        elif name != "copy_" and any(not isinstance(x, OnDevice) and x.ndim for x in given):
            raise RuntimeError(f"{name} on tensors of two devices: {[type(x).__name__ for x in given]}")


def _names_host(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(str(x) == "cpu" for x in (*args, kwargs.get("device")))


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors of arguments. Those of PyTorch's own iterator take ten times as long."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Arguments or results with changed tensors."""
    if isinstance(x, dict):
        return {key: _mapped(change, part) for key, part in x.items()}
    if isinstance(x, tuple) and type(x) is not tuple and not isinstance(x, torch.Size):
        return torch.utils._pytree.tree_map(change, x)  # names of results
    return type(x)(_mapped(change, part) for part in x) if type(x) in (tuple, list) else change(x)


def _bare(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, OnDevice) else x


def _placed(x: Any) -> Any:
    return x.as_subclass(OnDevice) if isinstance(x, Tensor) else x


def counted_steps(engine: Any, device: CountingDevice) -> Iterator[tuple[int, int]]:
    """Step to the end; yield the waits and copies of each step."""
    while engine.has_work:
        before = device.waits, device.copies
        engine.step()
        yield device.waits - before[0], device.copies - before[1]
