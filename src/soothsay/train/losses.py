"""Losses over a vocabulary that never hold the logits of all rows.

Logits are by far the largest tensors of a training step. These losses compute them for `CHUNK` rows at a
time, and the gradients in closed form in the same pass. A loss can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

CHUNK = 256
"""Rows whose logits exist at a time: few enough for the processor's cache."""

GPU_CHUNK = 16_384
"""The same on a GPU, where to launch an operation takes longer than to run it on few rows."""

Divergence = Literal["forward-kl", "reverse-kl", "total-variation"]
"""Divergence of the student's q from the teacher's p: KL(p || q), KL(q || p) or total variation.

Total variation is sum |p - q| / 2: one minus the acceptance rate of speculative sampling. DistillSpec (Zhou
et al. 2023, arXiv 2310.08461) compares the three.
"""


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of labels under an output head, in nats a row.

    Args:
        hidden: `[M, H]` inputs of the head.
        weight: `[V, H]` of the head. Under autocast, the product is in autocast's type.
        labels: `[M]` int64.

    Returns:
        A scalar, float32.
    """
    loss: Tensor = _CrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    return loss


def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-probabilities of a teacher's output head: `[M, H]`, `[V, H]` -> `[M, V]` bfloat16.

    If `weight` has only some tokens of the vocabulary, the probabilities of these add up to 1.
    """
    out = torch.empty(len(hidden), len(weight), dtype=torch.bfloat16, device=hidden.device)
    for rows, log_p in _Gradient(hidden, weight).log_probs():
        out[rows] = log_p
    return out


def distillation(
    hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, divergence: Divergence = "forward-kl"
) -> tuple[Tensor, Tensor]:
    """Compare a student's output head with its teacher's.

    Args:
        hidden: `[M, H]` inputs of the student's head.
        weight: `[V, H]` of the student's head. It gets a gradient only if it requires one.
        teacher: `[K, V]` log p of the same V tokens, without gradient; see `log_probs`.
        rows: `[M]` int64, the teacher's row for each row of the student.
        divergence: what is computed.

    Returns:
        The mean divergence in nats a row (total variation: 0 to 1), and the share of rows whose likeliest
        token is the teacher's. Scalars, float32; the share has no gradient.
    """
    loss, agreement = _Distillation.apply(  # type: ignore[no-untyped-call]
        hidden, weight, teacher, rows, divergence
    )
    return loss, agreement.detach()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss, gradient = torch.zeros((), device=hidden.device), _Gradient(hidden, weight)
        for rows, log_q in gradient.log_probs():
            label = labels[rows, None]
            loss -= log_q.gather(1, label).sum()
            error = log_q.exp_()
            error.scatter_add_(1, label, torch.full_like(label, -1.0, dtype=torch.float32))
            gradient.add(rows, error)
        gradient.keep(ctx, hidden, weight)
        return loss / max(len(labels), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_Gradient.give(ctx, grad), None


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, rows_of: Tensor, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        gradient = _Gradient(hidden, weight)
        loss, agree = torch.zeros((), device=hidden.device), torch.zeros((), device=hidden.device)
        for rows, log_q in gradient.log_probs():
            log_p = teacher[rows_of[rows]].float()
            agree += (log_q.argmax(-1) == log_p.argmax(-1)).sum()
            values, error = _diverge(log_p, log_q, divergence)
            loss += values.sum()
            gradient.add(rows, error)
        gradient.keep(ctx, hidden, weight)
        count = max(len(hidden), 1)
        return loss / count, agree / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return *_Gradient.give(ctx, grad), None, None, None


def _diverge(log_p: Tensor, log_q: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Divergences `[M]`, and their gradients with respect to the student's logits, `[M, V]`."""
    q = log_q.exp()
    if divergence == "forward-kl":
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), q - p
    slope = log_q - log_p if divergence == "reverse-kl" else (q - log_p.exp()).sign() / 2
    mean = (q * slope).sum(-1, keepdim=True)
    values = mean[:, 0] if divergence == "reverse-kl" else (q - log_p.exp()).abs().sum(-1) / 2
    return values, q * (slope - mean)


class _Gradient:
    """Computes the gradients of a mean over rows from those with respect to the logits, chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        dtype = product_dtype(hidden)
        self.x, self.w = hidden.to(dtype), weight.to(dtype)
        self.hidden = torch.empty_like(self.x) if hidden.requires_grad else None
        self.weight = torch.zeros_like(self.w, dtype=torch.float32) if weight.requires_grad else None

    def log_probs(self) -> Iterator[tuple[slice, Tensor]]:
        """The log-probabilities of some rows at a time, `[rows, V]` float32."""
        size = GPU_CHUNK if self.x.is_cuda else CHUNK
        for begin in range(0, len(self.x), size):
            rows = slice(begin, begin + size)
            yield rows, (self.x[rows] @ self.w.t()).float().log_softmax(-1)

    def add(self, rows: slice, error: Tensor) -> None:
        """Add a chunk. `error` `[rows, V]` is the gradient with respect to its logits."""
        error = error.to(self.x.dtype)
        if self.hidden is not None:
            self.hidden[rows] = error @ self.w
        if self.weight is not None:
            self.weight += error.t() @ self.x[rows]

    def keep(self, ctx: Any, hidden: Tensor, weight: Tensor) -> None:
        """Save the gradients in autograd's context."""
        ctx.save_for_backward(self.hidden, self.weight)
        ctx.count, ctx.dtypes = max(len(hidden), 1), (hidden.dtype, weight.dtype)

    @staticmethod
    def give(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        """Return the saved gradients times `grad`, of `hidden` and of `weight`."""
        scale = grad / ctx.count
        return [
            None if part is None else (part * scale).to(dtype)
            for part, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]


def product_dtype(x: Tensor) -> torch.dtype:
    """The type of products: autocast's, or float32."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
