"""Functions whose bits depend on each number, or on each row, alone.

PyTorch has sigmoid, silu, gelu and softplus in two forms: for vectors, and for what does not fill one or is
not adjacent. Their last bits differ, so those of a row depend on other rows, strides and threads. oneDNN has
a third gelu. Threads share the sum of a single long row. The functions here use operations that have one
form, which docs/guarantee.md lists.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 4096
"""Numbers that are summed at once. PyTorch splits sums of 32768 numbers and more."""


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + e^-x)`."""
    return 1 / (torch.exp(-x) + 1)


def silu(x: Tensor) -> Tensor:
    """`x sigmoid(x)`."""
    return x / (torch.exp(-x) + 1)


def gelu(x: Tensor) -> Tensor:
    """`x` times the share of a normal distribution below it (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return x * 0.5 * (torch.erf(x * math.sqrt(0.5)) + 1)


def gelu_tanh(x: Tensor) -> Tensor:
    """`gelu`, approximated by a hyperbolic tangent."""
    return x * 0.5 * (torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))) + 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gated_relu2": lambda x: F.relu(x).square(),
}
"""Those of gated feed-forward layers."""

UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "plain_gelu_tanh": gelu_tanh,
    "plain_gelu": gelu,
    "plain_silu": silu,
}
"""Those of feed-forward layers without a gate. "relu2": So et al. 2021, arXiv 2109.08668."""


def clipped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of gpt-oss: both parts are bounded, and up is one more."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (up + 1)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010): a parabola above zero, an exponential below.

    The curves above and below zero bend by `softplus(alpha_p)` and `beta + softplus(alpha_n)`. The slope at
    zero is `beta`. Below zero, the exponential ends at `eps`, which is slightly negative.
    """
    below = (torch.exp(x.minimum(eps)) - 1 - x) * (beta + softplus(alpha_n))
    return torch.where(x > 0, softplus(alpha_p) * x * x, below) + beta * x


def softplus(x: Tensor) -> Tensor:
    """`log(1 + e^x)`."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def total(x: Tensor) -> Tensor:
    """The sum of each row: `[..., n] -> [..., 1]`."""
    while x.shape[-1] > PIECE:
        x = F.pad(x, (0, -x.shape[-1] % PIECE)).view(*x.shape[:-1], -1, PIECE).sum(-1)
    return x.contiguous().sum(-1, keepdim=True)


def log_total(x: Tensor) -> Tensor:
    """The logarithm of each row's sum of `e^x`: `[..., n] -> [..., 1]`."""
    return x.amax(-1, keepdim=True) - x.log_softmax(-1).amax(-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight`: `[..., n]` float32."""
    return x * torch.rsqrt(total(x.square()) / x.shape[-1] + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[N, H, d]`. Dimension i is paired with i + d/2."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
