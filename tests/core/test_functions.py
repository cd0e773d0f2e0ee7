"""Functions of numbers and rows: what they compute, and bits that do not depend on what stands beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from row_bits import assert_row_bits
from torch import Tensor

from soothsay.core import functions

Function = Callable[[Tensor], Tensor]
ORACLES: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "log_total": lambda x: x.logsumexp(-1, keepdim=True),
}
ROWS: dict[str, Function] = {
    **{name: getattr(functions, name) for name in ORACLES},
    "total": functions.total,
    "rms_norm": lambda x: functions.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]), 1e-6),
    # operations that have one form in PyTorch; the functions are made of them, and passes use them as well
    **{name: getattr(torch, name) for name in ("exp", "erf", "tanh", "cos", "sin")},
    **{name: lambda x, name=name: getattr(torch, name)(x.abs() + 0.1) for name in ("log", "log1p", "rsqrt")},
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], None, None, 1e-6),
    "cumsum": lambda x: x.cumsum(-1),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(1, dim=-1).values,
    "argsort": lambda x: x.argsort(dim=-1, descending=True, stable=True),
}


@pytest.mark.parametrize("name", ORACLES)
def test_values(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 6001), torch.tensor([-1e4, -200.0, -1e-7, 0.0, 1e-7, 1e4])])
    result, exact = getattr(functions, name)(x).double(), ORACLES[name](x.double())
    assert ((result - exact).abs() <= 4e-7 * exact.abs().clamp(min=1)).all()


@pytest.mark.parametrize("size", [1, 5, 4096, 4097, 40001])
def test_total(size: int) -> None:
    rows = torch.rand(2, 3, size)
    torch.testing.assert_close(functions.total(rows), rows.double().sum(-1, keepdim=True).float())


@pytest.mark.parametrize("size", [75, 1000])
@pytest.mark.parametrize("name", ROWS)
def test_bits_of_a_row(name: str, size: int) -> None:
    torch.manual_seed(size)
    assert_row_bits(ROWS[name], torch.randn(64, size) * 4)


@pytest.mark.parametrize(
    "name", ["total", "log_total", "rms_norm", "softmax", "log_softmax", "layer_norm", "cumsum", "argmax"]
)
def test_bits_of_a_long_row(name: str) -> None:
    """Threads would share one."""
    torch.manual_seed(0)
    assert_row_bits(ROWS[name], torch.randn(3, 40001) * 4)
