"""Losses over a vocabulary that never hold the logits of all rows.

Logits are by far the largest tensors of a training step. These losses compute them for `CHUNK` rows at a
time, and the gradients in closed form in the same pass. A loss can be differentiated once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 256
"""Rows whose logits exist at a time: few enough for the processor's cache."""

GPU_CHUNK = 16_384
"""The same on a GPU, where to launch an operation takes longer than to run it on few rows."""

Divergence = Literal["forward-kl", "reverse-kl", "total-variation", "lk"]
"""Divergence of the student's q from the teacher's p: KL(p || q), KL(q || p), total variation, or a mix.

The acceptance rate of speculative sampling is a = sum min(p, q). Total variation is 1 - a. DistillSpec (Zhou
et al. 2023, arXiv 2310.08461) compares the first three. `lk` is l KL(p || q) + (1 - l) (1 - a) with
l = exp(-3 a): it aims at acceptance as soon as there is some (Samarin et al. 2026, arXiv 2602.23881).
"""

TOP = 64
"""Tokens of a teacher's row that are kept."""

ABSENT = 1e-7
"""What KL(q || p) takes as the probability of a token that is not kept."""

SHARPNESS = 3.0
"""How fast `lk` turns from KL to acceptance, as its paper found best."""


@dataclass(frozen=True, slots=True)
class Likely:
    """The likeliest tokens of K rows of a teacher, likeliest first, with their probabilities."""

    tokens: Tensor  # [K, n] int64
    probabilities: Tensor  # [K, n] float32, in the teacher's whole vocabulary

    @classmethod
    def of(cls, logits: Tensor) -> Likely:
        """The `TOP` likeliest tokens of logits `[K, V]`."""
        logits = logits.float()
        best, tokens = _largest(logits, min(TOP, logits.shape[-1]))
        total = (logits - best[:, :1]).exp_().sum(-1, keepdim=True)
        return cls(tokens, (best - best[:, :1]).exp() / total)

    @classmethod
    def joined(cls, parts: Sequence[Likely]) -> Likely:
        """The rows of all parts."""
        return cls(torch.cat([one.tokens for one in parts]), torch.cat([one.probabilities for one in parts]))

    def listed(self, places: Tensor) -> Likely:
        """The same of a student's list: places in it stand for tokens, and tokens outside have probability 0.

        A row then weighs what the list's share of it is.

        Args:
            places: `[V]` int64, the place of each token in the list, or -1.
        """
        known = places[self.tokens]
        return Likely(known.clamp(min=0), self.probabilities * (known >= 0))


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of labels under an output head, in nats a row.

    Args:
        hidden: `[M, H]` inputs of the head.
        weight: `[V, H]` of the head. Under autocast, the product is in autocast's type.
        labels: `[M]` int64.

    Returns:
        A scalar, float32.
    """
    certain = Likely(labels[:, None], torch.ones(len(labels), 1, device=labels.device))
    return distillation(hidden, weight, certain, torch.arange(len(labels), device=labels.device))[0]


def likely(hidden: Tensor, weight: Tensor) -> Likely:
    """The likeliest tokens of a teacher's output head: `[M, H]`, `[V, H]` -> M rows."""
    return Likely.joined([Likely.of(logits) for _, logits in _Gradient(hidden, weight).logits()])


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row, `[K, count]`, and their places.

    They are in those `count` parts of the row whose largest numbers are the largest. PyTorch's own search of
    a whole row takes more than twice as long.
    """
    width = -(-logits.shape[-1] // max(count, math.isqrt(logits.shape[-1])))
    parts = F.pad(logits, (0, -logits.shape[-1] % width), value=-math.inf).view(len(logits), -1, width)
    best = parts.amax(-1).topk(min(count, parts.shape[1])).indices
    values, places = parts.gather(1, best[..., None].expand(-1, -1, width)).flatten(1).topk(count)
    return values, best.gather(1, places // width) * width + places % width


def distillation(
    hidden: Tensor, weight: Tensor, teacher: Likely, rows: Tensor, divergence: Divergence = "forward-kl"
) -> tuple[Tensor, Tensor]:
    """Compare a student's output head with its teacher's.

    Args:
        hidden: `[M, H]` inputs of the student's head.
        weight: `[V, H]` of the student's head. It gets a gradient only if it requires one.
        teacher: K rows, whose tokens are rows of `weight`.
        rows: `[M]` int64, the teacher's row for each row of the student.
        divergence: what is computed.

    Returns:
        The mean divergence in nats a row (total variation: 0 to 1), and the share of rows whose likeliest
        token is the teacher's. Scalars, float32; the share has no gradient.
    """
    loss, agreement = _Distillation.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, teacher.tokens[rows], teacher.probabilities[rows], divergence)
    )
    return loss, agreement.detach()


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, p: Tensor, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        gradient = _Gradient(hidden, weight)
        loss, agree = torch.zeros((), device=hidden.device), torch.zeros((), device=hidden.device)
        for rows, logits in gradient.logits():
            log_q = logits.log_softmax(-1)
            agree += ((log_q.argmax(-1) == tokens[rows, 0]) & (p[rows, 0] > 0)).sum()
            values, error = _diverge(tokens[rows], p[rows], log_q, divergence)
            loss += values.sum()
            gradient.add(rows, error)
        ctx.save_for_backward(gradient.hidden, gradient.weight)
        ctx.count, ctx.dtypes = max(len(hidden), 1), (hidden.dtype, weight.dtype)
        return loss / ctx.count, agree / ctx.count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        scale, kept = grad / ctx.count, zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        given = (None if part is None else (part * scale).to(dtype) for part, dtype in kept)
        return *given, None, None, None


def _diverge(tokens: Tensor, p: Tensor, log_q: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Divergences `[M]`, and their gradients with respect to the student's logits, `[M, V]`.

    `tokens` and `p` are `[M, n]`, the teacher's; `log_q` `[M, V]`, the student's.
    """
    q = log_q.exp()
    if divergence == "reverse-kl":
        log_p = torch.full_like(log_q, ABSENT).scatter_reduce_(1, tokens, p, "amax").log_()
        slope = log_q - log_p
        mean = (q * slope).sum(-1, keepdim=True)
        return mean[:, 0], q * (slope - mean)
    share = p.sum(-1, keepdim=True)
    log_there = log_q.gather(1, tokens)
    there = log_there.exp()
    kl = torch.xlogy(p, p).sum(-1) - (p * log_there).sum(-1)
    if divergence == "forward-kl":
        return kl, (q * share).scatter_add_(1, tokens, -p)
    accepted = torch.minimum(p, there).sum(-1, keepdim=True)
    below = there * (there < p)  # acceptance grows with these
    part = torch.exp(-SHARPNESS * accepted) if divergence == "lk" else torch.zeros_like(share)
    values = part[:, 0] * kl + (1 - part[:, 0]) * (1 - accepted[:, 0])
    error = q * (part * share + (1 - part) * below.sum(-1, keepdim=True))
    return values, error.scatter_add_(1, tokens, -part * p - (1 - part) * below)


class _Gradient:
    """Computes the gradients of a mean over rows from those with respect to the logits, chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        dtype = product_dtype(hidden)
        self.x, self.w = hidden.to(dtype), weight.to(dtype)
        self.hidden = torch.empty_like(self.x) if hidden.requires_grad else None
        self.weight = torch.zeros_like(self.w, dtype=torch.float32) if weight.requires_grad else None

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """The logits of some rows at a time, `[rows, V]` float32."""
        size = GPU_CHUNK if self.x.is_cuda else CHUNK
        for begin in range(0, len(self.x), size):
            rows = slice(begin, begin + size)
            yield rows, (self.x[rows] @ self.w.t()).float()

    def add(self, rows: slice, error: Tensor) -> None:
        """Add a chunk. `error` `[rows, V]` is the gradient with respect to its logits."""
        error = error.to(self.x.dtype)
        if self.hidden is not None:
            self.hidden[rows] = error @ self.w
        if self.weight is not None:
            self.weight += error.t() @ self.x[rows]


def product_dtype(x: Tensor) -> torch.dtype:
    """The type of products: autocast's, or float32."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
